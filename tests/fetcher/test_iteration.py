"""Iterators of the Python API after an error, a time limit, and their end: nothing is missing, nothing comes twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path

import pytest

import rocketmq_tiered
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tiered.errors import UnavailableError, UsageError
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import FetchSettings, PrefetchSettings, Settings

MESSAGES = 60
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
        builder.commit([Sent(QueueKey("t", 0, 0), b"%100d" % number) for number in range(MESSAGES // 6)])
    return builder


@pytest.fixture
def url(builder: ArchiveBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where it is."""
    monkeypatch.setattr("tiered.object_store.open_store.FileStore", RestlessStore)
    monkeypatch.setattr("fetcher.walk.BATCH_MESSAGES", 7)
    monkeypatch.setattr(RestlessStore, "reads", 0)
    yield f"file://{tmp_path}"


@pytest.mark.parametrize("is_decoded", [True, False])
def test_a_retry_after_an_outage_gets_the_next(
    url: str, is_decoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    failures = 0
    with rocketmq_tiered.open(url, settings=EVERY_READ_ASKS) as archive:
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
    assert failures > 1 and offsets == list(range(MESSAGES))


@pytest.mark.asyncio
@pytest.mark.parametrize("is_decoded", [True, False])
async def test_a_retry_after_a_time_limit_gets_the_next(
    url: str, is_decoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    async with rocketmq_tiered.open_async(url, settings=EVERY_READ_ASKS) as archive:
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
        assert len(offsets) < MESSAGES
        gate.set()
        if is_decoded:
            offsets += [message.queue_offset async for message in messages]
        else:
            offsets += [offset async for batch in batches for offset in batch.queue_offsets.tolist()]
    assert offsets == list(range(MESSAGES))


def test_what_has_ended_stays_so_when_the_archive_grows(url: str, builder: ArchiveBuilder) -> None:
    with rocketmq_tiered.open(url) as archive:
        queue = archive.queue("t", 0)
        messages, batches = queue.messages(), queue.batches()
        assert len(list(messages)) == sum(map(len, batches)) == MESSAGES
        builder.commit([Sent(QueueKey("t", 0, 0))])
        archive.refresh()
        assert list(messages) == [] and list(batches) == []
        assert len(list(queue.messages())) == MESSAGES + 1


@pytest.mark.asyncio
async def test_closing_ends_them(url: str) -> None:
    with rocketmq_tiered.open(url) as archive:
        for iterator in (archive.queue("t", 0).messages(), archive.queue("t", 0).batches()):
            with closing(iterator) as begun:  # type: ignore[type-var]
                next(begun)
            assert list(iterator) == []
    async with rocketmq_tiered.open_async(url) as other:
        async with aclosing(other.queue("t", 0).messages()) as messages:  # type: ignore[type-var]
            await anext(messages)
        assert [message async for message in messages] == []


def test_two_threads_with_one_iterator_get_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would get some of the messages, in no order, and some of them both."""
    gate = threading.Event()
    with rocketmq_tiered.open(url) as archive:
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
