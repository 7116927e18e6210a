"""How the parts of an open archive are put together: what one of them notices reaches the one it concerns."""

from __future__ import annotations

import asyncio
import stat
import threading
import time
from pathlib import Path

import pytest

import rocketmq_tiered
from fetcher.access import decode_threads
from fetcher.io.waiting import run_sync
from fetcher.prefetch.readers import ReaderKey
from fetcher.rows.pull import PullRequest
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tiered.errors import AccessDeniedError
from tiered.formats.keys import archive_prefix
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import FetchSettings, PrefetchSettings, Settings

QUEUE = QueueKey("topic", 0, 0)
KIB = 1024


def test_blocks_that_leave_the_cache_unread_halve_the_window_of_who_had_them_fetched(tmp_path: Path) -> None:
    builder = ArchiveBuilder(
        PrefixedStore(FileStore(tmp_path), archive_prefix("c", "b")), codec=BlockCodec(block_bytes=8 * KIB)
    )
    builder.commit([Sent(QUEUE, b"%7d" % number * 16) for number in range(2000)])
    settings = Settings(
        fetch=FetchSettings(cache_bytes=512 * KIB),
        prefetch=PrefetchSettings(window_first_bytes=128 * KIB, window_max_bytes=256 * KIB),
    )
    with rocketmq_tiered.open(f"file://{tmp_path}", cluster="c", broker="b", settings=settings) as archive:
        access = archive.access
        offset = 0
        for _ in range(4):
            result = run_sync(
                access.fetcher.pull(PullRequest(*QUEUE[:2], offset, count=32, max_bytes=1 << 20, group="g"))
            )
            offset = result.next_offset
        deadline_s = time.monotonic() + 30
        while access.fetcher.prefetcher.counters.fetches == 0 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        reader = access.fetcher.readers.find(ReaderKey("g", QUEUE))
        assert reader is not None and reader.window.unread_bytes > 0
        size = reader.window.size
        access.source._cache.reclaim(1 << 30, unread_too=True)
        assert access.source.statistics().evicted_unread > 0
        assert reader.window.size == max(size // 2, 32)
        assert access.fetcher.prefetcher.counters.evicted > 0
        assert reader.window.unread_bytes == 0
        result = run_sync(
            access.fetcher.pull(PullRequest(*QUEUE[:2], offset, count=32, max_bytes=1 << 20, group="g"))
        )
        assert result.batch.queue_offsets.tolist() == list(range(offset, offset + 32))


def test_a_disk_cache_in_which_others_write_is_refused(tmp_path: Path) -> None:
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path / "archive"), archive_prefix("c", "b")))
    builder.commit([Sent(QUEUE, b"body")])
    shared = tmp_path / "cache"
    settings = Settings(fetch=FetchSettings(disk_cache_path=str(shared)))
    with rocketmq_tiered.open(tmp_path / "archive", settings=settings):
        made = [path for path in shared.rglob("*") if path.is_dir()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in (shared, *made)} == {0o700}
    shared.chmod(0o755)  # a cache directory of others, too
    rocketmq_tiered.open(tmp_path / "archive", settings=settings).close()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    shared.chmod(0o777)
    with pytest.raises(AccessDeniedError, match=f"chmod 700 {shared}, or set fetch.disk_cache_path"):
        rocketmq_tiered.open(tmp_path / "archive", settings=settings)


def test_files_are_read_by_threads_for_an_event_loop_too(tmp_path: Path) -> None:
    """A loop would only pass them on to threads, and their answers back."""
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path), archive_prefix("c", "b")))
    builder.commit([Sent(QUEUE, b"%d" % number) for number in range(9)])

    async def offsets() -> list[int]:
        async with rocketmq_tiered.open_async(f"file://{tmp_path}", cluster="c", broker="b") as archive:
            found = [message.queue_offset async for message in archive.queue(*QUEUE[:2]).messages()]
            names = {thread.name.rpartition("_")[0] or thread.name for thread in threading.enumerate()}
            assert "range-reader" in names and "range-reader-loop" not in names
            return found

    assert asyncio.run(offsets()) == list(range(9))


@pytest.mark.parametrize(
    ("wanted", "processors", "threads", "beside_a_loop"),
    [(0, 1, 1, 1), (0, 2, 2, 1), (0, 3, 2, 2), (0, 64, 2, 2), (5, 2, 5, 5)],
)
def test_decoding_leaves_a_processor_to_an_event_loop(
    wanted: int, processors: int, threads: int, beside_a_loop: int
) -> None:
    assert decode_threads(wanted, processors, has_loop=False) == threads
    assert decode_threads(wanted, processors, has_loop=True) == beside_a_loop
