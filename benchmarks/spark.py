"""Compares Spark over an archive with Parquet and with this project's own reader: ``python -m benchmarks.spark``.

Synthetic messages, 10^7 small ones and 10^6 of 1 KiB (``--small``, ``--kib``), are archived by a backfill into a
directory, then read in one session of two cores: in full (by ``read``, and by ``spark.read``, of which Spark
copies every row once more), bodies and their place, headers only, and 1 % of the time.
Everything is warm in the page cache, every figure is the median over runs, and the noise of others is printed beside.
Our own reader runs in this process as in any: without the malloc settings of Spark's workers; and once more as a
process a core, because two threads of one core take longer each than one alone. One JSON line per measurement and per
target goes to ``--out``. Owns the measuring; targets are in spark_report.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import to_arrow_schema

from benchmarks.machine import busy_core_s, others_cores
from benchmarks.recording import loaded
from benchmarks.spark_processes import WorkerWatch, all_core_s, jvm_core_s
from benchmarks.spark_range import BROKER, CLUSTER, Archived, range_bytes
from benchmarks.spark_report import (
    BODIES,
    FULL,
    FULL_OF_SOURCE,
    HEADER_ONLY,
    NOTHING,
    ONE_PERCENT,
    OWN_COLUMNS,
    OWN_COLUMNS_A_CORE,
    OWN_RECORDS,
    RANGE_BYTES,
    Row,
    print_profile,
    targets,
)
from benchmarks.stores import StoreProfile, ensure_store
from rocketmq_tiered.message_table.batches.message_batches import read_partition
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import SOURCE_NAME, parse_options
from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from rocketmq_tiered.spark import read, session
from rocketmq_tiered.spark.source.data_source import schema_of
from tests.archive.queue_reader import QueueReader
from tiered.archive.segment_reader import SegmentCache
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex, living_runs
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import OffloadSettings
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CORES = 2
PROFILES = (StoreProfile("small", 10_000_000, 100, 4, 4), StoreProfile("1k", 1_000_000, 1024, 4, 4))
HEADERS = ["queueId", "queueOffset", "storeTimestamp"]
BODY_COLUMNS = ["topic", "queueId", "queueOffset", "storeTimestamp", "body"]
"""Typical columns, comparable with the records that our own reader returns."""
OWN_READ_ROWS, OWN_READ_BYTES = 16_384, 8 << 20


def main() -> int:
    """Measure every profile; exit code 1 when a target is missed."""
    options = _arguments()
    options.dir.mkdir(parents=True, exist_ok=True)
    readers = ProcessPoolExecutor(CORES, get_context("spawn"))
    spark = session("benchmark", **_session_settings(options.dir))
    rows: list[Row] = []
    try:
        for profile in PROFILES:
            messages = {"small": options.small, "1k": options.kib}[profile.name]
            if messages:
                archived = _archived(options.dir, replace(profile, messages=messages))
                mine = _measured(spark, readers, archived, options.dir, options.runs)
                print_profile(mine)
                rows += mine + targets(mine)
    finally:
        readers.shutdown()
        spark.stop()
    if options.out is not None:
        options.out.write_text("".join(json.dumps(loaded(row)) + "\n" for row in rows))
    return 0 if all(row.get("met", True) for row in rows) else 1


def _arguments() -> argparse.Namespace:
    small, kib = (profile.messages for profile in PROFILES)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--dir", type=Path, default=Path("/tmp/tiered-bench-spark"), help="stores and archives"
    )
    parser.add_argument(
        "--small", type=int, default=small, metavar="N", help="messages of 100 bytes; 0: none"
    )
    parser.add_argument("--kib", type=int, default=kib, metavar="N", help="messages of 1 KiB; 0: none")
    parser.add_argument("--runs", type=int, default=2)
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
                broker_store,
                FileStore(root),
                OffloadIdentity(CLUSTER, BROKER, "bench", "backfill"),
                OffloadSettings(),
                topic_filter=TopicFilter(),
                offsets_source=no_offsets,
            ).run(threading.Event(), follow=False)
        (root / "done").touch()
    archive = PrefixedStore(FileStore(root), archive_prefix(CLUSTER, BROKER))
    state = load(archive)
    pages = [page.chunk for page in living_runs(RunIndex(archive), state)]
    return Archived(
        profile,
        root,
        messages=int(state.table["row_count"].sum()),
        raw_bytes=sum(int(chunk.runs["byte_count"].sum()) for chunk in pages),
        stored_bytes=sum(int(chunk.objects["size_bytes"].sum()) for chunk in pages),
        first_ms=min(int(chunk.runs["min_store_timestamp"].min()) for chunk in pages),
        last_ms=max(int(chunk.runs["max_store_timestamp"].max()) for chunk in pages),
    )


def _measured(
    spark: SparkSession, readers: Executor, archived: Archived, directory: Path, runs: int
) -> list[Row]:
    whole = read(spark, archived.url)
    of_source = spark.read.format(SOURCE_NAME).load(archived.url)
    headers = read(spark, archived.url, columns=HEADERS)
    bodies = read(spark, archived.url, columns=BODY_COLUMNS)
    begin, end = _one_percent(archived)
    few = read(spark, archived.url, pushFilters="true").where(
        f"storeTimestamp >= {begin} and storeTimestamp < {end}"
    )
    none = read(spark, archived.url, pushFilters="true").where(f"storeTimestamp < {archived.first_ms}")
    parquet = directory / f"parquet-{archived.profile.name}-{archived.profile.messages}"
    if not (parquet / "_SUCCESS").exists():
        whole.write.mode("overwrite").parquet(str(parquet))
    same = spark.read.parquet(str(parquet))
    work: dict[str, Callable[[], None]] = {
        OWN_RECORDS: lambda: _read_alone(archived),
        OWN_COLUMNS: lambda: _columns_alone(archived),
        OWN_COLUMNS_A_CORE: lambda: _columns_a_core(archived, readers),
        FULL: lambda: _drain(whole),
        FULL_OF_SOURCE: lambda: _drain(of_source),
        BODIES: lambda: _drain(bodies),
        HEADER_ONLY: lambda: _drain(headers),
        ONE_PERCENT: lambda: _drain(few),
        NOTHING: lambda: _drain(none),
        "Parquet, full scan": lambda: _drain(same),
        "Parquet, header-only scan": lambda: _drain(same.select(*HEADERS)),
    }
    rows = [row for what, action in work.items() for row in _timed(archived, what, action, runs)]
    return [
        *rows,
        {"profile": archived.profile.name, "what": RANGE_BYTES, **range_bytes(archived, begin, end)},
    ]


def _timed(archived: Archived, what: str, action: Callable[[], None], runs: int) -> list[Row]:
    action()  # kernels, JIT, page cache
    rows = []
    for run in range(runs):
        watch = WorkerWatch()
        watch.start()
        busy, own, jvm, started = busy_core_s(), all_core_s(), jvm_core_s(), time.perf_counter()
        action()
        wall_s, core_s, jvm_s = time.perf_counter() - started, all_core_s() - own, jvm_core_s() - jvm
        others = others_cores(busy, core_s, wall_s)
        watch.stop()
        rows.append(
            {
                "profile": archived.profile.name,
                "what": what,
                "run": run,
                "wall_s": round(wall_s, 3),
                "core_s": round(core_s, 3),
                "jvm_core_s": round(jvm_s, 3),
                "others_cores": others,
                "messages": archived.messages,
                "raw_bytes": archived.raw_bytes,
                "stored_bytes": archived.stored_bytes,
                "worker_peak_bytes": watch.peak_bytes,
            }
        )
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
    assert _columns_of(archived.url, 0, 1) == archived.messages


def _columns_a_core(archived: Archived, readers: Executor) -> None:
    """The same in a process a core at once, each with its share of the partitions."""
    shares = [readers.submit(_columns_of, archived.url, number, CORES) for number in range(CORES)]
    assert sum(share.result() for share in shares) == archived.messages


def _columns_of(url: str, number: int, of: int) -> int:
    """Read every ``of``-th partition from ``number`` on; how many rows they have."""
    options = parse_options({"path": url})
    columns = chosen(())
    schema = to_arrow_schema(schema_of(columns), timezone="UTC")
    parts = plan(options, pinned_versions(options), Predicate(), is_header_only=False)
    return sum(
        batch.num_rows
        for part in parts[number::of]
        for batch in read_partition(part, options, Predicate(), columns, schema)
    )


def _one_percent(archived: Archived) -> tuple[int, int]:
    """[begin, end) of store timestamps, in the middle."""
    span = archived.last_ms + 1 - archived.first_ms
    begin = archived.first_ms + span // 2
    return begin, begin + max(span // 100, 1)


if __name__ == "__main__":
    sys.exit(main())
