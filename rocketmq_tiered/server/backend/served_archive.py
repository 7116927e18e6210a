"""Backend over an archive: the fetcher's coroutines on the server's event loop, the broker's tables from ``state/``.

Serves the topics in the broker's archived table and every queue that holds messages. Tables are read when the server
starts and when the catalog names new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fetcher.access import ArchiveAccess
from fetcher.io.waiting import SlicePace, run_async
from fetcher.policy.read_router import earlier_end
from fetcher.queries.by_key import KeyKind
from fetcher.queries.time_search import Boundary
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from fetcher.rows.run_list import QueueView
from fetcher.rows.tag_filter import ANY_TAG
from rocketmq_tiered.server.backend.backend import FOUND_BYTES_MAX, Bounds, TopicConfig, Unit
from rocketmq_tiered.server.groups.subscription_filter import CompiledFilters
from rocketmq_tiered.server.wire.turns import Slots, Turns
from tiered.catalog.broker_facts import broker_table
from tiered.catalog.state import CatalogState
from tiered.errors import TieredError
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_HIDDEN
from tiered.object_store.interface import ObjectStore

logger = logging.getLogger(__name__)

UNITS_BYTES_MAX = 1 << 20
PERM_READ, PERM_READ_WRITE = 4, 6
QUERIES_MAX = 4
"""Concurrent queries by key: their memory is in no budget."""
FILTERED_PULLS_MAX = 32
"""Concurrent pulls with a filter: each holds the blocks it examines."""


@dataclass(frozen=True)
class Consumed:
    """Topics by group and groups by topic, of consumer offsets."""

    topics: Mapping[str, list[str]]
    groups: Mapping[str, list[str]]

    @classmethod
    def of(cls, offsets: Mapping[str, Any]) -> Consumed:
        """Return the topics and groups of ``offsets``, whose keys are ``topic@group`` as in consumerOffset.json."""
        topics: dict[str, list[str]] = {}
        groups: dict[str, list[str]] = {}
        for name in offsets:
            topic, at, group = name.partition("@")
            if at:
                topics.setdefault(group, []).append(topic)
                groups.setdefault(topic, []).append(group)
        return cls(topics, groups)


class BrokerTables:
    """The broker's archived tables: documents by name, read again when the catalog names other objects."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._keys: Mapping[str, str] = {}
        self._documents: dict[str, Any] = {}
        self._consumed: Consumed | None = None
        self.readings = 0
        """How often tables were read."""

    def refresh(self, state: CatalogState) -> None:
        """Read the broker's tables that ``state`` names and that were not read before. Blocks the thread. Raises the
        errors of the object store."""
        for name, key in state.state_objects.items():
            if self._keys.get(name) != key:
                self._documents[name] = broker_table(self._store, key, name) or {}
        self._keys = dict(state.state_objects)
        self._consumed = None
        self.readings += 1

    def is_stale(self, state: CatalogState) -> bool:
        """Whether ``refresh`` would read something."""
        return dict(state.state_objects) != dict(self._keys)

    def consumed(self) -> Consumed:
        """Groups and topics with offsets, by each other."""
        if self._consumed is None:
            self._consumed = Consumed.of(self.table("consumer_offsets"))
        return self._consumed

    def table(self, name: str) -> Mapping[str, Any]:
        """A document, empty if none was archived."""
        found = self._documents.get(name)
        return found if isinstance(found, dict) else {}


class ServedArchive:
    """The Backend of one open archive. The caller closes ``access``."""

    def __init__(self, access: ArchiveAccess) -> None:
        """``access``: the open archive. Nothing is read before ``load``."""
        self.cluster, self.broker = access.cluster, access.broker
        self._access = access
        self._catalog = access.catalog
        self._tables = BrokerTables(access.store)
        self._topics: tuple[tuple[int, int], dict[str, TopicConfig]] = (-1, -1), {}
        """The topics, and the catalog version and number of table readings that they were made of."""
        self._grown = asyncio.Event()
        self.problem = ""
        """Why the catalog cannot be read; empty if it can."""
        self._queries = asyncio.Semaphore(QUERIES_MAX)
        self._turns = Turns(shares_max=8)
        self._filters = CompiledFilters(self._turns)
        self._filtered = Slots(FILTERED_PULLS_MAX)

    async def load(self) -> None:
        """Read the broker's tables before serving."""
        await asyncio.to_thread(self._tables.refresh, self._catalog.state)

    async def watch(self, every_s: float) -> None:
        """Check every ``every_s`` for new commits, until cancelled, and wake the requests that wait for them. If a
        commit names newer copies of the broker's tables (topics, groups, offsets), these are read. While the catalog
        cannot be read, clients are served from the last version."""
        announced = self._catalog.state.version  # pulls refresh the catalog, too
        while True:
            await asyncio.sleep(every_s)
            try:
                state = await run_async(self._catalog.refreshed())
                if self._tables.is_stale(state):
                    await asyncio.to_thread(self._tables.refresh, state)
            except TieredError as error:  # a refusal may pass too: credentials are renewed, clocks corrected
                if not self.problem:
                    logger.warning(
                        "the catalog of %s/%s cannot be read, and clients are served from the version read last: %s",
                        self.cluster,
                        self.broker,
                        error,
                    )
                self.problem = str(error)
                continue
            if self.problem:
                logger.info("the catalog of %s/%s can be read again", self.cluster, self.broker)
                self.problem = ""
            if state.version != announced:
                announced = state.version
                self.wake()

    def wake(self) -> None:
        """Wake requests that wait for a newer version. On the event loop's thread."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def changed(self, timeout_s: float) -> Coroutine[Any, Any, None]:
        """Ends when the archive has grown, or after ``timeout_s``. It is not ``async``, so that changes between the
        call and its first step count."""
        return _happened(self._grown, timeout_s)

    # -- tables -----------------------------------------------------------------------------------------------

    def topics(self) -> dict[str, TopicConfig]:
        state = self._catalog.state
        made_of = state.version, self._tables.readings
        if self._topics[0] != made_of:
            self._topics = made_of, self._make_topics(state)
        return self._topics[1]

    def _make_topics(self, state: CatalogState) -> dict[str, TopicConfig]:
        """Return the topics to serve: those of the broker's archived topic table, and those with archived messages,
        each with as many queues as one of both says."""
        queue_counts: dict[str, int] = {}
        for key, row in state.queues():
            if not int(row["flags"]) & QUEUE_HIDDEN:
                queue_counts[key.topic] = max(queue_counts.get(key.topic, 0), key.queue_id + 1)
        table = self._tables.table("topics")
        topics = {}
        for topic in queue_counts.keys() | table.keys():
            count, config = queue_counts.get(topic, 0), table.get(topic)
            config = config if isinstance(config, dict) else {}
            attributes = config.get("attributes")
            topics[topic] = TopicConfig(
                topic,
                max(count, int(config.get("readQueueNums") or 0)),
                max(count, int(config.get("writeQueueNums") or 0)),
                perm=int(config.get("perm", PERM_READ_WRITE)) | PERM_READ,
                order=bool(config.get("order", False)),
                attributes=dict(attributes) if isinstance(attributes, dict) else {},
            )
        return topics

    def subscription_groups(self) -> dict[str, dict[str, Any]]:
        return {
            str(name): config
            for name, config in self._tables.table("subscription_groups").items()
            if isinstance(config, dict)
        }

    def archived_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the offset that the broker's archived table has for a group and a queue; None if it has none. One that
        lies within an earlier generation of a recreated topic is replaced by the first offset of the new one."""
        offset = _offset_in(self._tables.table("consumer_offsets").get(f"{topic}@{group}"), queue_id)
        view = None if offset is None else self._view(topic, queue_id)
        if offset is None or view is None or offset <= view.max_offset:
            return offset
        # The table may be slightly ahead of the archive, or 4.9 kept the offset of a deleted topic.
        return view.min_offset if offset <= earlier_end(view.state, view.queue) else offset

    def archived_topics(self, group: str) -> Iterable[str]:
        return self._tables.consumed().topics.get(group, ())

    def archived_groups(self, topic: str) -> Iterable[str]:
        return self._tables.consumed().groups.get(topic, ())

    def consumed_end(self, topic: str, queue_id: int) -> int:
        table = self._tables.table("consumer_offsets")
        offsets = (_offset_in(table[name], queue_id) for name in table if name.startswith(f"{topic}@"))
        return max((offset for offset in offsets if offset is not None), default=0)

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        view = self._view(topic, queue_id)
        return None if view is None else Bounds(view.min_offset, view.max_offset)

    def earliest_stored_ms(self) -> int:
        """Return when the first message of the archive was stored, or 0 if there is none. The time comes from the
        catalog alone, which may still count expired messages."""
        state = self._catalog.state
        stored_ms = [page.min_ms for page in state.pages]
        stored_ms += [
            int(chunk.runs["min_store_timestamp"].min()) for chunk in state.chunks if len(chunk.runs)
        ]
        return max(0, min(stored_ms, default=0))

    def last_stored_ms(self, topic: str, queue_id: int) -> int:
        queue = self._queue(topic, queue_id)
        row = None if queue is None else self._catalog.state.queue(queue)
        return 0 if row is None else int(row["max_store_timestamp"])

    def _queue(self, topic: str, queue_id: int) -> QueueKey | None:
        view = self._view(topic, queue_id)
        return None if view is None else view.queue

    def _view(self, topic: str, queue_id: int) -> QueueView | None:
        """The newest generation of a queue; None if it is hidden, as its topic was deleted or recreated without it."""
        view = self._catalog.view(self._catalog.state, (topic, queue_id, None))
        return None if view is None or view.is_hidden else view

    # -- messages ---------------------------------------------------------------------------------------------

    async def pull(self, request: PullRequest) -> PullResult:
        """Read the messages that ``request`` pulls. With a filter many may have to be examined for a few, so that such
        pulls are limited in number and take turns."""
        view = self._catalog.view(self._catalog.state, (request.topic, request.queue_id, None))
        if view is not None and view.is_hidden:
            return PullResult(PullStatus.NO_MATCHED_LOGIC_QUEUE, request.offset)
        request.filter = await self._filters.find(request)
        if request.filter is None:
            result = await run_async(self._access.fetcher.pull(request))
            return self._with_generation(request, result)
        async with self._filtered.slot(request.client):
            request.pace = SlicePace(partial(self._turns.turn, request.client))
            return self._with_generation(request, await run_async(self._access.fetcher.pull(request)))

    def _with_generation(self, request: PullRequest, result: PullResult) -> PullResult:
        """Return ``result``, but for a pull beyond the end whose offset lies within an earlier generation of a
        recreated topic with the first offset of the new one as the next."""
        if result.status is not PullStatus.OFFSET_OVERFLOW_BADLY:
            return result
        view = self._view(request.topic, request.queue_id)
        if view is None or request.offset > earlier_end(view.state, view.queue):
            return result
        return result._replace(next_offset=result.min_offset)

    def pull_from_memory(self, request: PullRequest) -> PullResult | None:
        return None if request.expression != ANY_TAG else self._access.fetcher.pull_from_memory(request)

    async def offset_by_time(self, topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        queue = self._queue(topic, queue_id)
        if queue is None:
            return 0
        boundary = Boundary.UPPER if upper else Boundary.LOWER
        return await run_async(self._access.offset_by_time(queue, store_ms, boundary))

    async def stored_ms(self, topic: str, queue_id: int, offset: int) -> int:
        queue = self._queue(topic, queue_id)
        found = None if queue is None else await run_async(self._access.timestamp_of(queue, offset))
        return -1 if found is None else found

    async def units(self, topic: str, queue_id: int, offset: int, count: int) -> list[Unit]:
        """Return at most ``count`` consume-queue entries from ``offset`` on, of messages of UNITS_BYTES_MAX in all."""
        batch = (await self.pull(PullRequest(topic, queue_id, offset, count, UNITS_BYTES_MAX))).batch
        return [
            Unit(phys, size, code)
            for phys, size, code in zip(
                batch.phys.tolist(), batch.sizes.tolist(), batch.tags_code.tolist(), strict=True
            )
        ]

    async def message_at_phys(self, phys: int) -> bytes | None:
        found = await run_async(self._access.find_at_phys(phys))
        return None if found is None else bytes(found.data)

    async def messages_by_key(
        self, topic: str, key: str, *, is_unique: bool, count: int, begin_ms: int, end_ms: int
    ) -> list[bytes]:
        """Return the records with a key that were stored between two times. No more than QUERIES_MAX such queries run
        at once; others wait."""
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
