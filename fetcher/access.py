"""An archive opened for reading, and its coroutines: the core of both forms of the Python API and of the servers.

Wires catalog, block source, fetcher and searches, and closes them in order. Does not run the coroutines (archive.py,
async_archive.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fetcher.blocks.block_cache import DroppedUnread
from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.disk_cache import DiskCache, directory_of
from fetcher.blocks.segment_source import SegmentSource
from fetcher.io.request_scheduler import LoopRangeReader, Priority, RangeReader, ThreadRangeReader
from fetcher.io.waiting import Threads, ThreadTimer
from fetcher.pulls.message_fetcher import TieredMessageFetcher
from fetcher.queries.by_id import OffsetMsgId, find_by_id
from fetcher.queries.by_key import NO_LIMIT, KeyKind, KeyQuery, find_by_key
from fetcher.queries.queue_listing import QueueListing, list_queues
from fetcher.queries.source import ALWAYS_MS, PartCache, QuerySource
from fetcher.queries.time_search import Boundary, TimeReader
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.message import Message
from fetcher.rows.tag_filter import MessageFilter
from fetcher.walk import Span, Walk
from tiered.catalog.archives import Archive as ArchivePlace
from tiered.catalog.archives import open_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.hidden_history import history_state
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK
from tiered.errors import NotFoundError, UnavailableError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.formats.memory_bound import limit_decoding
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH, QUEUE_EXPIRED
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_async_store, open_store, parse_url
from tiered.object_store.sealed import LocalSeals
from tiered.private_directory import check_private
from tiered.settings.sections import DERIVED, Settings
from tiered.timestamps import TimePoint, milliseconds

T = TypeVar("T")
PLACES_MAX, PLACES_BYTES_MAX = 1024, 64 << 20
"""Messages with a key that are read for their places."""
STEP_THREADS = 2
"""Threads for steps of prefetch, which are short, and for refreshing the catalog."""
SHARE_BYTES_MIN = 8 << 20
DECODE_THREADS_MAX = 2
"""Unless set: a reader consumes no more than two threads decode."""


def decode_threads(wanted: int, processors: int, *, has_loop: bool) -> int:
    """How many threads decode blocks. ``wanted`` 0: one per processor, less one for an event loop (``has_loop``)."""
    return wanted or min(max(processors - has_loop, 1), DECODE_THREADS_MAX)


def open_access(
    url: str,
    *,
    cluster: str,
    broker: str,
    settings: Settings,
    version: int | None = None,
    history: int | None = None,
    has_loop: bool = False,
    shares: int = 1,
) -> ArchiveAccess:
    """Open the archive at ``url`` for reading: as it grows, as it was at catalog ``version``, or only the messages of
    log ``history`` that a truncation of the broker's log took out of the queues.

    ``has_loop``: an event loop reads it, which must not wait for decompression. ``shares``: the number of archives that
    this process opens at a time and that share the memory for fetching. Raises NotFoundError, UsageError or what the
    store raises.
    """
    limit_decoding(settings.fetch.memory_bytes)
    settings = settings if shares == 1 else _share(settings, shares)
    root = open_store(url, StoreOptions(settings.object_store))
    try:
        names = cluster or settings.archive.cluster or None, broker or settings.archive.broker or None
        place = open_archive(root, *names)
        keys = root.keys(archive_prefix(place.cluster, place.broker))
        keys.check()
        state = load(place.store, version=version)
        if history is not None:
            state = history_state(place.store, state, history)
        disk = _disk_cache(settings, place, LocalSeals(keys) if keys.is_encrypted() else None)
        return ArchiveAccess(
            url,
            root,
            place,
            state,
            _reader(url, place, settings, has_loop=has_loop, is_encrypted=keys.is_encrypted()),
            settings,
            disk,
            has_loop=has_loop,
            is_snapshot=version is not None or history is not None,
        )
    except BaseException:
        root.close()
        raise


open_async_access = partial(open_access, has_loop=True)


def _reader(
    url: str, place: ArchivePlace, settings: Settings, *, has_loop: bool, is_encrypted: bool
) -> RangeReader:
    """The reader of ranges: for s3:// beside an event loop an asynchronous client with a loop of its own, else
    threads, which also decrypt. A client of file:// would use threads too, and switch them twice more."""
    if has_loop and parse_url(url).scheme == "s3" and not is_encrypted:
        own_url = f"{url.rstrip('/')}/{archive_prefix(place.cluster, place.broker)}"
        return LoopRangeReader(open_async_store(own_url, StoreOptions(settings.object_store)))
    return ThreadRangeReader(place.store, settings.fetch.threads)


def _share(settings: Settings, shares: int) -> Settings:
    """The settings for one of several archives, ``shares`` in number, that are open at a time: it gets an equal part of
    the memory, but at least SHARE_BYTES_MIN, and its caches are sized from that part."""
    memory_bytes = max(SHARE_BYTES_MIN, settings.fetch.memory_bytes // shares)
    fetch = replace(
        settings.fetch,
        memory_bytes=memory_bytes,
        cache_bytes=DERIVED,
        index_cache_bytes=DERIVED,
        query_cache_bytes=DERIVED,
    )
    prefetch = replace(
        settings.prefetch, memory_bytes=memory_bytes * 3 // 8, buffered_bytes=memory_bytes // 4
    )
    return replace(settings, fetch=fetch, prefetch=prefetch)


def _disk_cache(settings: Settings, place: ArchivePlace, seals: LocalSeals | None) -> DiskCache | None:
    """The disk cache of one archive, or None if the settings name no directory. Each archive has a directory of its own
    in it, named by cluster, broker and URL, because two archives may have objects with the same keys."""
    if not settings.fetch.disk_cache_path:
        return None
    root = Path(settings.fetch.disk_cache_path, archive_prefix(place.cluster, place.broker))
    directory = directory_of(root, place.store.url, settings.object_store.endpoint_url)
    try:
        if os.path.lexists(settings.fetch.disk_cache_path):
            check_private(Path(settings.fetch.disk_cache_path), "fetch.disk_cache_path")
        return DiskCache(directory, settings.fetch.disk_cache_bytes, seals)
    except OSError as error:
        raise UsageError(
            f"cannot create the disk cache {directory}: {error.strerror}", hint="check fetch.disk_cache_path"
        ) from error


class ArchiveAccess:
    """One open archive. Coroutines are of the core (waiting.py); other methods return from memory. Thread-safe."""

    def __init__(
        self,
        url: str,
        root: ObjectStore,
        place: ArchivePlace,
        state: CatalogState,
        reader: RangeReader,
        settings: Settings,
        disk: DiskCache | None = None,
        *,
        has_loop: bool = False,
        is_snapshot: bool = False,
    ) -> None:
        """Reads the archive at ``place`` from catalog version ``state`` on, and closes ``root`` and ``reader`` at the
        end. ``has_loop``: an event loop reads it. ``is_snapshot``: it is never read at a newer version."""
        self.title = f"{place.cluster}/{place.broker} in {url}"
        self.cluster, self.broker, self.store = place.cluster, place.broker, place.store
        self._root, self._reader = root, reader
        processors = len(os.sched_getaffinity(0))
        decoders = decode_threads(settings.fetch.decode_threads, processors, has_loop=has_loop)
        self._decoders = Threads(decoders, name="decode")
        self._steps = Threads(STEP_THREADS, name="prefetch")
        self._timer = ThreadTimer()
        self.catalog = CatalogView(
            place.store, state, executor=self._steps, clock=MACHINE_CLOCK, is_snapshot=is_snapshot
        )
        self.budget = ByteBudget(settings.fetch.memory_bytes)
        self.source = SegmentSource(
            reader,
            settings.fetch,
            self.budget,
            clock=MACHINE_CLOCK,
            decode_pool=self._decoders,
            timer=self._timer,
            disk=disk,
            on_unread_dropped=self._unread_dropped,
        )
        self.fetcher = TieredMessageFetcher(
            self.source,
            self.catalog,
            settings.prefetch,
            executor=self._steps,
            clock=MACHINE_CLOCK,
            unread_ms=settings.fetch.unread_expiry_ms,
            budget=self.budget,
        )
        self.budget.add_reclaimer(self.fetcher.readers.reclaim)
        self._times = TimeReader(self.catalog, self.source)
        self._queries = self.source.reader(Priority.USER)
        self._kept = PartCache(settings.fetch.query_cache_bytes, self.budget)
        self._is_closed = False

    def _unread_dropped(self, gone: list[DroppedUnread]) -> None:
        self.fetcher.prefetcher.dropped(gone)

    def close(self) -> None:
        """Release threads and connections. Reads in progress fail. Idempotent."""
        self._is_closed = True
        self.fetcher.close()
        self.source.close()
        self._reader.close()
        self._decoders.shutdown()
        self._steps.shutdown()
        self._timer.close()
        self._root.close()

    # -- what there is ----------------------------------------------------------------------------------------

    @property
    def state(self) -> CatalogState:
        """The catalog version read last."""
        return self.catalog.state

    async def refresh(self) -> None:
        """Read the newest catalog version. Raises what the store raises."""
        await self.catalog.refreshed()

    def topics(self) -> list[str]:
        """Names of all topics that are not hidden, sorted."""
        return sorted({queue.topic for queue in self.state.visible_queues()})

    def queues(self, topic: str | None, *, hidden: bool) -> list[QueueListing]:
        """Queues of ``topic``, or all, by name."""
        return list_queues(self.state, hidden=hidden, topic=topic)

    def queue_key(self, topic: str, queue_id: int, generation: int | None) -> QueueKey:
        """The key of a queue: of its newest generation if ``generation`` is None. Raises NotFoundError if the archive
        has no such queue."""
        view = self.catalog.view(self.state, (topic, queue_id, generation))
        if view is None:
            which = "" if generation is None else f" in generation {generation}"
            raise NotFoundError(
                f"{self.title} has no queue {queue_id} of {topic}{which}",
                hint="tiered ls lists the queues",
            )
        return view.queue

    def generation(self, topic: str, queue_id: int) -> int:
        """The newest generation of a queue at the version read last; 0 for a missing or hidden one."""
        view = self.catalog.view(self.state, (topic, queue_id, None))
        return 0 if view is None or view.is_hidden else view.queue.generation

    def bounds(self, queue: QueueKey) -> tuple[int, int]:
        """[minimum, maximum) offset at the version read last. Raises NotFoundError."""
        view = self.catalog.view(self.state, queue)
        if view is None:
            raise NotFoundError(f"{queue} is no longer in {self.title}")
        return view.min_offset, view.max_offset

    def has_expired(self, queue: QueueKey) -> bool:
        """Whether messages before its minimum offset have expired, at the version read last."""
        row = self.state.queue(queue)
        return row is not None and bool(int(row["flags"]) & QUEUE_EXPIRED)

    def is_batch(self, queue: QueueKey) -> bool:
        """Whether it is a queue of batches (BatchCQ), at the version read last."""
        row = self.state.queue(queue)
        return row is not None and bool(int(row["flags"]) & QUEUE_BATCH)

    # -- reading ----------------------------------------------------------------------------------------------

    async def while_open(self, question: Coroutine[Any, Any, T]) -> T:
        """Await ``question``, a read, and return its result. If the archive is closed, before or during the read, raise
        UsageError instead of UnavailableError: that would ask the program to try again, in vain."""
        if not self._is_closed:
            try:
                return await question
            except UnavailableError:
                if not self._is_closed:
                    raise
        question.close()
        raise _closed()

    def require_open(self) -> None:
        """Raises UsageError once the archive is closed."""
        if self._is_closed:
            raise _closed()

    async def offset_by_time(self, queue: QueueKey, timestamp_ms: int, boundary: Boundary) -> int:
        """The queue offset that a 5.x broker returns for the time ``timestamp_ms``. ``boundary`` is a Boundary or its
        text, "lower" or "upper"; another text raises UsageError. Also raises what TimeReader raises."""
        try:
            boundary = Boundary(boundary)
        except ValueError as error:
            raise UsageError(f"boundary {boundary} is neither lower nor upper") from error
        return await self._times.offset_by_time(queue, timestamp_ms, boundary)

    async def timestamp_of(self, queue: QueueKey, offset: int) -> int | None:
        return await self._times.timestamp_of(queue, offset)

    async def earliest_time(self, queue: QueueKey) -> int | None:
        return await self._times.earliest_time(queue)

    async def walk(self, queue: QueueKey, span: Span, message_filter: MessageFilter | None) -> Walk:
        """Begin a walk over the messages of a queue that lie in ``span`` and match ``message_filter``. If the span
        begins at a time, this finds the offset of the first message stored since then."""
        start, find_part = span.start, None
        if start is None:
            start = self.bounds(queue)[0]
        if span.range_ms is not None:
            find_part = partial(self._times.next_part, queue, range_ms=span.range_ms)
        if span.since_ms is not None:
            part = await self._times.next_part(queue, start, span.range_ms or ALWAYS_MS)
            start = self.bounds(queue)[1] if part is None else part[0]
        has_expired = partial(self.has_expired, queue)
        return Walk(self.fetcher, queue, start, span, message_filter, find_part, self.while_open, has_expired)

    async def find_by_key(
        self,
        topic: str,
        key: str,
        kind: KeyKind,
        since: TimePoint | None,
        until: TimePoint | None,
        limit: int,
        max_bytes: int = NO_LIMIT,
    ) -> list[Message]:
        """Find messages of a topic by a key: those stored in [since, until), newest first, at most ``limit`` of them
        and at most ``max_bytes`` together, unless the first one alone is larger."""
        if limit < 0:
            raise UsageError(f"limit {limit} is negative", hint="count from 0")
        begin_ms = ALWAYS_MS[0] if since is None else milliseconds(since)
        end_ms = ALWAYS_MS[1] if until is None else milliseconds(until) - 1
        query = KeyQuery(topic, key, kind, begin_ms, end_ms, limit, max_bytes=max_bytes)
        # The newest messages come first, so the newest catalog version has to be read.
        state = await self.catalog.recent()
        page = await self.query(state, lambda source, state: find_by_key(source, state, query))
        return list(page.messages)

    async def find_by_id(self, offset_msg_id: str) -> Message | None:
        """The message with an offsetMsgId, or None. Raises UsageError for a malformed id."""
        return await self._found_by_id(OffsetMsgId.parse(offset_msg_id))

    async def find_at_phys(self, phys: int) -> Message | None:
        """The message whose record begins at physical offset ``phys``, of any broker address."""
        return await self._found_by_id(OffsetMsgId("", phys))

    async def _found_by_id(self, wanted: OffsetMsgId) -> Message | None:
        self.catalog.refresh_if_due()
        cached = self.state
        found = await self.query(cached, lambda source, state: find_by_id(source, state, wanted))
        if found is None and (state := await self.catalog.recent()).version != cached.version:
            found = await self.query(state, lambda source, state: find_by_id(source, state, wanted))
        return found

    async def places_of_key(self, state: CatalogState, topic: str, key: str) -> list[tuple[int, int]] | None:
        """Queue id and queue offset of all messages with ``key`` that ``state`` has; None: they are many, or large."""
        query = KeyQuery(topic, key, KeyKind.ANY, max_messages=PLACES_MAX, max_bytes=PLACES_BYTES_MAX)
        page = await self.query(state, lambda source, state: find_by_key(source, state, query))
        return None if page.next else [(found.queue_id, found.queue_offset) for found in page.messages]

    async def query(
        self, state: CatalogState, query: Callable[[QuerySource, CatalogState], Coroutine[Any, Any, T]]
    ) -> T:
        """The result of ``query`` at catalog version ``state``, or at the newest one if garbage collection has deleted
        an object of that version. Raises what the query raises."""

        def read(state: CatalogState) -> Coroutine[Any, Any, T]:
            return query(QuerySource(self._queries, self.store, self.source, self._kept), state)

        return await self.catalog.read(state, read)


def _closed() -> UsageError:
    return UsageError("archive is closed", hint="use it inside the `with` block that opens it")
