"""An archive that is closed under its readers: each gets an error that says so, is not to retry, and none waits on."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rocketmq_tiered
from fetcher.archive import Archive
from fetcher.io.waiting import run_async, run_sync
from fetcher.queries.by_key import KeyKind
from fetcher.rows.pull import PullRequest
from fetcher.walk import Span
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tiered.errors import UnavailableError, UsageError
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import FetchSettings, PrefetchSettings, Settings

QUEUE = QueueKey("t", 0, 0)
MESSAGES = 100
LARGE = 100 * 1024


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An archive of one queue."""
    return _filled(tmp_path_factory.mktemp("small"), 5)


@pytest.fixture(scope="module")
def large_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with messages of 100 KiB, which do not compress: twice as many bytes as memory."""
    return _filled(tmp_path_factory.mktemp("large"), LARGE, 3 * MESSAGES)


def _filled(directory: Path, body_bytes: int, count: int = MESSAGES) -> str:
    chance = random.Random(1)
    store = PrefixedStore(FileStore(directory), "cluster/broker")
    builder = ArchiveBuilder(store, codec=BlockCodec(block_bytes=LARGE))
    builder.commit([Sent(QUEUE, chance.randbytes(body_bytes), keys=["k"]) for _ in range(count)])
    return f"file://{directory}"


READS: list[Callable[[Archive], object]] = [
    lambda archive: archive.refresh(),
    lambda archive: archive.find_by_key("t", "k"),
    lambda archive: archive.find_by_unique_key("t", "k"),
    lambda archive: archive.find_by_id("7F00000100002A9F0000000000000000"),
    lambda archive: archive.queue("t", 0).offset_by_time(1),
    lambda archive: archive.queue("t", 0).timestamp_of(3),
    lambda archive: archive.queue("t", 0).earliest_time(),
    lambda archive: archive.queue("t", 0).walk(Span()),
    lambda archive: next(archive.queue("t", 0).messages()),
    lambda archive: next(archive.queue("t", 0).batches()),
]


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_closed_archive_says_so_to_every_read_wherever_the_answer_lies(
    url: str, is_in_memory: bool
) -> None:
    with rocketmq_tiered.open(url) as archive:
        for read in READS if is_in_memory else []:
            read(archive)
    for read in READS:
        with pytest.raises(UsageError, match="archive is closed; use it inside"):
            read(archive)
    assert archive.topics() == ["t"] and archive.queue("t", 0).max_offset == MESSAGES


def test_a_walk_begun_before_says_so_too(url: str) -> None:
    with rocketmq_tiered.open(url) as archive:
        queue = archive.queue("t", 0)
        walk, messages = queue.walk(Span(batch_messages=7)), queue.messages()
        later, batches = queue.walk(Span(since_ms=1 << 50)), queue.batches(batch_messages=7)
        assert run_sync(walk.next_batch()) is not None
        assert run_sync(later.next_batch()) is None
        assert len(next(batches)) == 7
    for begun in (walk, later):
        with pytest.raises(UsageError, match="archive is closed"):
            run_sync(begun.next_batch())
    for iterator in (messages, batches):
        with pytest.raises(UsageError, match="archive is closed"):
            next(iterator)
    assert walk.offset == 7


@pytest.mark.asyncio
async def test_the_asynchronous_form_says_the_same(url: str) -> None:
    async with rocketmq_tiered.open_async(url) as archive:
        queue = archive.queue("t", 0)
        messages, batches = queue.messages(), queue.batches(batch_messages=7)
        walk = await queue.walk(Span())
        await anext(batches)
    for ask in (
        archive.refresh,
        lambda: archive.find_by_key("t", "k"),
        lambda: archive.find_by_unique_key("t", "k"),
        lambda: archive.find_by_id("7F00000100002A9F0000000000000000"),
        lambda: queue.offset_by_time(1),
        lambda: queue.timestamp_of(3),
        queue.earliest_time,
        lambda: queue.walk(Span()),
        lambda: run_async(walk.next_batch()),
        lambda: anext(messages),
        lambda: anext(batches),
    ):
        with pytest.raises(UsageError, match="archive is closed"):
            await ask()
    assert archive.topics() == ["t"]


def test_serving_gets_a_retryable_error(url: str) -> None:
    """Their broker ends, and another takes its place: no client may learn that its request was wrong."""
    with rocketmq_tiered.open(url) as archive:
        access = archive.access
    with pytest.raises(UnavailableError):
        run_sync(access.fetcher.pull(PullRequest("t", 0, 0, count=1, max_bytes=1)))
    with pytest.raises(UnavailableError):
        run_sync(access.find_by_key("t", "k", KeyKind.KEY, None, None, 1))


PACED = Settings(fetch=FetchSettings(bytes_per_s=64 * 1024, piece_bytes=64 * 1024))
LITTLE_MEMORY = Settings(
    fetch=FetchSettings(memory_bytes=14 << 20, cache_bytes=1 << 20, memory_wait_ms=600_000),
    prefetch=PrefetchSettings(memory_bytes=1 << 20),
)


class Reading:
    """A read on a thread of its own, which no test waits for at the end: it may be one that never ends."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self._error = error

    def error(self) -> str:
        """What it ended with."""
        self._thread.join(20)
        assert not self._thread.is_alive(), "it waits still"
        return f"{type(self._error).__name__}: {self._error}"


@pytest.mark.parametrize("settings", [PACED, LITTLE_MEMORY], ids=["for-its-turn", "for-memory"])
def test_a_reader_that_waits_while_it_is_closed_gets_an_error(large_url: str, settings: Settings) -> None:
    archive = rocketmq_tiered.open(large_url, settings=settings)
    access = archive.access
    kept: list[rocketmq_tiered.Message] = []  # their memory is not released
    reading = Reading(lambda: kept.extend(archive.queue("t", 0).messages()))
    _until(lambda: access.budget.waits > 0 or sum(access.source._scheduler.queued.values()) > 0)
    archive.close()
    assert reading.error().startswith("UsageError: archive is closed")


def test_a_reader_that_needs_memory_after_the_close_does_not_wait_either(large_url: str) -> None:
    """As a reader between two blocks: it did not wait when the others got their error."""
    archive = rocketmq_tiered.open(large_url, settings=LITTLE_MEMORY)
    access = archive.access
    everything = access.budget.charge(access.budget.total_bytes, 0)
    archive.close()
    reading = Reading(lambda: run_sync(access.fetcher.pull(PullRequest("t", 0, 0, count=1, max_bytes=1))))
    assert reading.error().startswith("UnavailableError: cannot read: the archive is closed")
    assert everything.future.done()


@pytest.mark.asyncio
async def test_tasks_that_wait_while_it_is_closed_get_an_error(large_url: str) -> None:
    async with rocketmq_tiered.open_async(large_url, settings=LITTLE_MEMORY) as archive:

        async def keep() -> list[rocketmq_tiered.Message]:
            return [message async for message in archive.queue("t", 0).messages()]

        task = asyncio.create_task(keep())
        await asyncio.to_thread(_until, lambda: archive.access.budget.waits > 0)
    with pytest.raises(UsageError, match="archive is closed"):
        async with asyncio.timeout(20):
            await task


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
