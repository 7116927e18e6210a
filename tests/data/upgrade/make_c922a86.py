"""Made c922a86.tar.zst: what the code of commit c922a86 leaves on disk when it is killed. Runs only with that commit:

PYTHONPATH=<worktree of c922a86> python tests/data/upgrade/make_c922a86.py <output>

Paths below ROOT are part of what is stored, so the tests know it too. Names of modules are those of c922a86.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import zstandard
from pipeline.jobs.export import export
from pipeline.source_options import SourceOptions
from sidecar.instance import StateDirectory
from sidecar.uploader_job import KeptPins, UploaderJob, Writer

import fetcher
from fetcher.serving.group_offsets import GroupOffsets
from fetcher.serving.group_state import GroupLog
from fetcher.serving.retries.retry_log import RetryLog
from fetcher.serving.retries.retry_queue import RetryLimits, RetryQueues
from fetcher.serving.retries.retry_record import sent_back
from tests.fetcher.broker_store_writer import WrittenStore
from tests.pipeline.conftest import LOCAL
from tests.pipeline.gapped_archive import LIGHT, ONE, OTHER, GappedArchive
from tests.pipeline.jobs.inline_tasks import InlineTasks
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.pins import PinLimits
from tiered.catalog.protocol import CatalogWriter
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.formats.record import decode_record
from tiered.object_store.file import FileStore
from tiered.object_store.metrics import StoreMetrics
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import FetchSettings, Settings

ROOT = Path("/tmp/tiered-c922a86")


def uploader() -> None:
    """A sidecar that archived, pinned what the broker then deleted, and was killed while it owned the epoch."""
    root = ROOT / "uploader"
    store = WrittenStore(root / "store")
    _put(store, 100)
    default = Settings()
    settings = replace(
        default,
        broker=replace(default.broker, store_path=str(root / "store")),
        offload=replace(default.offload, batch_age_ms=100),
        archive=replace(default.archive, url=(root / "archive").as_uri(), cluster="c", broker="b"),
    )
    kept = KeptPins()
    with StateDirectory(root / "state") as state:
        identity = state.identity()
        ended = threading.Event()
        writer = Writer(identity, "run", False, state.path, committed=lambda _: ended.set(), pins=kept)
        UploaderJob(settings, writer, StoreMetrics()).run(ended)
        _put(store, 200)
        job = UploaderJob(settings, replace(writer, committed=lambda _: None), StoreMetrics())
        keeper = kept.keeper
        assert keeper is not None
        keeper.limits = PinLimits(0.999, 0.9999)
        log = CommitLog([root / "store" / "commitlog"], pinned=keeper.files)
        status = keeper.step(log.files, 0)
        assert len(status.pins) > 2
        for file in log.files[:2]:
            file.path.unlink()
        job.close()
    archive = PrefixedStore(FileStore(root / "archive"), archive_prefix("c", "b"))
    CatalogWriter(
        archive, cluster="c", broker="b", instance=identity, kind="run", clock_ms=lambda: 1_700_000_000_000
    ).claim()


def _put(store: WrittenStore, count: int) -> None:
    for _ in range(count):
        for queue_id in range(2):
            end = max(store.records.get(("t", queue_id), {}), default=-1) + 1
            store.put("t", queue_id, b"message %d " % end + b"x" * 500, tags="TagA")


def reading() -> None:
    """An archive read through a disk cache."""
    root = ROOT / "reading"
    made = GappedArchive(root / "archive")
    made.put(ONE, range(10))
    made.put(OTHER, range(5), [LIGHT])
    shutil.copytree(root / "archive", root / "early")
    made.put(ONE, range(15, 25))
    settings = Settings(fetch=FetchSettings(disk_cache_path=str(root / "disk")))
    with fetcher.open(made.url, settings=settings) as archive:
        for queue in (ONE, OTHER, LIGHT):
            assert list(archive.queue(queue.topic, queue.queue_id).messages())


def groups() -> None:
    """The same archive's consumer groups: a server of `tiered serve` that was killed."""

    async def serve() -> None:
        store = PrefixedStore(FileStore(ROOT / "reading" / "archive"), archive_prefix("cluster", "broker"))
        now_ms = 1_700_000_000_000
        offsets = GroupOffsets(GroupLog(store, "killed-server", lambda: now_ms), lease_ms=60_000)
        queues = RetryQueues(RetryLog(store, "killed-server"), offsets, RetryLimits(), lambda: now_ms)
        await offsets.claim()
        await queues.claim()
        work = [asyncio.create_task(offsets.run()), asyncio.create_task(queues.run())]
        await offsets.commit("g", "one", 0, 7)
        await offsets.commit("g", "other", 1, 3)
        await offsets.commit("h", "one", 0, 20)
        with fetcher.open((ROOT / "reading" / "archive").as_uri()) as archive:
            source = decode_record(bytes(next(iter(archive.queue("one", 0).messages())).data))
        await queues.add(sent_back(source, "g", delay_level=1, times_max=16))
        now_ms += 1_500
        queues._wake.set()
        for _ in range(200):
            if "%RETRY%g" in queues.state.queues:
                break
            await asyncio.sleep(0.02)
        await queues.add(sent_back(source, "g", delay_level=18, times_max=16))
        await queues.add(sent_back(source, "g", delay_level=-1, times_max=16))
        for _ in range(200):
            if "%DLQ%g" in queues.state.queues:
                break
            await asyncio.sleep(0.02)
        assert {"%RETRY%g", "%DLQ%g"} == set(queues.state.queues)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    asyncio.run(serve())


def export_job() -> None:
    """An export killed after two parts of its first batch."""
    tasks = iter(range(2))

    def die(_: object) -> None:
        if next(tasks, None) is None:
            raise UnavailableError("killed")

    options = SourceOptions((ROOT / "reading" / "archive").as_uri(), partition_bytes=300)
    try:
        export(None, options, (ROOT / "export").as_uri(), tasks=InlineTasks(die))  # type: ignore[arg-type]
    except UnavailableError:
        return
    raise AssertionError("the export was not killed")


def stream() -> None:
    """A Spark stream that has read the archive as it was before its last commit."""
    import pipeline

    places = {
        "spark.local.dir": "/tmp/tiered-spark",
        "spark.sql.warehouse.dir": "/tmp/tiered-spark/warehouse",
    }
    spark = pipeline.session("c922a86", **(LOCAL | places))
    query = (
        spark.readStream.format("rocketmq-tiered")
        .option("columns", "topic,generation,queueId,queueOffset")
        .option("maxRowsPerTrigger", 6)
        .load((ROOT / "reading" / "early").as_uri())
        .writeStream.format("parquet")
        .option("checkpointLocation", str(ROOT / "stream" / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(ROOT / "stream" / "out"))
    )
    assert query.awaitTermination(120)
    spark.stop()


def main(
    output: Path, parts: tuple[Callable[[], None], ...] = (uploader, reading, groups, export_job, stream)
) -> None:
    shutil.rmtree(ROOT, ignore_errors=True)
    for part in parts:
        part()
    shutil.rmtree(ROOT / "reading" / "early")
    compressor = zstandard.ZstdCompressor(level=19)
    with (
        output.open("wb") as file,
        compressor.stream_writer(file) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        archive.add(ROOT, arcname=".")
    names = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())
    print(json.dumps(names, indent=0), output.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
