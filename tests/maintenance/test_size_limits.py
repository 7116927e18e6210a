"""Size limits expire the oldest messages of a topic, and no more than needed, also inside joined runs."""

import random
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fetcher.queries.queue_listing import list_queues
from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits
from rocketmq_tiered.maintenance.compaction_round import plan_rounds, run_round
from rocketmq_tiered.maintenance.expire import ExpiryPass, commit_pass, plan_pass
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.archive.queue_reader import QueueReader, records_of
from tests.catalog.collection import run_gc
from tests.sweeps import examples
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.settings.topic_rules import TopicRule

QUEUES = [QueueKey("t", number, 0) for number in range(4)]
LIMITS = CatalogLimits(root_every=3, spill_runs=6, page_runs_max=4, merge_sequences=3, merge_spills=3)
TTL_MS = 10**15


class Message(NamedTuple):
    phys: int
    queue: QueueKey
    record: bytes


class Scene:
    """Queues of one topic in an archive, and what a plain oracle leaves of them."""

    def __init__(self, seed: int, work: Path) -> None:
        self.random, self._work = random.Random(seed), work
        self.store = MemoryStore(clock=Clock(wall_ms=lambda: NOW_MS))
        self.made = ArchiveBuilder(self.store, limits=LIMITS)
        self.left: list[Message] = []
        self._ends: list[tuple[CatalogState, int, dict[QueueKey, tuple[int, int, int]]]] = []
        self.commit()

    def commit(self) -> None:
        """A cycle of some queues, whose times do not ascend."""
        rand = self.random
        sent = [
            Sent(
                rand.choice(QUEUES),
                rand.randbytes(rand.choice((0, 5, 300))),
                stored_ms=NOW_MS - rand.randrange(10**9),
            )
            for _ in range(rand.randint(1, 12))
        ]
        self.made.writer.refresh()
        counts = {queue: len(found.rows) for queue, found in self.made.truth.items()}
        state = self.made.commit(sent, as_set=rand.random() < 0.6)
        rows = [
            Message(row.phys, queue, row.record)
            for queue, found in self.made.truth.items()
            for row in found.rows[counts.get(queue, 0) :]
        ]
        self.left += sorted(rows)
        ends = {
            queue: (found.end, found.end_byte, len(found.rows)) for queue, found in self.made.truth.items()
        }
        self._ends.append((state, self.made._phys, ends))

    def compact(self) -> None:
        """The first round, if there is one."""
        state = load(self.store)
        limits = CompactionLimits(split_bytes=self.random.choice((1, 2_000, 1 << 20)))
        for planned in plan_rounds(self.store, state, limits, before_version=state.version + 1):
            options = RewriteOptions(self._work, 1 << 24)
            run_round(self.store, state, planned, options, clock=Clock(wall_ms=lambda: NOW_MS))
            break

    def limit(self) -> None:
        """A pass with a limit between nothing and all."""
        total = sum(len(message.record) for message in self.left)
        max_bytes = self.random.randint(0, total + 10)
        found = self.expire(max_bytes)
        gone = 0
        while total > max_bytes:
            total -= len(self.left.pop(0).record)
            gone += 1
        assert found.plan.rows == gone

    def expire(self, max_bytes: int, ttl_ms: int = TTL_MS) -> ExpiryPass:
        """One pass."""
        rule = TopicRule("t", ttl_ms, 0, "test", max_bytes, "test", "NOT_IN_DISK", "test")
        state = load(self.store)
        found = plan_pass(self.store, state, lambda _: rule, clock=Clock(wall_ms=lambda: NOW_MS))
        commit_pass(self.store, state, found, clock=Clock(wall_ms=lambda: NOW_MS))
        return found

    def diverge(self) -> None:
        """The log ends where it ended after one of the last commits."""
        del self._ends[max(1, len(self._ends) - self.random.randint(0, 3)) :]
        state, phys, ends = self._ends[-1]
        self.made.writer.refresh()
        self.made.writer.append_history(common_version=state.version, phys=phys)
        self.made._phys = phys
        self.left = [message for message in self.left if message.phys < phys]
        for queue in list(self.made.truth):
            if queue not in ends:
                del self.made.truth[queue]
                continue
            found = self.made.truth[queue]
            found.end, found.end_byte, count = ends[queue]
            del found.rows[count:]

    def collect(self) -> None:
        """Objects of expired runs are deleted at once."""
        run_gc(self.store, load(self.store), apply=True, grace_ms=0, clock=lambda: NOW_MS)

    def check(self) -> None:
        """What is readable, counted and listed is what is left."""
        state = load(self.store)
        for queue in self.made.truth:
            mine = [message.record for message in self.left if message.queue == queue]
            assert _readable(self.store, state, queue) == mine, queue
            row = state.queue(queue)
            assert row is not None and row["row_count"] == len(mine)
        messages = [queue.messages for queue in list_queues(state, hidden=False, index=RunIndex(self.store))]
        assert sum(messages) == len(self.left)


def _readable(store: MemoryStore, state: CatalogState, queue: QueueKey) -> list[bytes]:
    return [record for _, _, record in records_of(QueueReader(store, state, queue))]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Compaction joined the runs of each queue."""
    scene = Scene(0, tmp_path)
    for _ in range(30):
        scene.commit()
    for _ in range(8):
        scene.compact()
    for queue in QUEUES:
        assert max(RunIndex(scene.store).runs_of(load(scene.store), queue).runs["rows"]) > 10
    return scene


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_a_limit_inside_joined_runs_expires_the_oldest_and_no_more_than_needed(
    scene: Scene, share: float
) -> None:
    total = sum(len(message.record) for message in scene.left)
    found = scene.expire(int(total * share))
    gone = found.plan.rows
    assert found.plan.byte_count == sum(len(message.record) for message in scene.left[:gone])
    assert 0 <= int(total * share) - (total - found.plan.byte_count) < len(scene.left[gone - 1].record)
    del scene.left[:gone]
    scene.check()
    assert not len(scene.expire(int(total * share)).plan.floors), "a second pass takes nothing"
    assert verify_archive(scene.store, depth="full").anomalies == []


def test_the_rest_of_a_divided_run_expires_by_its_time_to_live(scene: Scene) -> None:
    total = sum(len(message.record) for message in scene.left)
    first = scene.expire(total // 2).plan
    rest = scene.expire(total, ttl_ms=0).plan
    assert first.rows + rest.rows == len(scene.left)
    assert rest.living_rows == rest.rows
    assert all(int(row["row_count"]) == 0 for _, row in load(scene.store).queues())


def test_a_run_whose_rows_cannot_be_read_expires_as_a_whole(scene: Scene) -> None:
    total = sum(len(message.record) for message in scene.left)
    state = load(scene.store)
    chunk = RunIndex(scene.store).runs_of(state, QUEUES[0])
    first = int(chunk.objects["key"][int(chunk.runs["object"][0])])
    scene.store.delete([chunk.object_keys[first]])
    end = int(chunk.runs["end_queue_offset"][0])
    scene.expire(total // 2)
    row = load(scene.store).queue(QUEUES[0])
    assert row is not None and int(row["min_queue_offset"]) in {0, *chunk.runs["end_queue_offset"].tolist()}
    scene.expire(0)
    row = load(scene.store).queue(QUEUES[0])
    assert row is not None and int(row["min_queue_offset"]) >= end


@settings(max_examples=examples(12), deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(3, 25))
def test_whatever_happens_between_passes_limits_leave_the_newest_that_fit(
    seed: int, steps: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scene = Scene(seed, tmp_path_factory.mktemp("work"))
    events = [scene.commit, scene.commit, scene.compact, scene.limit, scene.diverge, scene.collect]
    for _ in range(steps):
        scene.random.choice(events)()
        scene.check()
    scene.limit()
    scene.check()
    assert verify_archive(scene.store, depth="full").anomalies == []
