"""An archive that is closed under its readers: each gets an error that says so, is not to retry, and none waits on.

How the parts of an open archive are put together: what one of them notices reaches the one it concerns.

Iterators of the Python API after an error, a time limit, and their end: nothing is missing, nothing comes twice.
"""

import asyncio
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing
from pathlib import Path

import pytest

import rocketmq_tiered
from fetcher.access import decode_threads
from fetcher.archive import Archive
from fetcher.io.waiting import run_async, run_sync
from fetcher.prefetch.readers import ReaderKey
from fetcher.queries.by_key import KeyKind
from fetcher.rows.pull import PullRequest
from fetcher.walk import Span
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tiered.errors import AccessDeniedError, UnavailableError, UsageError
from tiered.formats.keys import archive_prefix
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
    assert reading.error().startswith(
        "UnavailableError: the read waited for memory when the archive was closed"
    )
    assert everything.future.done()


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


TOPIC_QUEUE = QueueKey("topic", 0, 0)
KIB = 1024


def test_blocks_that_leave_the_cache_unread_halve_the_window_of_who_had_them_fetched(tmp_path: Path) -> None:
    builder = ArchiveBuilder(
        PrefixedStore(FileStore(tmp_path), archive_prefix("c", "b")), codec=BlockCodec(block_bytes=8 * KIB)
    )
    builder.commit([Sent(TOPIC_QUEUE, b"%7d" % number * 16) for number in range(2000)])
    settings = Settings(
        fetch=FetchSettings(cache_bytes=512 * KIB),
        prefetch=PrefetchSettings(window_first_bytes=128 * KIB, window_max_bytes=256 * KIB),
    )
    with rocketmq_tiered.open(f"file://{tmp_path}", cluster="c", broker="b", settings=settings) as archive:
        access = archive.access
        offset = 0
        for _ in range(4):
            result = run_sync(
                access.fetcher.pull(
                    PullRequest(*TOPIC_QUEUE[:2], offset, count=32, max_bytes=1 << 20, group="g")
                )
            )
            offset = result.next_offset
        deadline_s = time.monotonic() + 30
        while access.fetcher.prefetcher.counters.fetches == 0 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        reader = access.fetcher.readers.find(ReaderKey("g", TOPIC_QUEUE))
        assert reader is not None and reader.window.unread_bytes > 0
        size = reader.window.size
        access.source._cache.reclaim(1 << 30, unread_too=True)
        assert access.source.statistics().evicted_unread > 0
        assert reader.window.size == max(size // 2, 32)
        assert access.fetcher.prefetcher.counters.evicted > 0
        assert reader.window.unread_bytes == 0
        result = run_sync(
            access.fetcher.pull(PullRequest(*TOPIC_QUEUE[:2], offset, count=32, max_bytes=1 << 20, group="g"))
        )
        assert result.batch.queue_offsets.tolist() == list(range(offset, offset + 32))


def test_a_disk_cache_in_which_others_write_is_refused(tmp_path: Path) -> None:
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path / "archive"), archive_prefix("c", "b")))
    builder.commit([Sent(TOPIC_QUEUE, b"body")])
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
    builder.commit([Sent(TOPIC_QUEUE, b"%d" % number) for number in range(9)])

    async def offsets() -> list[int]:
        async with rocketmq_tiered.open_async(f"file://{tmp_path}", cluster="c", broker="b") as archive:
            found = [message.queue_offset async for message in archive.queue(*TOPIC_QUEUE[:2]).messages()]
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


ITERATED = 60
EVERY_READ_ASKS = Settings(
    fetch=FetchSettings(cache_bytes=0, index_cache_bytes=0),
    prefetch=PrefetchSettings(enabled=False, buffered_bytes=0),
)


class RestlessStore(FileStore):
    """Refuses every fifth read, or answers when it is let."""

    reads = 0
    refuses = False
    gate: threading.Event | None = None

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See FileStore."""
        type(self).reads += 1
        if self.gate is not None:
            self.gate.wait(20)
        if self.refuses and self.reads % 5 == 0:
            raise UnavailableError("the store is away")
        return super().get_range(key, offset, length)


@pytest.fixture
def builder(tmp_path: Path) -> ArchiveBuilder:
    """An archive of one queue in six objects."""
    builder = ArchiveBuilder(
        PrefixedStore(FileStore(tmp_path), "cluster/broker"), codec=BlockCodec(block_bytes=512)
    )
    for _ in range(6):
        builder.commit([Sent(QueueKey("t", 0, 0), b"%100d" % number) for number in range(ITERATED // 6)])
    return builder


@pytest.fixture
def restless_url(builder: ArchiveBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where it is."""
    monkeypatch.setattr("tiered.object_store.open_store.FileStore", RestlessStore)
    monkeypatch.setattr("fetcher.walk.BATCH_MESSAGES", 7)
    monkeypatch.setattr(RestlessStore, "reads", 0)
    yield f"file://{tmp_path}"


@pytest.mark.parametrize("is_decoded", [True, False])
def test_a_retry_after_an_outage_gets_the_next(
    restless_url: str, is_decoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    failures = 0
    with rocketmq_tiered.open(restless_url, settings=EVERY_READ_ASKS) as archive:
        queue = archive.queue("t", 0)
        messages, batches = queue.messages(), queue.batches()
        monkeypatch.setattr(RestlessStore, "refuses", True)
        while True:
            try:
                if is_decoded:
                    offsets.append(next(messages).queue_offset)
                else:
                    offsets += next(batches).queue_offsets.tolist()
            except UnavailableError:
                failures += 1
            except StopIteration:
                break
    assert failures > 1 and offsets == list(range(ITERATED))


@pytest.mark.parametrize("is_decoded", [True, False])
async def test_a_retry_after_a_time_limit_gets_the_next(
    restless_url: str, is_decoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    async with rocketmq_tiered.open_async(restless_url, settings=EVERY_READ_ASKS) as archive:
        queue = archive.queue("t", 0)
        messages, batches = queue.messages(), queue.batches()
        first = await (anext(messages) if is_decoded else anext(batches))
        offsets += (
            [first.queue_offset]
            if isinstance(first, rocketmq_tiered.Message)
            else first.queue_offsets.tolist()
        )
        gate = threading.Event()
        monkeypatch.setattr(RestlessStore, "gate", gate)
        with pytest.raises(TimeoutError):
            while True:
                async with asyncio.timeout(0.2):
                    if is_decoded:
                        offsets.append((await anext(messages)).queue_offset)
                    else:
                        offsets += (await anext(batches)).queue_offsets.tolist()
        assert len(offsets) < ITERATED
        gate.set()
        if is_decoded:
            offsets += [message.queue_offset async for message in messages]
        else:
            offsets += [offset async for batch in batches for offset in batch.queue_offsets.tolist()]
    assert offsets == list(range(ITERATED))


def test_what_has_ended_stays_so_when_the_archive_grows(restless_url: str, builder: ArchiveBuilder) -> None:
    with rocketmq_tiered.open(restless_url) as archive:
        queue = archive.queue("t", 0)
        messages, batches = queue.messages(), queue.batches()
        assert len(list(messages)) == sum(map(len, batches)) == ITERATED
        builder.commit([Sent(QueueKey("t", 0, 0))])
        archive.refresh()
        assert list(messages) == [] and list(batches) == []
        assert len(list(queue.messages())) == ITERATED + 1


async def test_closing_ends_them(restless_url: str) -> None:
    with rocketmq_tiered.open(restless_url) as archive:
        for iterator in (archive.queue("t", 0).messages(), archive.queue("t", 0).batches()):
            with closing(iterator) as begun:  # type: ignore[type-var]
                next(begun)
            assert list(iterator) == []
    async with rocketmq_tiered.open_async(restless_url) as other:
        async with aclosing(other.queue("t", 0).messages()) as messages:  # type: ignore[type-var]
            await anext(messages)
        assert [message async for message in messages] == []


def test_two_threads_with_one_iterator_get_an_error(
    restless_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would get some of the messages, in no order, and some of them both."""
    gate = threading.Event()
    with rocketmq_tiered.open(restless_url) as archive:
        messages = archive.queue("t", 0).messages()
        monkeypatch.setattr(RestlessStore, "gate", gate)
        reads = RestlessStore.reads
        got: list[int] = []
        other = threading.Thread(target=lambda: got.append(next(messages).queue_offset), daemon=True)
        other.start()
        deadline_s = time.monotonic() + 20
        while RestlessStore.reads == reads and time.monotonic() < deadline_s:
            time.sleep(0.001)
        with pytest.raises(UsageError, match="already in use"):
            next(messages)
        gate.set()
        other.join(20)
        assert got == [0] and next(messages).queue_offset == 1
