"""The block source over file:// with archives of real broker stores: threads, an event loop, disk, damage on disk."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.disk_cache import DiskCache
from fetcher.blocks.segment_source import SegmentSource
from fetcher.io.request_scheduler import LoopRangeReader, Priority, RangeReader, ThreadRangeReader
from fetcher.io.waiting import ThreadTimer, gather, run_async, run_sync
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tiered.archive.segment_reader import SegmentReader
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.clock import Clock
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.keys import archive_prefix
from tiered.model.tables import RunKind
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_async_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import FetchSettings

Place = tuple[str, int, int]
"""Key, size and length of the tail of a data object."""


@pytest.fixture(scope="module")
def archive(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("archive")
    backfill(real_store("B") / "store", FileStore(directory))
    return directory


@pytest.fixture(scope="module")
def store(archive: Path) -> ObjectStore:
    return PrefixedStore(FileStore(archive), archive_prefix(CLUSTER, BROKER))


@pytest.fixture(scope="module")
def places(store: ObjectStore) -> list[Place]:
    state = load(store)
    found: dict[str, Place] = {}
    for queue in state.visible_queues():
        chunk = RunIndex(store).runs_of(state, queue)
        for row in chunk.objects:
            key = chunk.object_keys[int(row["key"])]
            found[key] = key, int(row["size_bytes"]), int(row["tail_bytes"])
    assert len(found) > 3
    return sorted(found.values())


class Opened:
    """A source with real threads."""

    def __init__(self, reader: RangeReader, disk: DiskCache | None = None, **settings: int) -> None:
        self.reader = reader
        self.pool = ThreadPoolExecutor(2)
        self.timer = ThreadTimer()
        self.budget = ByteBudget(settings.get("memory_bytes", 64 << 20))
        self.source = SegmentSource(
            reader,
            FetchSettings(**settings),
            self.budget,
            clock=Clock(),
            decode_pool=self.pool,
            timer=self.timer,
            disk=disk,
        )

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()
        self.reader.close()
        self.pool.shutdown()
        self.timer.close()


async def _run_bytes(source: SegmentSource, place: Place) -> list[bytes]:
    """All bytes of all stored runs of an object."""
    index = await source.index(*place, Priority.USER)
    found = []
    for run in _stored_runs(index.runs["kind"]):
        span = index.block_span(run, 0, int(index.runs["rows"][run]))
        blocks = await source.blocks_at(index, run, range(span.first_block, span.end_block), Priority.USER)
        raw = b"".join(block.tobytes() for block in blocks)
        found.append(raw[-span.raw_offset :][: int(index.runs["byte_count"][run])])
    return found


def _stored_runs(kinds: Iterator[int]) -> list[int]:
    return [run for run, kind in enumerate(kinds) if kind != RunKind.LMQ]


def _plainly(store: ObjectStore, place: Place) -> list[bytes]:
    reader = SegmentReader.open(store, place[0], size_bytes=place[1], tail_bytes=place[2])
    found = []
    for run in _stored_runs(reader.index.runs["kind"]):
        records = reader.read_blocks(run, 0, int(reader.index.runs["rows"][run]))
        found.append(
            b"".join(
                records.data[start : start + size].tobytes()
                for start, size in zip(records.starts.tolist(), records.sizes.tolist(), strict=True)
            )
        )
    return found


def test_threads_read_every_run_as_the_simple_reader_does(store: ObjectStore, places: list[Place]) -> None:
    with Opened(ThreadRangeReader(store, 4)) as opened:
        found = run_sync(gather([_run_bytes(opened.source, place) for place in places]))
        assert found == [_plainly(store, place) for place in places]
        statistics = opened.source.statistics()
        assert statistics.bytes_fetched_twice == 0 and statistics.corrupt_fetched == 0
        assert statistics.peak_bytes <= 64 << 20


def test_many_threads_share_one_source_within_a_small_budget(
    store: ObjectStore, places: list[Place], tmp_path: Path
) -> None:
    expected = [_plainly(store, place) for place in places]
    small = {"memory_bytes": 12 << 20, "cache_bytes": 4 << 20, "index_cache_bytes": 1 << 20}
    with Opened(ThreadRangeReader(store, 4), DiskCache(tmp_path, 4 << 20), **small) as opened:

        def read(number: int) -> bool:
            at = number % len(places)
            return run_sync(_run_bytes(opened.source, places[at])) == expected[at]

        with ThreadPoolExecutor(6) as readers:
            assert all(readers.map(read, range(6 * len(places))))
        assert opened.source.statistics().peak_bytes <= 12 << 20


def test_an_event_loop_reads_the_same(archive: Path, store: ObjectStore, places: list[Place]) -> None:
    url = FileStore(archive).url + "/" + archive_prefix(CLUSTER, BROKER)
    with Opened(LoopRangeReader(open_async_store(url))) as opened:

        async def main() -> list[list[bytes]]:
            return list(
                await asyncio.gather(*(run_async(_run_bytes(opened.source, place)) for place in places))
            )

        assert asyncio.run(main()) == [_plainly(store, place) for place in places]


def test_a_missing_object_is_not_found_and_a_truncated_one_is_corrupt(
    archive: Path, store: ObjectStore, places: list[Place]
) -> None:
    copy = PrefixedStore(FileStore(archive), archive_prefix(CLUSTER, BROKER))
    key, size_bytes, tail_bytes = max(places, key=lambda place: place[1])
    with Opened(ThreadRangeReader(copy, 2)) as opened:
        with pytest.raises(NotFoundError, match="nowhere"):
            run_sync(opened.source.index("data/nowhere.so", size_bytes, tail_bytes, Priority.USER))
        with pytest.raises(CorruptionError, match=key.rsplit("/", 1)[-1]):
            run_sync(opened.source.index(key, size_bytes + 1, tail_bytes, Priority.USER))
        assert run_sync(_run_bytes(opened.source, (key, size_bytes, tail_bytes))) == _plainly(
            store, (key, size_bytes, tail_bytes)
        )


def test_a_closed_loop_reader_refuses(archive: Path) -> None:
    reader = LoopRangeReader(open_async_store(FileStore(archive).url))
    with pytest.raises(NotFoundError):
        reader.submit_get("nothing").result(timeout=10)
    reader.close()
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        reader.submit("x", 0, 1)


def test_a_child_process_closes_a_loop_reader_without_the_loop(archive: Path) -> None:
    """Its thread stayed behind: leaving a `with` there would wait for it forever."""
    reader = LoopRangeReader(open_async_store(FileStore(archive).url))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork, which is what is tested
        child = os.fork()
    if child == 0:
        try:
            reader.close()
            os._exit(7)
        finally:
            os._exit(1)
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    if not ended.poll(20_000):
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(NotFoundError):
        reader.submit_get("nothing").result(timeout=10)
    reader.close()
