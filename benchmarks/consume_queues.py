"""Consume queues in files and in RocksDB side by side: ``python -m benchmarks.consume_queues --out results.jsonl``.

Many queues with few units each, put a few at a time, as a log brings them; then read at random. One JSON line a kind.
Owns this one experiment.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.recording import loaded
from benchmarks.report import Row
from tiered.consume_queue.index import UNIT_DTYPE
from tiered.consume_queue.open_store import open_for_writing
from tiered.consume_queue.store import ConsumeQueueStore, LogView, StoreKind
from tiered.model.tables import Table

PUT_UNITS = 20
GETS = 20_000
GET_UNITS = 32
RECORD_BYTES = 400
MIB = 1024 * 1024
_LOG = LogView(lambda: 0, lambda phys: np.zeros(len(phys), np.int64))


def main() -> int:
    """Measure both kinds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.consume_queues", description=main.__doc__)
    parser.add_argument("--queues", type=int, default=100_000)
    parser.add_argument("--units", type=int, default=100, help="units of each queue")
    parser.add_argument(
        "--directory", type=Path, help="where the queues are written (default: a temporary one)"
    )
    parser.add_argument("--out", type=Path, default=Path("consume_queues.jsonl"))
    options = parser.parse_args()
    rows = []
    for kind in (StoreKind.FILE, StoreKind.ROCKSDB):
        with tempfile.TemporaryDirectory(dir=options.directory) as name:
            rows.append(measured(Path(name), kind, options.queues, options.units))
    with options.out.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(loaded(row)) + "\n" for row in rows)
    print(table(rows))
    return 0


def measured(path: Path, kind: StoreKind, queues: int, units: int) -> Row:
    """Figures of one kind. The files of a broker have their whole size, of which most is a hole."""
    with closing(open_for_writing(path, kind, _LOG)) as store:
        begun_s = time.perf_counter()
        for topic, part in _puts(queues, units):
            store.put(topic, 0, part)
        put_s = time.perf_counter() - begun_s
        store.flush(queues * units * RECORD_BYTES)
        flushed_s = time.perf_counter() - begun_s
        get_s = _get_s(store, queues, units)
    files = [file.stat() for file in path.rglob("*") if file.is_file()]
    return {
        "what": kind.value,
        "queues": queues,
        "units": queues * units,
        "disk_mib": sum(file.st_blocks for file in files) * 512 / MIB,
        "size_mib": sum(file.st_size for file in files) / MIB,
        "files": len(files),
        "put_units_per_s": queues * units / put_s,
        "flush_s": flushed_s - put_s,
        "get_units_per_s": GETS * min(GET_UNITS, units) / get_s,
        "get_us": get_s / GETS * 1e6,
    }


def _puts(queues: int, units: int) -> Iterator[tuple[str, Table]]:
    part = np.zeros(PUT_UNITS, UNIT_DTYPE)
    part["size"], part["inner_num"], part["store_timestamp"] = RECORD_BYTES, 1, 1_700_000_000_000
    step = np.arange(PUT_UNITS)
    for first in range(0, units, PUT_UNITS):
        part["queue_offset"] = first + step
        for queue in range(queues):
            part["phys"] = ((first * queues) + queue * PUT_UNITS + step) * RECORD_BYTES
            yield f"topic-{queue:06d}", part[: units - first]


def _get_s(store: ConsumeQueueStore, queues: int, units: int) -> float:
    chance = random.Random(1)
    begun_s = time.perf_counter()
    for _ in range(GETS):
        first = chance.randrange(max(units - GET_UNITS, 0) + 1)
        found = store.units(f"topic-{chance.randrange(queues):06d}", 0, first, GET_UNITS)
        assert len(found) == min(GET_UNITS, units)
    return time.perf_counter() - begun_s


def table(rows: list[Row]) -> str:
    """Both kinds, side by side, as Markdown."""
    lines = ["| | " + " | ".join(str(row["what"]) for row in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for name in [name for name in rows[0] if name != "what"]:
        lines.append(
            f"| {name.replace('_', ' ')} | " + " | ".join(f"{row[name]:,.0f}" for row in rows) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
