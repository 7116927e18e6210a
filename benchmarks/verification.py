"""Verification: ``python -m benchmarks.verification --gib 5 --commits 100000 --out verification.jsonl``.

full    `verify --full` of an archive in a directory, beside its parts alone: reading each object, decoding its rows and
        keys, decompressing and checking its blocks, and scanning its records, in as many threads
quick   `verify --quick` of an archive of many commits, in memory

A round is the parts, then the whole; compared are medians of CPU and of time. Owns the experiment and its limits.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from benchmarks.machine import note
from benchmarks.recording import loaded
from benchmarks.report import Row
from benchmarks.synthetic_store import StoreSpec, StoreWriter
from tiered.archive.run_passes import LivingRuns
from tiered.archive.verify import READ_THREADS, verify_archive
from tiered.archive.verify_segment import SegmentCheck, rescanned
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.clock import Clock
from tiered.formats.keys import archive_prefix
from tiered.formats.segment_index import SegmentIndex
from tiered.kernels.queue_table import QueueTable
from tiered.object_store.file import FileStore
from tiered.object_store.interface import GET_BYTES_MAX, ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore

SPECS = tuple(StoreSpec(topics=topics, queues_per_topic=4, body_bytes=1024) for topics in (16, 2_500))
T = TypeVar("T")
RATIO_MAX, QUICK_S_MAX = 1.5, 60.0


def main() -> int:
    """Measure; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verification", description=main.__doc__)
    parser.add_argument("--gib", type=float, default=5.0, help="of messages; 0: without")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commits", type=int, default=100_000, help="0: without")
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench-verification"), help="emptied")
    parser.add_argument("--out", type=Path, default=Path("verification.jsonl"))
    options = parser.parse_args()
    is_ok = True
    for row in map(loaded, _measured(options)):
        with options.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        print(json.dumps(row, indent=2))
        is_ok &= bool(row["ok"])
    return int(not is_ok)


def _measured(options: argparse.Namespace) -> Iterator[Row]:
    if options.commits:
        yield _quick(options.commits)
    if options.gib:
        for spec in SPECS:
            shutil.rmtree(options.work, ignore_errors=True)
            try:
                archived = _archived(options.work, spec, int(options.gib * 2**30))
                yield {"queues": spec.topics * spec.queues_per_topic} | _full(archived, options.rounds)
            finally:
                shutil.rmtree(options.work, ignore_errors=True)


def _quick(commits: int) -> Row:
    """Cycles without messages but one: what a quick verification sees of a commit is its name."""
    store, now_ms = MemoryStore(), 1_700_000_000_000
    writer = CatalogWriter(
        store,
        cluster="cluster",
        broker="broker",
        instance="bench",
        kind="run",
        clock=Clock(wall_ms=lambda: now_ms),
    )
    writer.load()
    writer.claim()
    cursor = writer.state.cursor
    draft = CommitDraft(
        CommitKind.APPEND,
        history=cursor.history,
        from_phys=cursor.phys,
        to_phys=cursor.phys,
        check=cursor.check,
        created_ms=now_ms,
    )
    for number in range(commits):
        writer.append(draft)
        if number % 10_000 == 0:
            note(f"{number} commits")
    (wall_s, cpu_s), report = _timed(lambda: verify_archive(store, depth="names"))
    assert report.anomalies == [] and report.counts["versions"] >= commits
    return {
        "what": "quick",
        "commits": commits,
        "seconds": wall_s,
        "cpu_s": cpu_s,
        "seconds_max": QUICK_S_MAX,
        "ok": wall_s <= QUICK_S_MAX,
    }


def _archived(work: Path, spec: StoreSpec, byte_count: int) -> ObjectStore:
    """An archive of so many bytes of messages."""
    made = StoreWriter(work / "store", spec)
    made.append(byte_count // spec.record_bytes)
    made.close()
    command = [
        sys.executable,
        "-m",
        "rocketmq_tiered.cli",
        "backfill",
        str(work / "store"),
        f"file://{work}/archive",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(work / "store")
    return PrefixedStore(FileStore(work / "archive"), archive_prefix(spec.cluster, spec.broker))


def _full(store: ObjectStore, rounds: int) -> Row:
    state = load(store)
    keys = {info.key for prefix in ("data/", "sets/") for info in store.list(prefix)}
    checks = [*LivingRuns(store, state).of_objects(keys).values()]
    _read(store, checks[0])  # compiles what is not compiled yet
    figures: dict[str, list[tuple[float, float]]] = {"parts": [], "full": []}
    for number in range(rounds):
        with ThreadPoolExecutor(READ_THREADS) as pool:
            took, read = _timed(lambda: sum(pool.map(lambda check: _read(store, check), checks)))
        figures["parts"].append(took)
        took, report = _timed(lambda: verify_archive(store, depth="full"))
        assert report.anomalies == []
        figures["full"].append(took)
        note(f"round {number}: {figures}")
    found: Row = {
        "what": "full",
        "objects": len(checks),
        "stored_bytes": read,
        "messages": report.counts["messages"],
    }
    for at, name in enumerate(("seconds", "cpu_s")):
        parts, full = (statistics.median(one[at] for one in figures[which]) for which in figures)
        found |= {f"parts_{name}": parts, f"full_{name}": full, f"{name}_ratio": round(full / parts, 3)}
    is_ok = max(found["seconds_ratio"], found["cpu_s_ratio"]) <= RATIO_MAX
    return found | {"rounds": rounds, "ratio_max": RATIO_MAX, "ok": is_ok}


def _read(store: ObjectStore, check: SegmentCheck) -> int:
    """The parts of one object; its bytes."""
    data = store.get(check.key, GET_BYTES_MAX)
    tail_bytes = int(check.place["tail_bytes"])
    index = SegmentIndex(check.key, len(data), data[-tail_bytes:])
    offset, length = index.key_span
    index.decode_keys(data[offset : offset + length])
    for run in range(len(index)):
        rows = index.row_columns(run)
        for span in index.split_span(run, index.block_span(run, 0, len(rows)), 16 << 20):
            raw = index.decode_blocks(span, data[span.offset : span.offset + span.length])
            part = slice(span.first_row, span.end_row)
            starts = rows.position[part] - span.raw_offset
            rescanned(raw, starts, rows.size[part], rows.phys[part], QueueTable())
    return len(data)


def _timed(run: Callable[[], T]) -> tuple[tuple[float, float], T]:
    """(seconds, CPU seconds of all threads), and the result."""
    begun_s, before_s = time.monotonic(), time.process_time()
    result = run()
    return (round(time.monotonic() - begun_s, 2), round(time.process_time() - before_s, 2)), result


if __name__ == "__main__":
    sys.exit(main())
