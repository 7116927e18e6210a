"""Reading an archive from Python, blocking.

    with rocketmq_tiered.open("s3://bucket/prefix") as archive:
        for message in archive.queue("orders", 0).messages(since=datetime(2026, 11, 21, tzinfo=UTC)):
            print(message.queue_offset, message.body)

The form for an event loop is async_archive.py; both run the coroutines of access.py.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar

from fetcher.access import ArchiveAccess, open_access
from fetcher.io.waiting import run_sync
from fetcher.queries.by_key import NO_LIMIT, KeyKind
from fetcher.queries.queue_listing import QueueListing
from fetcher.queries.time_search import Boundary
from fetcher.rows.message import Message, MessageBatch
from fetcher.rows.tag_filter import MessageFilter
from fetcher.walk import Batches, Messages, Span, Walk, messages_of, span_of
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.offset_map import entries_of, keep_latest
from tiered.errors import NotFoundError, UsageError
from tiered.formats.record import decode_record
from tiered.model.queue import QueueKey
from tiered.object_store.open_store import url_of
from tiered.settings.sections import Settings
from tiered.timestamps import TimePoint, milliseconds

KEYS = "KEYS"


def latest_offsets(batches: Iterable[MessageBatch], begin: int, end: int) -> KeptOffsets:
    """For each key in ``batches``, the messages of one queue, the offset of its last message below ``end``. Keys whose
    last message is a tombstone (a message without a body, which deletes the key) are omitted."""
    kept = KeptOffsets(begin, end)
    keep_latest(kept, (entries_of(*batch.joined(), batch.sizes, batch.queue_offsets) for batch in batches))
    return kept


class KeyTable(Mapping[str, Message]):
    """Key to its latest message, as of when it was made. It reads the queues twice, and holds the place of each key;
    access reads the message. A key of several queues has the message that was stored last."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        self._places: dict[str, tuple[Queue, int, int]] = {}
        for queue in queues:
            begin, end = queue.min_offset, queue.max_offset
            kept = latest_offsets(queue.batches(), begin, end)
            for batch in queue.batches():
                offsets = batch.queue_offsets
                self._add(queue, batch.select(kept.mask(offsets) & (offsets < end)))

    def _add(self, queue: Queue, batch: MessageBatch) -> None:
        """Note for the key of each message where the message is (queue, offset, store time), unless a message of the
        same key that was stored later is known already."""
        for offset, stored_ms, data in zip(
            batch.queue_offsets.tolist(), batch.store_timestamp.tolist(), batch.records(), strict=True
        ):
            key = decode_record(data).properties[KEYS]
            known = self._places.get(key)
            if known is None or known[2] <= stored_ms:
                self._places[key] = queue, offset, stored_ms

    def __getitem__(self, key: str) -> Message:
        queue, offset, _ = self._places[key]
        return next(iter(queue.messages(offset, limit=1)))

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"KeyTable({len(self)} keys)"


class QueueHandle:
    """One queue of an archive. Its bounds are those of the archive's version."""

    def __init__(self, access: ArchiveAccess, key: QueueKey) -> None:
        self._access = access
        self.key = key

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.topic!r}, {self.queue_id}, [{self.min_offset}, {self.max_offset}))"
        )

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.key.topic

    @property
    def queue_id(self) -> int:
        """Number of the queue in its topic."""
        return self.key.queue_id

    @property
    def generation(self) -> int:
        """Generation of a deleted and recreated topic, from 0."""
        return self.key.generation

    @property
    def min_offset(self) -> int:
        """First archived offset."""
        return self._access.bounds(self.key)[0]

    @property
    def max_offset(self) -> int:
        """One past the last archived offset."""
        return self._access.bounds(self.key)[1]

    @property
    def has_expired(self) -> bool:
        """Whether messages before ``min_offset`` have expired."""
        return self._access.has_expired(self.key)

    def _begin(self, span: Span, message_filter: MessageFilter | None) -> Coroutine[Any, Any, Walk]:
        return self._access.while_open(self._access.walk(self.key, span, message_filter))

    def _messages_of(self, batch: MessageBatch) -> Iterator[Message]:
        return messages_of(batch, self.key, is_batch=self._access.is_batch(self.key))


T = TypeVar("T")
DEFAULT_LIMIT = 64
"""Messages that a search by key returns."""
MORE = 16
"""If no message found has exactly the key, so many times more are searched for the latest one."""


class ArchiveNames:
    """What an open archive lists without waiting."""

    _access: ArchiveAccess | None = None

    @property
    def access(self) -> ArchiveAccess:
        """Its parts, for programs that need more. Raises UsageError before an asynchronous archive is entered."""
        if self._access is None:
            raise UsageError("the archive is not open", hint="use `async with rocketmq_tiered.open_async(…)`")
        return self._access

    @property
    def title(self) -> str:
        """Names and URL, for messages."""
        return self.access.title

    @property
    def version(self) -> int:
        """The catalog version read last."""
        return self.access.state.version

    def topics(self) -> list[str]:
        """Names of all topics that are not hidden, sorted."""
        return self.access.topics()

    def queues(self, topic: str | None = None, *, hidden: bool = False) -> list[QueueListing]:
        """Queues of ``topic``, or all, by name; ``hidden``: those of deleted topics and earlier generations too."""
        return self.access.queues(topic, hidden=hidden)


class Archive(ArchiveNames):
    """One broker's archive. Threads may share it. Close it, or use it as a context manager: then names and
    bounds stay available, and reads raise UsageError."""

    def __init__(self, access: ArchiveAccess) -> None:
        self._access = access

    @classmethod
    def open(
        cls,
        url: str | PathLike[str],
        *,
        cluster: str = "",
        broker: str = "",
        settings: Settings | None = None,
        version: int | None = None,
        history: int | None = None,
    ) -> Self:
        """Open the archive at ``url``, or in a local directory. ``cluster`` and ``broker`` may be omitted if there is
        only one archive. ``version``: read it as it was at that catalog version; reads raise SnapshotExpiredError once
        objects of that version are deleted. ``history``: read only the messages of that log history that are no longer
        in the queues, because the broker's log was truncated or replaced.

        Raises NotFoundError if there is none, UsageError listing the names when there are several.
        """
        settings = settings or Settings()
        return cls(
            open_access(
                url_of(url),
                cluster=cluster,
                broker=broker,
                settings=settings,
                version=version,
                history=history,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Archive({self.title!r}, version {self.version})"

    def close(self) -> None:
        """Release threads and connections. Idempotent."""
        self.access.close()

    def refresh(self) -> int:
        """Read the newest catalog version; returns it."""
        _answer(self.access, self.access.refresh())
        return self.version

    def queue(self, topic: str, queue_id: int, *, generation: int | None = None) -> Queue:
        """One queue, in its newest or an earlier ``generation``. Raises NotFoundError."""
        return Queue(self.access, self.access.queue_key(topic, queue_id, generation))

    def find_by_key(
        self,
        topic: str,
        key: str,
        *,
        since: TimePoint | None = None,
        until: TimePoint | None = None,
        limit: int = NO_LIMIT,
    ) -> list[Message]:
        """Messages of ``topic`` with ``key`` among their KEYS, stored in [since, until), newest first: all, or at
        most ``limit``."""
        find = self.access.find_by_key(topic, key, KeyKind.KEY, since, until, limit)
        return _answer(self.access, find)

    def find_by_unique_key(self, topic: str, unique_key: str, *, limit: int = NO_LIMIT) -> list[Message]:
        """Messages of ``topic`` with the id of its producer's client; several if a send was repeated."""
        find = self.access.find_by_key(topic, unique_key, KeyKind.UNIQUE, None, None, limit)
        return _answer(self.access, find)

    def latest(self, topic: str, key: str) -> Message | None:
        """The latest message of ``topic`` whose KEYS property is exactly ``key``; None if there is none, or if its body
        is empty, which deletes the key."""
        limit, word = DEFAULT_LIMIT, next(iter(key.split()), key)
        while True:
            found = self.find_by_key(topic, word, limit=limit)
            mine = [one for one in found if one.record.properties.get(KEYS) == key]
            if mine or len(found) < limit:
                break
            limit *= MORE
        newest = max(mine, key=lambda one: (one.store_timestamp, one.queue_offset), default=None)
        return newest if newest is not None and newest.body else None

    def table(self, topic: str) -> KeyTable:
        """The latest message of each key of ``topic``, but tombstones. Raises NotFoundError."""
        queues = self.queues(topic)
        if not queues:
            raise NotFoundError(f"{self.title} has no topic {topic}", hint="tiered ls lists the topics")
        return KeyTable([self.queue(topic, one.queue_id) for one in queues])

    def find_by_id(self, offset_msg_id: str) -> Message | None:
        """The message with the broker's offsetMsgId, or None."""
        return _answer(self.access, self.access.find_by_id(offset_msg_id))


open_archive = Archive.open


def _answer(access: ArchiveAccess, question: Coroutine[Any, Any, T]) -> T:
    return run_sync(access.while_open(question))


class Queue(QueueHandle):
    """One queue of an archive. Its bounds are those of the archive's version."""

    def offset_by_time(self, time: TimePoint, boundary: Boundary = Boundary.LOWER) -> int:
        """The offset a 5.x broker answers for ``time``: docs/READING.md, "Offset by time"."""
        return _answer(self._access, self._access.offset_by_time(self.key, milliseconds(time), boundary))

    def timestamp_of(self, offset: int) -> int | None:
        """When the message at ``offset`` was stored, ms since the epoch; None if there is none."""
        return _answer(self._access, self._access.timestamp_of(self.key, offset))

    def earliest_time(self) -> int | None:
        """When the first message was stored, ms since the epoch; None for an empty queue."""
        return _answer(self._access, self._access.earliest_time(self.key))

    def batches(
        self,
        start: int | None = None,
        *,
        since: TimePoint | None = None,
        until: TimePoint | None = None,
        limit: int | None = None,
        batch_messages: int | None = None,
        message_filter: MessageFilter | None = None,
    ) -> Batches:
        """Iterate over the queue's messages in batches of arrays and stored bytes, which is faster than message by
        message: from offset ``start`` or time ``since`` (default: the first message) to time ``until`` or the end."""
        return Batches(
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
    ) -> Messages:
        """Iterate over the queue's messages, each decoded when it is used: from offset ``start`` or time ``since``
        (default: the first message) to time ``until`` or the end."""
        batches = self.batches(start, since=since, until=until, limit=limit, message_filter=message_filter)
        return Messages(batches, self._messages_of)

    def walk(self, span: Span, message_filter: MessageFilter | None = None) -> Walk:
        """A walk that continues when the archive has grown: see Walk.next_batch."""
        return run_sync(self._begin(span, message_filter))
