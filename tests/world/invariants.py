"""The rules that hold after every step, a function each."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.archive.queue_reader import QueueReader
from tests.end_to_end.archive_check import records_of
from tests.world.broker_model import BrokerModel
from tiered.catalog.catalog_reader import head_version, load, read_commit
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore


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

    def check(self) -> None:
        """All of them, if the catalog has moved."""
        self._broker.disk_was_not_written_to()
        head = head_version(self._archive)
        if head == self._version:
            return
        self.one_chain(head)
        state = load(self._archive)
        self.floors_rise(state)
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

    def floors_rise(self, state: CatalogState) -> None:
        """The minimum of a queue that expired never falls, but where the log was cut below it."""
        if state.cursor.history != self._history:
            self._history = state.cursor.history
            self._floors.clear()
        for key, row in state.queues():
            floor = int(row["min_queue_offset"]) if key.topic in self._ttl_s else 0
            assert floor >= self._floors.get(key, 0), f"the floor of {key} fell"
            self._floors[key] = floor

    def nothing_living_is_pending(self, state: CatalogState) -> None:
        """No object of a living run is garbage, and each is there."""
        pending, there = state.pending_deletions, {info.key for info in self._archive.list("")}
        for page in living_runs(RunIndex(self._archive), state):
            for run in page.chunk.runs:
                key = page.chunk.object_keys[int(page.chunk.objects["key"][run["object"]])]
                assert key not in pending, f"{key} is needed, and a pending deletion"
                assert key in there, f"{key} is needed, and was deleted"

    def read(self, kept: Kept, source: random.Random) -> int:
        """What was committed is readable by every reader that began within the grace: byte by byte what it was, what
        the broker had there, each offset once. The number of rows."""
        queues = kept.state.visible_queues()
        if not queues:
            return 0
        key = source.choice(sorted(queues))
        found = self._rows(kept.state, key)
        assert kept.read.setdefault(key, found) == found, (
            f"{key} reads otherwise at version {kept.state.version}"
        )
        for offset, record in found.items():
            assert record in self._broker.ever.get((key.topic, key.queue_id, offset), ()), (
                f"{key} offset {offset} is not what the broker had"
            )
        return len(found)

    def _rows(self, state: CatalogState, key: QueueKey) -> dict[int, bytes]:
        reader = QueueReader(self._archive, state, key)
        rows = [(offset, record) for offset, _, record in records_of(reader)]
        gaps = [(int(gap["begin_queue_offset"]), int(gap["end_queue_offset"])) for gap in state.gaps_of(key)]
        wanted = range(reader.min_offset, reader.max_offset)
        there = [offset for offset in wanted if not any(begin <= offset < end for begin, end in gaps)]
        assert [offset for offset, _ in rows] == there, f"{key} has not {there}"
        return dict(rows)

    def everything_is_archived(self, now_ms: int) -> None:
        """Every message of the broker's queues is there, except those that have expired."""
        state = load(self._archive)
        shown = {(key.topic, key.queue_id): key for key in state.visible_queues()}
        for queue, records in self._broker.records.items():
            if not records:
                continue
            key = shown.pop(queue)
            found, ttl_ms = self._rows(state, key), self._ttl_s.get(key.topic, 10**9) * 1000
            gone = {offset for offset in records if offset < min(found, default=max(records) + 1)}
            assert found == {offset: record for offset, record in records.items() if offset not in gone}, key
            for offset in gone:
                stored_ms = self._broker.stored_ms(queue, offset, records[offset])
                assert stored_ms + ttl_ms <= now_ms, f"{key} offset {offset} is hidden before its time"
