"""Spark over an archive, beside Spark over Parquet and this project's own reader: ``python -m benchmarks.spark``.

Synthetic messages, small (10^7 by default) and of 1 KiB, are archived by a back-fill into a directory, then read in
one session of two cores: in full, headers only, and 1 % of the time. Everything is warm in the page cache, every
figure is the median over runs, and the noise of others is printed beside. One JSON line per measurement goes to
``--out``. Owns the measuring and the targets; the data source is pipeline's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.pandas.types import to_arrow_schema

import pipeline
from benchmarks.machine import busy_core_s, others_cores, process_core_s
from benchmarks.stores import StoreProfile, ensure_store
from pipeline.archive_plan import pinned_versions, plan
from pipeline.archive_scan import ArchiveScanner
from pipeline.columns import chosen
from pipeline.partition_reader import read_partition
from pipeline.predicate import Allowed, Predicate
from pipeline.source_options import parse_options
from pipeline.spark_types import schema_of
from tiered.broker_store.store import open_broker_store
from tiered.catalog.pages import RunIndex
from tiered.catalog.reading import load
from tiered.flat_file.composite_flat_file import QueueReader
from tiered.flat_file.segment_reader import SegmentCache
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.protocol import ObjectStore
from tiered.settings.sections import OffloadSettings
from uploader.bound_source import no_word
from uploader.offload import Offloader, OffloadIdentity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CORES = 2
CLUSTER, BROKER = "BenchCluster", "bench-a"
PROFILES = (StoreProfile("small", 10_000_000, 100, 4, 4), StoreProfile("1k", 2_000_000, 1024, 4, 4))
HEADERS = ["queueId", "queueOffset", "storeTimestamp"]
OWN_READ_ROWS, OWN_READ_BYTES = 16_384, 8 << 20
SAMPLE_S = 0.05

FULL_SHARE_MIN = 0.50
HEADER_ROWS_PER_S_MIN = 1_000_000
RANGE_TIME_SHARE_MAX = 0.05
RANGE_BYTES_FACTOR_MAX = 1.2
WORKER_BYTES_MAX = 512 << 20
OWN_RECORDS, OWN_COLUMNS = "own reader, records", "own reader, the same columns"
FULL, HEADER_ONLY, ONE_PERCENT, NOTHING = (
    "full scan",
    "header-only scan",
    "1 % of the time",
    "no row: a job's start",
)
RANGE_BYTES = "bytes of 1 %"
Row = dict[str, Any]


@dataclass(frozen=True)
class Archived:
    """One archived profile."""

    profile: StoreProfile
    root: Path
    messages: int
    raw_bytes: int
    stored_bytes: int
    first_ms: int
    last_ms: int

    @property
    def url(self) -> str:
        """Where it is."""
        return f"file://{self.root}"


def main() -> int:
    """Measure every profile; exit code 1 when a target is missed."""
    options = _arguments()
    options.dir.mkdir(parents=True, exist_ok=True)
    spark = pipeline.session("benchmark", **_session_settings(options.dir))
    rows: list[Row] = []
    try:
        for profile in PROFILES:
            if options.profile in (None, profile.name):
                archived = _archived(options.dir, profile.scaled(options.scale))
                rows += _measured(spark, archived, options.dir, options.runs)
    finally:
        spark.stop()
    if options.out is not None:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return _report(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--dir", type=Path, default=Path("/tmp/tiered-bench-spark"), help="stores and archives"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the messages")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", choices=[profile.name for profile in PROFILES])
    parser.add_argument("--out", type=Path, help="results, JSON lines")
    return parser.parse_args()


def _session_settings(directory: Path) -> dict[str, str]:
    return {
        "spark.master": f"local[{CORES}]",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(directory / "local"),
        "spark.log.level": "ERROR",
    }


# -- what is measured -----------------------------------------------------------------------------------------


def _archived(directory: Path, profile: StoreProfile) -> Archived:
    store = ensure_store(directory, profile)
    root = directory / f"archive-{profile.name}-{profile.messages}"
    if not (root / "done").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        with open_broker_store(store.path) as broker_store:
            Offloader(
                broker_store, FileStore(root), OffloadIdentity(CLUSTER, BROKER, "bench", "backfill"),
                OffloadSettings(), topic_filter=TopicFilter(), word_source=no_word,
            ).run(threading.Event(), follow=False)  # fmt: skip
        (root / "done").touch()
    archive = PrefixedStore(FileStore(root), archive_prefix(CLUSTER, BROKER))
    state = load(archive)
    pages = [page.chunk for page in RunIndex(archive).all_runs(state)]
    return Archived(
        profile,
        root,
        messages=int(state.table["row_count"].sum()),
        raw_bytes=sum(int(chunk.runs["byte_count"].sum()) for chunk in pages),
        stored_bytes=sum(int(chunk.objects["size_bytes"].sum()) for chunk in pages),
        first_ms=min(int(chunk.runs["min_store_timestamp"].min()) for chunk in pages),
        last_ms=max(int(chunk.runs["max_store_timestamp"].max()) for chunk in pages),
    )


def _measured(spark: SparkSession, archived: Archived, directory: Path, runs: int) -> list[Row]:
    whole = pipeline.read(spark, archived.url)
    headers = pipeline.read(spark, archived.url, columns=HEADERS)
    begin, end = _one_percent(archived)
    few = pipeline.read(spark, archived.url, pushFilters="true").where(
        f"storeTimestamp >= {begin} and storeTimestamp < {end}"
    )
    none = pipeline.read(spark, archived.url, pushFilters="true").where(
        f"storeTimestamp < {archived.first_ms}"
    )
    parquet = directory / f"parquet-{archived.profile.name}-{archived.profile.messages}"
    if not (parquet / "_SUCCESS").exists():
        whole.write.mode("overwrite").parquet(str(parquet))
    same = spark.read.parquet(str(parquet))
    work: dict[str, Callable[[], None]] = {
        OWN_RECORDS: lambda: _read_alone(archived),
        OWN_COLUMNS: lambda: _columns_alone(archived),
        FULL: lambda: _drain(whole),
        HEADER_ONLY: lambda: _drain(headers),
        ONE_PERCENT: lambda: _drain(few),
        NOTHING: lambda: _drain(none),
        "Parquet, full scan": lambda: _drain(same),
        "Parquet, header-only scan": lambda: _drain(same.select(*HEADERS)),
    }
    rows = [row for what, action in work.items() for row in _timed(archived, what, action, runs)]
    return [
        *rows,
        {"profile": archived.profile.name, "what": RANGE_BYTES, **_range_bytes(archived, begin, end)},
    ]


def _timed(archived: Archived, what: str, action: Callable[[], None], runs: int) -> list[Row]:
    action()  # kernels, JIT, page cache
    rows = []
    for run in range(runs):
        watch = _WorkerWatch()
        watch.start()
        busy, own, started = busy_core_s(), _own_core_s(), time.perf_counter()
        action()
        wall_s, core_s = time.perf_counter() - started, _own_core_s() - own
        others = others_cores(busy, core_s, wall_s)
        watch.stop()
        rows.append({
            "profile": archived.profile.name, "what": what, "run": run, "wall_s": round(wall_s, 3),
            "core_s": round(core_s, 3), "others_cores": others, "messages": archived.messages,
            "raw_bytes": archived.raw_bytes, "stored_bytes": archived.stored_bytes,
            "worker_peak_bytes": watch.peak_bytes,
        })  # fmt: skip
    return rows


def _drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _read_alone(archived: Archived) -> None:
    """Every queue in order, block after block: what one process of ours does to hand out every record."""
    store = PrefixedStore(FileStore(archived.root), archive_prefix(CLUSTER, BROKER))
    state, segments, run_index = load(store), SegmentCache(store), RunIndex(store)
    found = 0
    for queue in state.visible_queues():
        reader = QueueReader(store, state, queue, segments=segments, run_index=run_index)
        offset = reader.min_offset
        while offset < reader.max_offset:
            batch = reader.read(offset, max_rows=OWN_READ_ROWS, max_bytes=OWN_READ_BYTES)
            found, offset = found + len(batch), batch.next_offset
    assert found == archived.messages


def _columns_alone(archived: Archived) -> None:
    """The columns Spark gets, as Arrow batches, in one process."""
    options = parse_options({"path": archived.url})
    columns = chosen(())
    schema = to_arrow_schema(schema_of(columns), timezone="UTC")
    parts = plan(options, pinned_versions(options), Predicate(), is_header_only=False)
    found = sum(
        batch.num_rows
        for part in parts
        for batch in read_partition(part, options, Predicate(), columns, schema)
    )
    assert found == archived.messages


def _one_percent(archived: Archived) -> tuple[int, int]:
    """[begin, end) of store timestamps, in the middle."""
    span = archived.last_ms + 1 - archived.first_ms
    begin = archived.first_ms + span // 2
    return begin, begin + max(span // 100, 1)


class _CountingStore:
    """Counts the bytes of ranged reads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.url = store.url
        self.read_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """As the store's, counted."""
        self.read_bytes += length
        return self._store.get_range(key, offset, length)


def _range_bytes(archived: Archived, begin: int, end: int) -> Row:
    """Bytes a scan of the range reads, beside those of the blocks that hold its messages and of the messages."""
    options = parse_options({"path": archived.url})
    predicate = Predicate({"storeTimestamp": Allowed(begin, end - 1)})
    store = _CountingStore(PrefixedStore(FileStore(archived.root), archive_prefix(CLUSTER, BROKER)))
    scanner = ArchiveScanner(
        store,
        predicate,
        with_records=True,
        window_bytes=options.batch_bytes,
        on_corrupt=_never,  # type: ignore[arg-type]
    )
    parts = plan(options, pinned_versions(options), predicate, is_header_only=False)
    message_bytes = sum(int(chunk.size.sum()) for part in parts for chunk in scanner.chunks(part))
    tails = {(ref.key, ref.tail_bytes) for part in parts for ref in part.objects}
    return {
        "read_bytes": store.read_bytes,
        "block_bytes": store.read_bytes - sum(size for _, size in tails),
        "message_bytes": round(message_bytes * archived.stored_bytes / archived.raw_bytes),
    }


def _never(place: object) -> None:
    raise AssertionError(f"damage in a benchmark's archive: {place}")


class _WorkerWatch(threading.Thread):
    """Largest VmHWM of any Python worker below this process, since it began (workers outlive a run)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._finished = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._finished.wait(SAMPLE_S):
            for pid in _descendants(os.getpid()):
                self.peak_bytes = max(self.peak_bytes, _worker_bytes(pid))

    def stop(self) -> None:
        self._finished.set()
        self.join()


def _descendants(pid: int) -> list[int]:
    children = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(child) for child in tasks.read_text().split()]
        except OSError:
            continue
    return children + [below for child in children for below in _descendants(child)]


def _own_core_s() -> float:
    """CPU seconds of this process, the JVM and all workers that live."""
    own = os.getpid()
    return sum(map(process_core_s, (own, *_descendants(own))))


def _worker_bytes(pid: int) -> int:
    try:
        if b"pyspark.daemon" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return 0
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    peaks = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0].split()[1]) * 1024 if peaks else 0


# -- what it means --------------------------------------------------------------------------------------------


def _report(rows: list[Row]) -> int:
    missed = 0
    for profile in dict.fromkeys(row["profile"] for row in rows):
        mine = [row for row in rows if row["profile"] == profile]
        missed += _report_profile(profile, mine)
    return 1 if missed else 0


def _report_profile(profile: str, rows: list[Row]) -> int:
    timed = [row for row in rows if "wall_s" in row]
    messages, raw_bytes, stored_bytes = (timed[0][name] for name in ("messages", "raw_bytes", "stored_bytes"))
    print(f"\n{profile}: {messages:,} messages, {raw_bytes / 1e9:.2f} GB, stored {stored_bytes / 1e9:.2f} GB")
    print(
        f"  {'':29}{'s':>8}{'core s':>8}{'rows/s':>12}{'MB/s':>7}{'MB/core s':>10}{'others':>7}{'worker MiB':>11}"
    )
    walls: dict[str, float] = {}
    cores: dict[str, float] = {}
    for what in dict.fromkeys(row["what"] for row in timed):
        some = [row for row in timed if row["what"] == what]
        wall_s, core_s = (statistics.median(row[name] for row in some) for name in ("wall_s", "core_s"))
        walls[what], cores[what] = wall_s, core_s
        rates = f"{messages / wall_s:12,.0f}{raw_bytes / wall_s / 1e6:7.0f}{raw_bytes / max(core_s, 0.01) / 1e6:10.0f}"
        others = max(row["others_cores"] for row in some)
        peak = max(row["worker_peak_bytes"] for row in some) >> 20
        shown = " " * len(rates) if what in (ONE_PERCENT, NOTHING) else rates
        print(f"  {what:29}{wall_s:8.2f}{core_s:8.2f}{shown}{others:7.2f}{peak:11}")
    size = next(row for row in rows if row["what"] == RANGE_BYTES)
    print(
        f"  1 % of the time reads {size['read_bytes']:,} bytes: {size['block_bytes']:,} of blocks, the rest footers;"
    )
    print(f"  its messages are {size['message_bytes']:,} of them")
    worker_bytes = max(row["worker_peak_bytes"] for row in timed)
    range_share = (walls[ONE_PERCENT] - walls[NOTHING]) / walls[FULL]
    range_factor = size["read_bytes"] / max(size["block_bytes"], 1)
    checks = [
        ("full scan per core / own reader, same columns", cores[OWN_COLUMNS] / cores[FULL], FULL_SHARE_MIN, True),
        ("full scan per core / own reader, records", cores[OWN_RECORDS] / cores[FULL], FULL_SHARE_MIN, True),
        ("header-only rows/s", messages / walls[HEADER_ONLY], HEADER_ROWS_PER_S_MIN, True),
        ("(1 % - job start) / full scan", range_share, RANGE_TIME_SHARE_MAX, False),
        ("bytes read of 1 % / its blocks", range_factor, RANGE_BYTES_FACTOR_MAX, False),
        ("peak of a Python worker, bytes", worker_bytes, WORKER_BYTES_MAX, False),
    ]  # fmt: skip
    missed = 0
    for name, found, limit, is_floor in checks:
        good = found >= limit if is_floor else found <= limit
        missed += not good
        print(
            f"  {'ok    ' if good else 'MISSED'} {name}: {found:,.3f} (target {'>=' if is_floor else '<='} {limit:,})"
        )
    return missed


if __name__ == "__main__":
    sys.exit(main())
