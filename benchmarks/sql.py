"""SQL on an archive: ``python -m benchmarks.sql ARCHIVE_URL TOPIC --out results.jsonl``.

Each measurement runs in a process of its own, beside the Python API's reader on the same archive and DuckDB on Parquet
of the same rows. One JSON line each. Owns this one experiment.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb

import rocketmq_tiered
import rocketmq_tiered.sql.session  # what it imports is not measured here
from benchmarks.machine import run_child
from benchmarks.recording import loaded
from benchmarks.report import Row
from tiered.object_store.file import FileStore

SCAN = "SELECT count(*), sum(octet_length(body)), count(DISTINCT tags) FROM {table}"
OF_READER_MIN = 0.8
COUNT_ROWS_PER_S_MIN = 5e6
HOUR_S_MAX, HOUR_REQUESTS_MAX = 1.0, 10
FIRST_ROW_S_MAX = 1.0
PEAK_MIB_MAX = 512
_TIERED = (sys.executable, "-m", "rocketmq_tiered.cli")


def main() -> int:
    """Measure; returns 1 when a figure misses its bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sql", description=main.__doc__)
    parser.add_argument("url")
    parser.add_argument("topic")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("sql.jsonl"))
    parser.add_argument("--child", choices=sorted(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--files", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        meter = _Meter()
        print(json.dumps(meter.row(*CHILDREN[options.child](options, meter))))
        return 0
    with tempfile.TemporaryDirectory() as name:
        options.files = f"{name}/topic=*/*/*.parquet"
        target = ("--topic", options.topic, "--columns", "topic,queueId,tags,body")
        subprocess.run([*_TIERED, "export", options.url, f"file://{name}", *target], check=True)
        rows = [_row(child, options) for child in CHILDREN]
    rows += [_first_row(options)]
    by_name = {row["what"]: row for row in rows}
    by_name["scan"]["of_reader"] = round(
        by_name["scan"]["rows_per_core_s"] / by_name["reader"]["rows_per_core_s"], 2
    )
    by_name["scan"]["ok"] &= by_name["scan"]["of_reader"] >= OF_READER_MIN
    with options.out.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(loaded(row)) + "\n" for row in rows)
    for row in rows:
        print(" ".join(f"{name} {value}" for name, value in row.items()))
    return int(not all(row["ok"] for row in rows))


def _row(child: str, options: argparse.Namespace) -> Row:
    given = (options.url, options.topic, "--child", child, "--files", options.files)
    command = [sys.executable, "-m", "benchmarks.sql", *given]
    done = [subprocess.run(command, check=True, capture_output=True) for _ in range(options.runs + 1)]
    runs = [json.loads(one.stdout) for one in done]
    row: Row = {"what": child} | min(runs[1:], key=lambda run: float(run["cpu_s"]))
    row["ok"] = row["peak_mib"] <= PEAK_MIB_MAX
    if child == "count":
        row["ok"] &= row["rows_per_core_s"] >= COUNT_ROWS_PER_S_MIN
    if child == "hour":
        row["ok"] &= row["wall_s"] <= HOUR_S_MAX and row["requests"] <= HOUR_REQUESTS_MAX
    return row


def _first_row(options: argparse.Namespace) -> Row:
    """The whole command, from its start to its end."""
    command = [
        *_TIERED,
        "sql",
        options.url,
        "--csv",
        f'SELECT queue_offset, text FROM "{options.topic}" LIMIT 1',
    ]
    runs = [run_child(command) for _ in range(options.runs + 1)][1:]
    wall_s = statistics.median(run.wall_s for run in runs)
    return {
        "what": "first row",
        "wall_s": round(wall_s, 3),
        "cpu_s": round(min(run.cpu_s for run in runs), 3),
        "peak_mib": max(run.peak_rss_bytes for run in runs) >> 20,
        "ok": wall_s <= FIRST_ROW_S_MAX,
    }


class _Meter:
    """Time, processor time and requests of the archive's store since ``start``."""

    def __init__(self) -> None:
        self._requests = 0
        for name in ("get_range", "get", "list"):
            setattr(FileStore, name, self._counted(getattr(FileStore, name)))
        self.start()

    def _counted(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **names: Any) -> Any:
            self._requests += 1
            return whole(*arguments, **names)

        return counted

    def start(self) -> None:
        """Begin to measure."""
        self._requests, self._cpu_s, self._wall_s = 0, time.process_time(), time.monotonic()

    def row(self, rows: int, size_bytes: int) -> Row:
        """What was measured, of so many rows."""
        wall_s, cpu_s = time.monotonic() - self._wall_s, time.process_time() - self._cpu_s
        return {
            "rows": rows,
            "mib": size_bytes >> 20,
            "wall_s": round(wall_s, 3),
            "cpu_s": round(cpu_s, 3),
            "requests": self._requests,
            "rows_per_core_s": round(rows / cpu_s),
            "rows_per_s": round(rows / wall_s),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }


def _reader(options: argparse.Namespace, meter: _Meter) -> tuple[int, int]:
    rows = size_bytes = 0
    with rocketmq_tiered.open(options.url) as archive:
        meter.start()
        for queue in archive.queues(options.topic):
            for batch in archive.queue(queue.topic, queue.queue_id).batches():
                rows, size_bytes = rows + len(batch), size_bytes + batch.record_bytes
    return rows, size_bytes


def _ask(options: argparse.Namespace, meter: _Meter, sql: str) -> tuple[Any, ...]:
    with rocketmq_tiered.open(options.url) as archive:
        session = archive.session()
        first = archive.queue(options.topic, 0).earliest_time() or 0
        meter.start()
        row = session.execute(sql.format(table=f'"{options.topic}"', first=first)).fetchone()
        assert row is not None
        return row


def _scan(options: argparse.Namespace, meter: _Meter) -> tuple[int, int]:
    rows, size_bytes, _ = _ask(options, meter, SCAN)
    return int(rows), int(size_bytes)


def _count(options: argparse.Namespace, meter: _Meter) -> tuple[int, int]:
    return int(_ask(options, meter, "SELECT count(*) FROM {table}")[0]), 0


def _times(options: argparse.Namespace, meter: _Meter) -> tuple[int, int]:
    """A count by footers."""
    return int(
        _ask(options, meter, "SELECT count(store_time) FROM {table} WHERE store_timestamp > {first}")[0]
    ), 0


def _hour(options: argparse.Namespace, meter: _Meter) -> tuple[int, int]:
    """One queue for a hundredth of the archive's time."""
    where = "queue_id = 0 AND store_timestamp BETWEEN {first} + 1000 AND {first} + 2000"
    rows, size_bytes = _ask(
        options, meter, f"SELECT count(*), sum(octet_length(body)) FROM {{table}} WHERE {where}"
    )
    return int(rows), int(size_bytes or 0)


def _parquet(options: argparse.Namespace, meter: _Meter) -> tuple[int, int]:
    connection = duckdb.connect(config={"memory_limit": "256MiB", "threads": "2"})
    meter.start()
    row = connection.execute(SCAN.format(table=f"read_parquet('{options.files}')")).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


CHILDREN = {
    "reader": _reader,
    "scan": _scan,
    "count": _count,
    "times": _times,
    "hour": _hour,
    "parquet": _parquet,
}


if __name__ == "__main__":
    sys.exit(main())
