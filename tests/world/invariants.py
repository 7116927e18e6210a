"""The rules that hold after every step, a function each."""

import random
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache

from fetcher.io.waiting import InlineExecutor, run_sync
from fetcher.pulls.message_fetcher import TieredMessageFetcher
from fetcher.queries.by_key import KeyQuery, find_by_key
from fetcher.queries.source import QuerySource
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.pull import PullRequest
from rocketmq_tiered.message_table.batches.message_batches import view_chunks
from rocketmq_tiered.message_table.options.predicate import Predicate, stored_between
from rocketmq_tiered.message_table.options.source_options import View
from rocketmq_tiered.message_table.plan.archive_plan import ArchivePlanner
from rocketmq_tiered.message_table.plan.partitions import OffsetRange, Slices, by_queue
from rocketmq_tiered.message_table.scan.archive_scan import ArchiveScan, archive_chunks
from rocketmq_tiered.message_table.scan.object_rows import CorruptPlace
from tests.archive.queue_reader import QueueReader
from tests.fetcher.queries.counted import PlainBlocks
from tests.fetcher.reading_fakes import NO_PREFETCH, PlainSource
from tests.world.broker_model import (
    BATCHES,
    EXPIRING,
    KEYED,
    LIGHT,
    PLAIN,
    RETRY,
    TOPICS,
    BrokerModel,
    Queue,
    Stored,
)
from tiered.catalog.catalog_reader import head_version, load, read_commit
from tiered.catalog.hidden_history import history_state, list_histories
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.record import decode_record
from tiered.formats.state_object import decode_state
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore


@lru_cache(10_000)
def key_of(record: bytes) -> str:
    return decode_record(record).properties.get("KEYS", "")


def stored_ms(record: bytes) -> int:
    return decode_record(record).store_timestamp


def body_of(record: bytes) -> bytes:
    return decode_record(record).stored_body


class StoreReader:
    """A RangeReader that answers at once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def submit(self, key: str, offset: int, length: int) -> Future[bytes]:
        return InlineExecutor().submit(self._store.get_range, key, offset, length)

    def submit_get(self, key: str) -> Future[bytes]:
        return InlineExecutor().submit(self._store.get, key, 1 << 30)

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class Kept:
    """A version that a reader keeps, and what it read there."""

    state: CatalogState
    since_ms: int
    read: dict[QueueKey, dict[int, bytes]] = field(default_factory=dict)


class Invariants:
    """Of one archive of one broker."""

    def __init__(self, archive: ObjectStore, broker: BrokerModel, ttl_s: Mapping[str, int]) -> None:
        self._archive, self._broker, self._ttl_s = archive, broker, ttl_s
        self._version, self._put_id, self._epoch = 0, "", 0
        self._floors: dict[QueueKey, int] = {}
        self._history = 0
        self._named: set[str] = set()
        self._seen: dict[Queue, dict[bytes, int]] = {}
        """Visible records, and when they were seen last."""

    def check(self, now_ms: int) -> None:
        """Those of the catalog, if it has moved."""
        head = head_version(self._archive)
        if head == self._version:
            return
        self.one_chain(head)
        state = load(self._archive)
        self.floors_rise(state, now_ms)
        self.nothing_living_is_pending(state)

    def one_chain(self, head: int) -> None:
        """Each commit names its predecessor, epochs rise, and no object is committed twice."""
        for version in range(self._version + 1, head + 1):
            commit = read_commit(self._archive, version)
            assert commit.place.predecessor_put_id == self._put_id, (
                f"version {version} has another predecessor"
            )
            assert commit.place.epoch >= self._epoch, f"version {version} is of an earlier epoch"
            named = {key for key in commit.draft.object_keys if key not in commit.draft.restored}
            assert not named & self._named, f"version {version} commits an object again"
            self._named |= named
            self._put_id, self._epoch = commit.put_id, commit.place.epoch
        self._version = head

    def new_chain_begins(self) -> None:
        """After a repair, whose commit names no predecessor."""
        self._version = head_version(self._archive)
        commit = read_commit(self._archive, self._version)
        self._put_id, self._epoch = commit.put_id, commit.place.epoch

    def floors_rise(self, state: CatalogState, now_ms: int) -> None:
        """The minimum of a queue that expired never falls, but where the log was cut below it, and rises over nothing
        that is younger than its time to live."""
        if state.cursor.history != self._history:
            self._history = state.cursor.history
            self._floors.clear()
        for key, row in state.queues():
            floor = int(row["min_queue_offset"]) if key.topic in self._ttl_s else 0
            before = self._floors.get(key, floor)
            assert floor >= before, f"the floor of {key} fell"
            for offset in range(before, floor):
                stored_ms = min(self._broker.ever[key.topic, key.queue_id, offset].values())
                is_old = stored_ms + self._ttl_s[key.topic] * 1000 <= now_ms
                assert is_old or self._broker.lost, f"{key} offset {offset} expires before its time"
            self._floors[key] = floor

    def nothing_living_is_pending(self, state: CatalogState) -> None:
        """No object of a living run is garbage, each is there, and its messages have one TTL class."""
        pending, there = state.pending_deletions, {info.key for info in self._archive.list("")}
        classes: dict[str, bool] = {}
        for page in living_runs(RunIndex(self._archive), state):
            for run in page.chunk.runs:
                key = page.chunk.object_keys[int(page.chunk.objects["key"][run["object"]])]
                assert key not in pending, f"{key} is needed, and a pending deletion"
                assert key in there, f"{key} is needed, and was deleted"
                expires = page.queues[int(run["queue"])].topic in self._ttl_s
                if page.queues[int(run["queue"])].topic != LIGHT:
                    assert classes.setdefault(key, expires) == expires, f"{key} has two TTL classes"

    def what_was_committed_is_readable(self, kept: Kept, source: random.Random) -> int:
        """By every reader that began within the grace: byte by byte what it was, what the broker had there, each offset
        once, or a recorded gap. The number of rows."""
        queues = kept.state.visible_queues()
        if not queues:
            return 0
        key = source.choice(sorted(queues))
        found = self.rows(kept.state, key)
        assert kept.read.setdefault(key, found) == found, (
            f"{key} reads otherwise at version {kept.state.version}"
        )
        seen = self._seen.setdefault((key.topic, key.queue_id), {})
        for offset, record in found.items():
            assert record in self._broker.ever.get((key.topic, key.queue_id, offset), ()), (
                f"{key} offset {offset} is not what the broker had"
            )
            seen[record] = max(seen.get(record, 0), kept.since_ms)
        self._pulled(kept.state, key, found, source)
        self.a_predicate_excludes_nothing(kept.state, key, found, source)
        if key.topic == KEYED:
            self.a_view_shows_the_latest_by_offset(kept.state, key, found)
        return len(found)

    def _pulled(
        self, state: CatalogState, key: QueueKey, rows: Mapping[int, bytes], source: random.Random
    ) -> None:
        """Consumers get the same rows in order, and their next offset never moves back."""
        executor, offset = InlineExecutor(), 0
        clock = Clock(monotonic_s=lambda: 0.0)
        catalog = CatalogView(self._archive, state, executor=executor, clock=clock, is_snapshot=True)
        fetcher = TieredMessageFetcher(
            PlainSource(self._archive), catalog, NO_PREFETCH, executor=executor, clock=clock
        )
        found: dict[int, bytes] = {}
        row = state.queue(key)
        while row is not None and offset < int(row["end_queue_offset"]):
            request = PullRequest(key.topic, key.queue_id, offset, source.randint(1, 40), 1 << 20)
            result = run_sync(fetcher.pull(request))
            assert result.next_offset > offset, f"{key} offset {offset}: next offset {result.next_offset}"
            for at, record in zip(result.batch.queue_offsets.tolist(), result.batch.records(), strict=True):
                assert offset <= at < result.next_offset or key.topic == BATCHES, f"{key} skips from {offset}"
                found[at] = bytes(record)
            offset = result.next_offset
        assert found == rows, f"{key}: a consumer gets {sorted(found.keys() ^ rows.keys())[:5]} otherwise"

    def a_predicate_excludes_nothing(
        self, state: CatalogState, key: QueueKey, rows: Mapping[int, bytes], source: random.Random
    ) -> None:
        """A scan of messages stored in some time gets those of ``rows`` from that time."""
        if key.topic in (BATCHES, LIGHT) or not rows:
            return
        times = sorted({stored_ms(record) for record in rows.values()})
        first, last = sorted((source.choice(times), source.choice(times)))
        scan, parts = self._scan(state, key, stored_between(first, last + 1))
        found = {
            offset: chunk.data[start : start + size].tobytes()
            for part in parts
            for chunk in archive_chunks(scan, part)
            for offset, start, size in zip(
                chunk.queue_offset.tolist(), chunk.starts.tolist(), chunk.size.tolist(), strict=True
            )
        }
        wanted = {at: record for at, record in rows.items() if first <= stored_ms(record) <= last}
        assert found == wanted, f"{key}: a scan gets {sorted(found.keys() ^ wanted.keys())[:5]} otherwise"

    def a_view_shows_the_latest_by_offset(
        self, state: CatalogState, key: QueueKey, rows: Mapping[int, bytes]
    ) -> None:
        """Of each key the last message, unless it deletes the key; whatever the clock was."""
        scan, parts = self._scan(state, key, Predicate())
        chunks = (
            chunk for part in by_queue(parts) for chunk in view_chunks(scan, part, View.LATEST, lambda it: it)
        )
        found = {offset for chunk in chunks for offset in chunk.queue_offset.tolist()}
        latest = {key_of(record): at for at, record in sorted(rows.items())}
        wanted = {at for at in latest.values() if body_of(rows[at])}
        assert found == wanted, f"{key}: the view of the latest has {sorted(found ^ wanted)[:5]} otherwise"

    def _scan(
        self, state: CatalogState, key: QueueKey, predicate: Predicate
    ) -> tuple[ArchiveScan, Sequence[Slices]]:
        """Of all messages of a queue, and its parts."""
        row = state.queue(key)
        assert row is not None
        offsets = OffsetRange(int(row["min_queue_offset"]), int(row["end_queue_offset"]))
        planner = ArchivePlanner(self._archive, (state.cluster, state.broker))
        parts = planner.slices(state, [{key: offsets}], predicate, is_header_only=False)
        return ArchiveScan(self._archive, predicate, True, 1 << 20, self._refuse), parts

    @staticmethod
    def _refuse(place: CorruptPlace) -> None:
        raise AssertionError(place.message)

    def keys_are_found(self, state: CatalogState, topic: str, key: str) -> int:
        """A query by key finds each visible message with it, by index files and objects above their coverage."""
        there = {
            record
            for queue in state.visible_queues()
            if queue.topic == topic
            for record in self.rows(state, queue).values()
            if key_of(record) == key
        }
        source = QuerySource(StoreReader(self._archive), self._archive, PlainBlocks(self._archive))
        page = run_sync(find_by_key(source, state, KeyQuery(topic, key, max_messages=10_000)))
        assert {one.data for one in page.messages} == there, f"{topic}#{key} is found otherwise"
        return len(there)

    def what_is_hidden_is_listed(self, state: CatalogState, since_ms: int) -> None:
        """What a replaced log hides stays in a listed history until its grace ends; ``since_ms``: it is not over for
        what was seen later."""
        listed: set[bytes] | None = None
        shown = {(key.topic, key.queue_id): key for key in state.visible_queues()}
        for queue in self._seen:
            if queue[0] not in (PLAIN, RETRY, BATCHES):
                continue
            rows = set(self.rows(state, shown[queue]).values()) if queue in shown else set()
            young = {record for record, at_ms in self._seen[queue].items() if at_ms >= since_ms} - rows
            if young and listed is None:
                listed = {
                    record
                    for listing in list_histories(self._archive, state)[:-1]
                    if listing.messages
                    for old in (history_state(self._archive, state, listing.number),)
                    for key in old.visible_queues()
                    if key.topic != LIGHT  # its messages may be visible
                    for record in self._lenient(old, key)
                }
            assert young <= (listed or set()), f"{queue}: {len(young)} messages are hidden and not listed"

    def _lenient(self, state: CatalogState, key: QueueKey) -> Collection[bytes]:
        """Rows of a former history, of which objects may be deleted."""
        try:
            return self.rows(state, key).values()
        except (CorruptionError, NotFoundError):
            return ()

    def rows(self, state: CatalogState, key: QueueKey) -> dict[int, bytes]:
        reader = QueueReader(self._archive, state, key)
        gaps = [(int(gap["begin_queue_offset"]), int(gap["end_queue_offset"])) for gap in state.gaps_of(key)]
        found: dict[int, bytes] = {}
        at = expected = reader.min_offset
        while at < reader.max_offset:
            batch = reader.read(at, max_rows=100, max_bytes=1 << 20)
            for offset, count, start, size in zip(
                batch.queue_offsets.tolist(), batch.inner_num.tolist(), batch.starts, batch.sizes, strict=True
            ):
                assert offset + count > expected, f"{key} has {offset} again"
                self._only_gaps(key, range(expected, offset), gaps)
                found[offset], expected = batch.data[start : start + size].tobytes(), offset + count
            assert batch.next_offset > at
            at = batch.next_offset
        self._only_gaps(key, range(expected, reader.max_offset), gaps)
        return found

    def _only_gaps(self, key: QueueKey, offsets: range, gaps: Sequence[tuple[int, int]]) -> None:
        for offset in offsets:
            is_gap = any(begin <= offset < end for begin, end in gaps)
            assert is_gap or self.may_be_absent(key, offset), f"{key} has not {offset}, and no gap there"

    def may_be_absent(self, key: QueueKey, offset: int) -> bool:
        """What an LMQ refers to expires with its parent; key compaction drops what is not the latest of its key."""
        broker = self._broker
        if key.topic == LIGHT:
            return any(EXPIRING.encode() in record for record in broker.ever[LIGHT, 0, offset])
        if key.topic != KEYED:
            return False
        records = broker.ever[KEYED, key.queue_id, offset]
        later = {
            key_of(record)
            for (topic, queue_id, at), others in broker.ever.items()
            if (topic, queue_id) == (KEYED, key.queue_id) and at > offset
            for record in others
        }
        return any(key_of(record) in later or not body_of(record) for record in records)

    def everything_is_archived(self, now_ms: int) -> None:
        """Every message of the broker's queues is there, in the only generation that shows, or has expired, or was
        deleted before it was archived."""
        state = load(self._archive)
        assert len({key[:2] for key in state.visible_queues()}) == len(state.visible_queues())
        shown = {(key.topic, key.queue_id): key for key in state.visible_queues()}
        for queue, records in self._broker.records.items():
            key = shown.get(queue)
            if key is None:
                assert all(self._may_be_missing(queue, one, now_ms) for one in records.values()), queue
                continue
            found, row = self.rows(state, key), state.queue(key)
            for offset, record in found.items():
                assert offset in records and records[offset].record == record, (
                    f"{key} has {offset}, which is not in the log"
                )
            assert row is not None
            if queue[0] in self._ttl_s:
                old = [one.stored_ms for at, one in records.items() if at in found]
                assert all(at_ms + self._ttl_s[queue[0]] * 1000 > now_ms for at_ms in old), (
                    f"{key} has expired"
                )
            if queue[0] == KEYED:
                self.the_latest_of_each_key_counts(key, records, found)
            for offset, stored in records.items():
                if offset not in found and offset < int(row["end_queue_offset"]):
                    assert self.may_be_absent(key, offset) or self._may_be_missing(queue, stored, now_ms), (
                        f"{key} offset {offset} is hidden before its time, or lost"
                    )
                assert offset in found or offset < int(row["end_queue_offset"]), f"{key} ends below {offset}"

    def tables_are_archived(self) -> None:
        """The newest copy of the topic table is the broker's, whatever other tables are like."""
        key = load(self._archive).state_objects["topics"]
        assert {*decode_state(self._archive.get(key), "topics", source=key)} == {*TOPICS}

    def the_latest_of_each_key_counts(
        self, queue: QueueKey, records: Mapping[int, Stored], found: Mapping[int, bytes]
    ) -> None:
        """Where it is a deletion, no earlier value shows without it; else it is there."""
        latest = {key_of(one.record): offset for offset, one in sorted(records.items())}
        for key, offset in latest.items():
            is_lost = records[offset].phys in self._broker.lost
            older = [at for at, record in found.items() if key_of(record) == key and at < offset]
            is_deleted = not body_of(records[offset].record) and not older
            assert offset in found or is_deleted or is_lost, f"{queue}: {key} is not what {offset} says"

    def _may_be_missing(self, queue: Queue, stored: Stored, now_ms: int) -> bool:
        is_expiring = queue[0] == EXPIRING or (queue[0] == LIGHT and EXPIRING.encode() in stored.record)
        ttl_ms = self._ttl_s[EXPIRING] * 1000 if is_expiring else 10**12
        return stored.phys in self._broker.lost or stored.stored_ms + ttl_ms <= now_ms
