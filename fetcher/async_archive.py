"""Reading an archive from Python in an event loop.

    async with rocketmq_tiered.open_async("s3://bucket/prefix") as archive:
        async for message in archive.queue("orders", 0).messages():
            print(message.queue_offset, message.body)

Methods mean the same as those of archive.py. aioboto3 requests objects in a thread of its own, and the catalog is read
in a thread, so nothing blocks the caller's loop.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterator
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fetcher.access import ArchiveAccess, open_async_access
from fetcher.archive import Archive, ArchiveNames, KeyTable, QueueHandle
from fetcher.io.waiting import run_async
from fetcher.queries.by_key import NO_LIMIT, KeyKind
from fetcher.queries.time_search import Boundary
from fetcher.rows.message import Message
from fetcher.rows.tag_filter import MessageFilter
from fetcher.walk import AsyncBatches, AsyncMessages, Span, Walk, span_of
from tiered.errors import UsageError
from tiered.object_store.open_store import url_of
from tiered.settings.sections import Settings
from tiered.timestamps import TimePoint, milliseconds

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


def open_async(
    url: str | PathLike[str], *, cluster: str = "", broker: str = "", settings: Settings | None = None
) -> AsyncArchive:
    """The archive at ``url`` or a path, entered with ``async with``, which raises what ``open_archive`` raises."""
    return AsyncArchive(url_of(url), cluster, broker, settings or Settings())


class AsyncArchive(ArchiveNames):
    """One broker's archive. Enter it once, use it from one event loop, leave it there."""

    def __init__(self, url: str, cluster: str, broker: str, settings: Settings) -> None:
        self._url = url
        self._cluster, self._broker = cluster, broker
        self._settings = settings
        self._is_entered = False

    async def __aenter__(self) -> Self:
        """Open the archive. Raises UsageError if it has been opened already. If opening fails or is cancelled, it may
        be entered again."""
        import asyncio  # 0.07 s, needed by no command

        if self._is_entered:
            raise UsageError(
                f"{self!r} has been opened already", hint="open another: rocketmq_tiered.open_async(…)"
            )
        self._is_entered = True
        opening = asyncio.get_running_loop().run_in_executor(None, self._open)
        try:
            self._access = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)  # the thread cannot be stopped and opens it
            raise
        finally:
            self._is_entered = self._access is not None
        return self

    def _open(self) -> ArchiveAccess:
        return open_async_access(
            self._url, cluster=self._cluster, broker=self._broker, settings=self._settings
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncArchive({self._url!r})"

    async def close(self) -> None:
        """Release threads and connections. Idempotent."""
        import asyncio

        if self._access is not None:
            await asyncio.to_thread(self._access.close)

    async def refresh(self) -> int:
        """Read the newest catalog version; returns it."""
        await _answer(self.access, self.access.refresh())
        return self.version

    def queue(self, topic: str, queue_id: int, *, generation: int | None = None) -> AsyncQueue:
        """One queue, in its newest or an earlier ``generation``. Raises NotFoundError."""
        return AsyncQueue(self.access, self.access.queue_key(topic, queue_id, generation))

    async def find_by_key(
        self,
        topic: str,
        key: str,
        *,
        since: TimePoint | None = None,
        until: TimePoint | None = None,
        limit: int = NO_LIMIT,
    ) -> list[Message]:
        """Messages of ``topic`` with ``key`` among their KEYS, stored in [since, until), newest first, at most
        ``limit``."""
        find = self.access.find_by_key(topic, key, KeyKind.KEY, since, until, limit)
        return await _answer(self.access, find)

    async def find_by_unique_key(
        self, topic: str, unique_key: str, *, limit: int = NO_LIMIT
    ) -> list[Message]:
        """Messages of ``topic`` with the id that the producer's client gave them; several if a send was repeated."""
        find = self.access.find_by_key(topic, unique_key, KeyKind.UNIQUE, None, None, limit)
        return await _answer(self.access, find)

    async def latest(self, topic: str, key: str) -> Message | None:
        """The latest message of ``topic`` whose KEYS are ``key``; None if there is none, or it is a tombstone."""
        import asyncio

        return await asyncio.to_thread(Archive(self.access).latest, topic, key)

    async def table(self, topic: str) -> AsyncKeyTable:
        """The latest message of each key of ``topic``, without tombstones. It is read in a thread. Raises
        NotFoundError."""
        import asyncio

        return AsyncKeyTable(await asyncio.to_thread(Archive(self.access).table, topic))

    async def find_by_id(self, offset_msg_id: str) -> Message | None:
        """The message with the broker's offsetMsgId, or None."""
        return await _answer(self.access, self.access.find_by_id(offset_msg_id))


class AsyncKeyTable(Collection[str]):
    """The keys of a topic, and the latest message of each: see KeyTable."""

    def __init__(self, table: KeyTable) -> None:
        self._table = table

    async def get(self, key: str) -> Message | None:
        """The latest message of ``key``, or None."""
        import asyncio

        return await asyncio.to_thread(self._table.get, key)

    def __contains__(self, key: object) -> bool:
        return key in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def _close_unwanted(opening: asyncio.Future[ArchiveAccess]) -> None:
    """Close an archive opened after its task was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.get_loop().run_in_executor(None, opening.result().close)


async def _answer(access: ArchiveAccess, question: Coroutine[Any, Any, T]) -> T:
    return await run_async(access.while_open(question))


class AsyncQueue(QueueHandle):
    """One queue of an archive. Its bounds are those of the archive's version."""

    async def offset_by_time(self, time: TimePoint, boundary: Boundary = Boundary.LOWER) -> int:
        """The offset that a 5.x broker returns for ``time``: docs/READING.md, "Offset by time"."""
        return await _answer(
            self._access, self._access.offset_by_time(self.key, milliseconds(time), boundary)
        )

    async def timestamp_of(self, offset: int) -> int | None:
        """When the message at ``offset`` was stored, in ms since the epoch; None if there is none."""
        return await _answer(self._access, self._access.timestamp_of(self.key, offset))

    async def earliest_time(self) -> int | None:
        """When the first message was stored, in ms since the epoch; None for an empty queue."""
        return await _answer(self._access, self._access.earliest_time(self.key))

    def batches(
        self,
        start: int | None = None,
        *,
        since: TimePoint | None = None,
        until: TimePoint | None = None,
        limit: int | None = None,
        batch_messages: int | None = None,
        message_filter: MessageFilter | None = None,
    ) -> AsyncBatches:
        """Iterate over the queue's messages in batches of arrays and stored bytes, which is faster than message by
        message: from offset ``start`` or time ``since`` (default: the first message) to time ``until`` or the end."""
        return AsyncBatches(
            lambda: self._begin(span_of(start, since, until, limit, batch_messages), message_filter)
        )

    def messages(
        self,
        start: int | None = None,
        *,
        since: TimePoint | None = None,
        until: TimePoint | None = None,
        limit: int | None = None,
        message_filter: MessageFilter | None = None,
    ) -> AsyncMessages:
        """Iterate over the queue's messages, each decoded when it is used: from offset ``start`` or time ``since``
        (default: the first message) to time ``until`` or the end."""
        batches = self.batches(start, since=since, until=until, limit=limit, message_filter=message_filter)
        return AsyncMessages(batches, self._messages_of)

    async def walk(self, span: Span, message_filter: MessageFilter | None = None) -> Walk:
        """A walk that continues when the archive has grown: see Walk.next_batch."""
        return await run_async(self._begin(span, message_filter))
