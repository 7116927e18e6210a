"""The archive as the page reads it: opened once, read by threads of its own, kept for some seconds.

In a process that serves clients it is the archive that they are served from. Else it is opened when a page is read for
the first time, with small caches.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fetcher.access import ArchiveAccess, open_access
from fetcher.io.waiting import run_sync
from fetcher.queries.queue_listing import QueueListing, expired_bytes, list_queues, oldest_ms
from rocketmq_tiered.maintenance.cost import (
    ArchiveUse,
    MonthCost,
    PartSizes,
    Prices,
    RequestCounts,
    TopicCost,
    measure,
    month_cost,
    topic_costs,
)
from rocketmq_tiered.page.kept_values import Reading, WorkerValue
from rocketmq_tiered.process.loaded_archive import rules_in
from tiered.archive.timers import TimerCounts, TimerFiles
from tiered.catalog.hidden_history import HistoryListing, list_histories
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState
from tiered.errors import ObjectTooLargeError, TieredError, UnavailableError
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH, QUEUE_EXPIRED, QUEUE_HIDDEN, QUEUE_SUPERSEDED, Table
from tiered.object_store.interface import ObjectInfo, ObjectStore
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRule

ORDERS = ("topic", "queues", "messages", "bytes", "newest")


TOPIC_DTYPE: Final = np.dtype(
    [(name, np.int64) for name in ("queues", "messages", "bytes", "newest", "gaps")]
)
"""A topic's shown queues, their messages, bytes before compression, newest store time in ms, and gaps."""


class TopicRow(NamedTuple):
    """One topic: its name, and a row of TOPIC_DTYPE."""

    topic: str
    queues: int
    messages: int
    bytes: int
    newest_ms: int
    gaps: int


@dataclass(frozen=True)
class TopicSummary:
    """Topics with at least one shown queue, and a TOPIC_DTYPE row for each. ``hidden``: messages of deleted topics and
    earlier generations."""

    names: tuple[str, ...]
    table: Table
    hidden: int

    def row(self, i: int) -> TopicRow:
        """Return the figures of the topic with index ``i``, as Python numbers."""
        return TopicRow(self.names[i], *self.table[i].item())

    def chosen(self, pattern: str, order: str) -> list[int]:
        """Return the indexes of the topics whose name contains ``pattern``, in upper or lower case. ``order``, one of
        ORDERS, is "topic" for the order of names, or names the figure whose largest value comes first."""
        wanted = pattern.casefold()
        indexes: Iterable[int] = range(len(self.names))
        if order != "topic":
            indexes = np.argsort(-self.table[order], kind="stable").tolist()
        return [i for i in indexes if wanted in self.names[i].casefold()]

    def message_bytes(self) -> dict[str, tuple[int, int]]:
        """Topic to messages and their bytes before compression, as maintenance.cost.topic_costs takes them."""
        return dict(zip(self.names, self.table[["messages", "bytes"]].tolist(), strict=True))


def summarize(state: CatalogState, expired_bytes: NDArray[np.int64] | int = 0) -> TopicSummary:
    """Sum up the queues of ``state`` by topic, in order of the topics' names. Deleted topics and earlier generations of
    recreated ones are not included, but for the number of their messages. ``expired_bytes``: for each row of the queue
    table the message bytes that expiry has hidden, which are not counted."""
    roster, table = state.directory.roster, state.table
    topic_of_row = roster.columns(np.arange(state.queue_count))["topic"]
    # A row of a batch queue holds several messages, so that offsets count them; key compaction leaves holes in others.
    is_batch = (table["flags"] & QUEUE_BATCH) != 0
    offsets = table["end_queue_offset"] - table["min_queue_offset"]
    messages = np.where(is_batch, offsets, table["row_count"])
    living_bytes = table["end_byte"] - expired_bytes
    # Messages that another log history superseded are hidden as well, and are counted elsewhere.
    is_deleted = table["flags"] & (QUEUE_HIDDEN | QUEUE_SUPERSEDED) == QUEUE_HIDDEN
    is_shown = (table["flags"] & QUEUE_HIDDEN) == 0
    topics = topic_of_row[is_shown]
    figures = np.zeros(len(roster.topics), TOPIC_DTYPE)
    np.add.at(figures["queues"], topics, 1)
    np.add.at(figures["messages"], topics, messages[is_shown])
    np.add.at(figures["bytes"], topics, living_bytes[is_shown])
    np.maximum.at(figures["newest"], topics, table["max_store_timestamp"][is_shown])
    queues_with_gap = state.gaps["queue"][is_shown[state.gaps["queue"]]]
    np.add.at(figures["gaps"], topic_of_row[queues_with_gap], 1)
    present = sorted(np.flatnonzero(figures["queues"]).tolist(), key=roster.topics.__getitem__)
    names = tuple(roster.topics[number] for number in present)
    return TopicSummary(names, figures[np.array(present, np.int64)], int(messages[is_deleted].sum()))


CATALOG_KEPT_S = 5.0
COST_KEPT_S, COST_KEPT_MAX_S = 60.0, 3600.0
"""How long a cost is kept: for each thousand objects (one request of a listing), and at most."""
HISTORIES_KEPT_S = 60.0
TIMERS_KEPT_S = 15.0
ADOPTED_S = 60.0
"""How long after a commit of this process the catalog is not read from the store."""
FIRST_WAIT_S, NEWER_WAIT_S = 1.0, 0.3
SHORT_WAIT_S = 0.2
"""How long a page waits that is shown without the archive first."""
OBJECTS_MAX = 1_000_000
OLDEST_MAX, OLDEST_WORK_S = 50_000, 0.3
EXPIRED_WORK_S = 5.0
"""How long a reading of the catalog looks for expired bytes; others count as stored until the next one."""
SMALL_CACHE_BYTES = 8 << 20


@dataclass(frozen=True)
class Contents:
    """One version of the catalog, with its topics and the rule of each."""

    state: CatalogState
    topics: TopicSummary
    rules: Callable[[str], TopicRule]


@dataclass(frozen=True)
class ArchiveCost:
    """What the archive stores, from a listing at ``measured_s`` (since the epoch), and its cost a month. ``is_priced``:
    not a directory."""

    use: ArchiveUse
    month: MonthCost
    prices: Prices
    topics: dict[str, TopicCost]
    measured_s: float
    is_priced: bool


class ArchiveView:
    """Reads for the pages, and caches what it read. Thread-safe."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        names: tuple[str, str],
        shared: Callable[[], ArchiveAccess | None],
        metrics: StoreMetrics | None = None,
    ) -> None:
        """Open nothing yet. ``settings`` returns the settings in effect; ``names``: cluster and broker of the archive;
        ``shared`` returns the archive that this process serves clients from, None until it is open; ``metrics`` counts
        this process's requests to the object store."""
        self._settings, self._names, self._shared, self._metrics = settings, names, shared, metrics
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._own: ArchiveAccess | None = None
        """The archive that was opened for the pages, if there is no shared one."""
        self._adopted: tuple[float, CatalogState] | None = None
        """When this process committed last, and the state of the catalog since then."""
        self._last: Contents | None = None
        self._is_expired_known = True
        """Whether there was time to find the expired bytes of all queues for ``_last``."""
        self._oldest: dict[QueueKey, tuple[int, int | None]] = {}
        """Minimum offset of a queue, and when the oldest message was stored."""
        self._rules: tuple[object, Callable[[str], TopicRule]] | None = None
        """The rules of topics, and what they were read from."""
        self._is_closed = False
        self._contents = WorkerValue("catalog", self._read_contents, CATALOG_KEPT_S)
        self._cost = WorkerValue("cost", self._measure_cost, COST_KEPT_S)
        self._histories = WorkerValue("log histories", self._read_histories, HISTORIES_KEPT_S)
        self._timers = WorkerValue("timers", self._read_timers, TIMERS_KEPT_S)
        self._timer_files: tuple[ObjectStore, TimerFiles] | None = None
        self._index: RunIndex | None = None
        self._expired: dict[QueueKey, tuple[int, int]] = {}
        """Minimum offset, and expired bytes in front of it."""

    def adopt(self, state: CatalogState) -> None:
        """Take ``state``, which this process has just committed, instead of reading the catalog again."""
        self._adopted = time.monotonic(), state
        if self._own is not None:
            self._own.catalog.adopt(state)

    def contents(self, first_wait_s: float = FIRST_WAIT_S) -> Reading[Contents]:
        """The catalog, some seconds old at most while the object store can be read. Waits for the first one, up to
        ``first_wait_s``."""
        return self._contents.get(first_wait_s, NEWER_WAIT_S)

    def cost(self, first_wait_s: float = FIRST_WAIT_S) -> Reading[ArchiveCost]:
        """What is stored and its cost, up to an hour old: it takes a listing of the archive."""
        return self._cost.get(first_wait_s)

    def histories(self) -> Reading[list[HistoryListing]]:
        """Log histories and what each hid, a minute old at most; an empty list with a single one."""
        return self._histories.get(SHORT_WAIT_S)

    def timers(self) -> Reading[TimerCounts]:
        """Timers of the catalog read last."""
        return self._timers.get(FIRST_WAIT_S, NEWER_WAIT_S)

    def access(self) -> ArchiveAccess:
        """Return the archive: the one that clients are served from, else one that is opened now for the pages alone.
        Raises UnavailableError once this process stops, and the errors of opening an archive."""
        shared = self._shared()
        if shared is not None:
            return shared
        with self._lock:
            if self._is_closed:
                raise UnavailableError("this process is stopping, and reads the archive no longer")
            if self._own is None:
                cluster, broker = self._names
                settings = _small(self._settings())
                self._own = open_access(
                    settings.archive.url, cluster=cluster, broker=broker, settings=settings
                )
                if self._adopted is not None:
                    self._own.catalog.adopt(self._adopted[1])
            return self._own

    def queues(self, topic: str) -> list[QueueListing]:
        """The shown queues of a topic, at the version read last."""
        access = self.access()
        return list_queues(access.state, hidden=False, topic=topic, index=self._run_index(access))

    def oldest_ms(self, contents: Contents, topics: Sequence[str]) -> dict[str, int | None]:
        """Return when the oldest message of each topic was stored, None for a topic without messages. Topics are
        missing whose queues could not all be looked up within OLDEST_WORK_S; the times of those that were are kept for
        later calls."""
        state, until_s = contents.state, time.monotonic() + OLDEST_WORK_S
        if len(self._oldest) > OLDEST_MAX:  # queues that are gone do not take memory for ever
            self._oldest.clear()
        found: dict[str, int | None] = {}
        with contextlib.suppress(TieredError):
            index = self._run_index(self.access())
            for topic in topics:
                times = list[int | None]()
                for row in state.directory.rows_of_topic(topic, state.queue_count):
                    if state.table["flags"][row] & QUEUE_HIDDEN:
                        continue
                    key, low = state.key_of(row), int(state.table["min_queue_offset"][row])
                    known = self._oldest.get(key)
                    if known is None or known[0] != low:
                        known = self._oldest[key] = low, oldest_ms(state, key, low, index)
                        if time.monotonic() >= until_s:
                            return found
                    times.append(known[1])
                found[topic] = min((time_ms for time_ms in times if time_ms is not None), default=None)
        return found

    def close(self) -> None:
        """Close the archive that was opened for the pages. Requests to the object store are waited for, but no longer
        than two seconds."""
        with self._lock:
            self._is_closed = True
            own, self._own = self._own, None
        if own is not None:
            closing = threading.Thread(target=own.close, name="page-close", daemon=True)
            closing.start()
            closing.join(2.0)

    # -- made by threads ----------------------------------------------------------------------------------------

    def _read_contents(self) -> Contents:
        """Return a summary of the newest catalog state, which is read from the object store unless this process
        committed one in the last ADOPTED_S. The last summary is returned again while state and rules are the same and
        complete."""
        access, adopted = self.access(), self._adopted
        if adopted is None or time.monotonic() - adopted[0] > ADOPTED_S:
            run_sync(access.catalog.recent())
        state, last = access.state, self._last
        rules = self._rules_at(access.store, state)
        if last is None or last.state is not state or last.rules is not rules or not self._is_expired_known:
            expired = self._expired_bytes(access)
            last = self._last = Contents(state, summarize(state, expired), rules)
        return last

    def _run_index(self, access: ArchiveAccess) -> RunIndex:
        if self._index is None:
            self._index = RunIndex(access.store)
        return self._index

    def _expired_bytes(self, access: ArchiveAccess) -> NDArray[np.int64]:
        """Return for each row of the queue table how many message bytes at the queue's begin expiry has hidden. They
        are looked up for EXPIRED_WORK_S at most; queues that are left then have the value of an earlier call, or 0."""
        state, index, until_s = access.state, self._run_index(access), time.monotonic() + EXPIRED_WORK_S
        table, self._is_expired_known = state.table, True
        byte_counts = np.zeros(state.queue_count, np.int64)
        for row in np.flatnonzero(table["flags"] & QUEUE_EXPIRED).tolist():
            key, min_offset = state.key_of(row), int(table["min_queue_offset"][row])
            known = self._expired.get(key, (-1, 0))
            if known[0] != min_offset and time.monotonic() < until_s:
                # An object that cannot be read now is tried again with the next call.
                with contextlib.suppress(TieredError):
                    known = self._expired[key] = min_offset, expired_bytes(state, row, index)
            self._is_expired_known = self._is_expired_known and known[0] == min_offset
            byte_counts[row] = known[1]
        return byte_counts

    def _read_histories(self) -> list[HistoryListing]:
        access = self.access()
        return list_histories(access.store, access.state) if access.state.log_histories else []

    def _read_timers(self) -> TimerCounts:
        access = self.access()
        if self._timer_files is None or self._timer_files[0] is not access.store:
            self._timer_files = access.store, TimerFiles(access.store)
        return self._timer_files[1].counts(access.state)

    def _rules_at(self, store: ObjectStore, state: CatalogState) -> Callable[[str], TopicRule]:
        """Return a function that gives the rule of a topic. The archived topic table is read only if the catalog names
        a new one or the settings have changed since the last call."""
        settings = self._settings()
        read_from = dict(state.state_objects), settings
        if self._rules is None or self._rules[0] != read_from:
            self._rules = read_from, rules_in(store, state, settings)
        return self._rules[1]

    def _measure_cost(self) -> ArchiveCost:
        """List all objects of the archive, and return what it and each topic cost a month at the default prices. An
        archive in a directory has sizes, but no price."""
        access = self.access()
        settings = self._settings().object_store
        parts = PartSizes(settings.multipart_threshold_bytes, settings.multipart_part_bytes)
        use = measure(_listing(access.store), access.store.clock_ms(), parts)
        # Listing a large archive again takes long: its cost is kept for longer.
        self._cost.keep_s = min(COST_KEPT_MAX_S, COST_KEPT_S * (1 + use.stored_objects // 1000))
        prices = Prices()
        messages = summarize(access.state, self._expired_bytes(access)).message_bytes()
        topics = {cost.topic: cost for cost in topic_costs(use, messages, prices)}
        month, is_priced = month_cost(use, prices, self._counts()), not access.store.url.startswith("file:")
        return ArchiveCost(use, month, prices, topics, time.time(), is_priced)

    def _counts(self) -> RequestCounts | None:
        """Return the requests and bytes of this process since it started, from which the cost of a month is estimated;
        None if they are not counted."""
        if self._metrics is None:
            return None
        by_operation = self._metrics.snapshot()
        requests = {name: float(stats.requests) for name, stats in by_operation.items()}
        uploaded = sum(stats.bytes for name, stats in by_operation.items() if name in ("put", "compose"))
        downloaded = sum(stats.bytes for name, stats in by_operation.items() if name.startswith("get"))
        return RequestCounts(time.monotonic() - self._started_s, requests, uploaded, downloaded)


def _listing(store: ObjectStore) -> Iterator[ObjectInfo]:
    """Yield all objects of the archive in ``store``. Raises ObjectTooLargeError for more than OBJECTS_MAX, as the
    listing would take too long for a page."""
    for number, info in enumerate(store.list("")):
        if number == OBJECTS_MAX:
            raise ObjectTooLargeError(
                f"the admin page shows no cost, as the archive has more than {OBJECTS_MAX:,} objects",
                hint="tiered cost lists them all and prints the cost",
            )
        yield info


def _small(settings: Settings) -> Settings:
    """Return ``settings`` with small caches, few requests at a time and no prefetch, for an archive that is opened only
    for the pages."""
    fetch = replace(
        settings.fetch,
        cache_bytes=min(settings.fetch.cache_bytes, SMALL_CACHE_BYTES),
        index_cache_bytes=min(settings.fetch.index_cache_bytes, SMALL_CACHE_BYTES),
        query_cache_bytes=min(settings.fetch.query_cache_bytes, SMALL_CACHE_BYTES),
        disk_cache_path="",
        user_requests=4,
        prefetch_requests=1,
    )
    return replace(settings, fetch=fetch, prefetch=replace(settings.prefetch, enabled=False))
