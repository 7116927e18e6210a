"""Backend over a real archive: the fetcher's coroutines on the server's event loop, tables from ``state/``.

Topics are those the broker's table named when it was archived, and every queue that holds messages, whatever the table
says of it. Tables are read when the server starts and again when the catalog names new ones.

Owns that translation. Does not own reading (message_fetcher.py), searching (time_reader.py) nor queries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from fetcher.access import ArchiveAccess
from fetcher.io.waiting import run_async
from fetcher.queries.by_key import KeyKind
from fetcher.queries.time_search import Boundary
from fetcher.rows.batch import GetResult, GetStatus
from fetcher.rows.queue_view import QueueView
from fetcher.rows.tag_filter import ANY_TAG
from server.backend.backend import (
    FOUND_BYTES_MAX,
    Bounds,
    PullFound,
    PullStatus,
    PullWish,
    TopicConfig,
    Unit,
)
from server.groups.subscription_filter import filter_of
from tiered.catalog.state import CatalogState
from tiered.errors import TieredError, UnavailableError
from tiered.formats.state_object import decode_state
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_HIDDEN
from tiered.object_store.interface import ObjectStore

logger = logging.getLogger(__name__)

_FOUND = PullStatus.FOUND
QUERIES_MAX = 4
"""By key, at once: what they hold is in no budget."""
_STATUSES = {
    GetStatus.FOUND: PullStatus.FOUND,
    GetStatus.NO_MATCHED_MESSAGE: PullStatus.NO_MATCHED_MESSAGE,
    GetStatus.NO_MATCHED_LOGIC_QUEUE: PullStatus.NO_MATCHED_LOGIC_QUEUE,
    GetStatus.NO_MESSAGE_IN_QUEUE: PullStatus.NO_MESSAGE_IN_QUEUE,
    GetStatus.OFFSET_TOO_SMALL: PullStatus.OFFSET_TOO_SMALL,
    GetStatus.OFFSET_OVERFLOW_ONE: PullStatus.OFFSET_OVERFLOW_ONE,
    GetStatus.OFFSET_OVERFLOW_BADLY: PullStatus.OFFSET_OVERFLOW_BADLY,
}


class BrokerTables:
    """The broker's tables as archived: documents by name, read anew when the catalog names other objects."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._keys: Mapping[str, str] = {}
        self._documents: dict[str, Any] = {}
        self.readings = 0
        """How often they were read."""

    def refresh(self, state: CatalogState) -> None:
        """Read what ``state`` names and is not known yet. Blocking. Raises what the store raises."""
        for name, key in state.state_objects.items():
            if self._keys.get(name) != key:
                source = f"{self._store.url}/{key}"
                self._documents[name] = decode_state(self._store.get(key), name, source=source) or {}
        self._keys = dict(state.state_objects)
        self.readings += 1

    def is_stale(self, state: CatalogState) -> bool:
        """Whether ``refresh`` would read something."""
        return dict(state.state_objects) != dict(self._keys)

    def table(self, name: str) -> Mapping[str, Any]:
        """A document, empty where none was archived."""
        found = self._documents.get(name)
        return found if isinstance(found, dict) else {}


class ServedArchive:
    """See Backend. ``access`` is the caller's to close."""

    def __init__(self, access: ArchiveAccess) -> None:
        self.cluster, self.broker = access.cluster, access.broker
        self._access = access
        self._catalog = access.catalog
        self._tables = BrokerTables(access.store)
        self._topics: tuple[tuple[int, int], dict[str, TopicConfig]] = (-1, -1), {}
        self._grown = asyncio.Event()
        self._queries = asyncio.Semaphore(QUERIES_MAX)

    async def load(self) -> None:
        """Read the broker's tables before serving."""
        await asyncio.to_thread(self._tables.refresh, self._catalog.state)

    async def watch(self, every_s: float) -> None:
        """Look for new commits again and again, and wake who waits for them; ends when cancelled.

        Pulls read the catalog on, too: what counts is what was told last.
        """
        told = self._catalog.state.version
        while True:
            await asyncio.sleep(every_s)
            try:
                state = await run_async(self._catalog.refreshed())
                if self._tables.is_stale(state):
                    await asyncio.to_thread(self._tables.refresh, state)
            except TieredError as error:  # a refusal too may pass: credentials are renewed, clocks put right
                logger.warning("the catalog cannot be read now: %s", error)
                continue
            if state.version != told:
                told = state.version
                self.wake()

    def wake(self) -> None:
        """There is a newer version: who waits for changes looks again. On the event loop's thread."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def changed(self, timeout_s: float) -> Coroutine[Any, Any, None]:
        """See Backend. Not ``async``: what comes between the call and its first step counts."""
        return _happened(self._grown, timeout_s)

    # -- tables -----------------------------------------------------------------------------------------------

    def topics(self) -> dict[str, TopicConfig]:
        """See Backend."""
        state = self._catalog.state
        made_of = state.version, self._tables.readings
        if self._topics[0] != made_of:
            self._topics = made_of, self._make_topics(state)
        return self._topics[1]

    def _make_topics(self, state: CatalogState) -> dict[str, TopicConfig]:
        queues: dict[str, int] = {}
        for key, row in state.queues():
            if not int(row["flags"]) & QUEUE_HIDDEN:
                queues[key.topic] = max(queues.get(key.topic, 0), key.queue_id + 1)
        table = self._tables.table("topics")
        found = {}
        for topic, count in queues.items():
            config = table.get(topic)
            config = config if isinstance(config, dict) else {}
            attributes = config.get("attributes")
            found[topic] = TopicConfig(
                topic,
                max(count, int(config.get("readQueueNums") or 0)),
                max(count, int(config.get("writeQueueNums") or 0)),
                order=bool(config.get("order", False)),
                attributes=dict(attributes) if isinstance(attributes, dict) else {},
            )
        return found

    def subscription_groups(self) -> dict[str, dict[str, Any]]:
        """See Backend."""
        return {
            str(name): config
            for name, config in self._tables.table("subscription_groups").items()
            if isinstance(config, dict)
        }

    def archived_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """See Backend."""
        found = _offset_in(self._tables.table("consumer_offsets").get(f"{topic}@{group}"), queue_id)
        view = None if found is None else self._view(topic, queue_id)
        if found is None or view is None or found <= view.max_offset:
            return found
        # The table may be a little ahead of the archive; or 4.9 kept an offset of a topic that was deleted.
        return view.min_offset if self._reached_before(view, found) else found

    def _reached_before(self, view: QueueView, offset: int) -> bool:
        """Whether a former life of the queue had ``offset``."""
        topic, queue_id, generation = view.queue
        state = self._catalog.state
        former = (self._catalog.view(state, (topic, queue_id, life)) for life in range(generation))
        return any(life is not None and offset <= life.max_offset for life in former)

    def consumed_end(self, topic: str, queue_id: int) -> int:
        """See Backend."""
        table = self._tables.table("consumer_offsets")
        offsets = (_offset_in(table[name], queue_id) for name in table if name.startswith(f"{topic}@"))
        return max((offset for offset in offsets if offset is not None), default=0)

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        """See Backend."""
        view = self._view(topic, queue_id)
        return None if view is None else Bounds(view.min_offset, view.max_offset)

    def last_stored_ms(self, topic: str, queue_id: int) -> int:
        """See Backend."""
        queue = self._queue(topic, queue_id)
        row = None if queue is None else self._catalog.state.queue(queue)
        return 0 if row is None else int(row["max_store_timestamp"])

    def _queue(self, topic: str, queue_id: int) -> QueueKey | None:
        view = self._view(topic, queue_id)
        return None if view is None else view.queue

    def _view(self, topic: str, queue_id: int) -> QueueView | None:
        """The newest life of a queue. Of a topic that was recreated some queues may have none yet but a former one."""
        view = self._catalog.view(self._catalog.state, (topic, queue_id, None))
        return None if view is None or view.is_hidden else view

    def _is_hidden(self, topic: str, queue_id: int) -> bool:
        view = self._catalog.view(self._catalog.state, (topic, queue_id, None))
        return view is not None and view.is_hidden

    # -- messages ---------------------------------------------------------------------------------------------

    async def pull(self, wish: PullWish) -> PullFound:
        """See Backend."""
        if self._is_hidden(wish.topic, wish.queue_id):
            return PullFound(PullStatus.NO_MATCHED_LOGIC_QUEUE, wish.offset, Bounds(0, 0))
        result = await run_async(
            self._access.fetcher.get(
                wish.topic,
                wish.queue_id,
                wish.offset,
                count=wish.count,
                max_bytes=wish.max_bytes,
                filter=filter_of(wish.expression, wish.expression_type),
                group=wish.group,
            )
        )
        return found_of(result)

    def pull_in_hand(self, wish: PullWish) -> PullFound | None:
        """See Backend: slices of the blocks the group has in hand."""
        if wish.expression != ANY_TAG:
            return None
        found = self._access.fetcher.in_hand(
            wish.topic, wish.queue_id, wish.offset, wish.count, wish.max_bytes, wish.group
        )
        if found is None:
            return None
        body, records, next_offset, minimum, maximum = found
        return PullFound(_FOUND, next_offset, Bounds(minimum, maximum), body, records)

    async def offset_by_time(self, topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        """See Backend."""
        queue = self._queue(topic, queue_id)
        if queue is None:
            return 0
        boundary = Boundary.UPPER if upper else Boundary.LOWER
        return await run_async(self._access.offset_by_time(queue, store_ms, boundary))

    async def stored_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """See Backend."""
        queue = self._queue(topic, queue_id)
        found = None if queue is None else await run_async(self._access.timestamp_of(queue, offset))
        return -1 if found is None else found

    async def units(self, topic: str, queue_id: int, offset: int, count: int) -> list[Unit]:
        """See Backend."""
        if self._is_hidden(topic, queue_id):
            return []
        result = await run_async(
            self._access.fetcher.get(topic, queue_id, offset, count=count, max_bytes=1 << 20, group="")
        )
        batch = result.batch
        return [
            Unit(phys, size, code)
            for phys, size, code in zip(
                batch.phys.tolist(), batch.sizes.tolist(), batch.tags_code.tolist(), strict=True
            )
        ]

    async def message_at_phys(self, phys: int) -> bytes | None:
        """See Backend."""
        found = await run_async(self._access.find_at_phys(phys))
        return None if found is None else bytes(found.data)

    async def messages_by_key(
        self, topic: str, key: str, *, is_unique: bool, count: int, begin_ms: int, end_ms: int
    ) -> list[bytes]:
        """See Backend."""
        kind = KeyKind.UNIQUE if is_unique else KeyKind.ANY
        async with self._queries:
            found = await run_async(
                self._access.find_by_key(topic, key, kind, begin_ms, end_ms, count, FOUND_BYTES_MAX)
            )
        return [bytes(message.data) for message in found]


async def _happened(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _offset_in(queues: Any, queue_id: int) -> int | None:
    if not isinstance(queues, dict):
        return None
    found = queues.get(str(queue_id), queues.get(queue_id))
    return None if found is None else int(found)


def found_of(result: GetResult) -> PullFound:
    """A fetcher's result as handlers want it."""
    status = _STATUSES.get(result.status)
    if status is None:
        raise UnavailableError(f"the archive answered {result.status.name}")
    return PullFound(
        status,
        result.next_offset,
        Bounds(result.min_offset, result.max_offset),
        result.batch.buffers() if status is PullStatus.FOUND else (),
        len(result.batch),
    )
