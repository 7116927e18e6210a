"""Compaction, expiry, garbage collection, an owner and readers in any order; and planted defects are caught.

The real compactor, expiry, garbage collection, an owner whose log is cut at times, and readers on one archive, in an
order chosen by a seed.

Single-threaded: whenever the compactor makes a request that changes something, others may act first, its reply may be
lost, or it may die. Time passes by a second a step. Garbage is collected after GRACE_S; a reader keeps its version of
the catalog for less.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import rocketmq_tiered.maintenance.compaction_ranges as ranges
import rocketmq_tiered.maintenance.compaction_round as rounds
from rocketmq_tiered.maintenance.compaction_plan import CompactionDue, gains
from rocketmq_tiered.maintenance.expire import commit_pass, plan_pass
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.archive.queue_reader import QueueReader
from tests.catalog.collection import run_gc
from tests.maintenance.compaction_scene import LIMITS, LMQ, QUEUES
from tests.soak.results import knob
from tests.sweeps import sweep
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import CommitDraft
from tiered.catalog.deletions import Reason
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.requirements import Requirements
from tiered.catalog.state import CatalogState
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import UnansweredError, UnavailableError
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.interface import Body, ObjectStore, Piece
from tiered.object_store.memory import MemoryStore
from tiered.object_store.wrapper import StoreWrapper
from tiered.settings.topic_rules import TopicRule

SOAK_SEEDS = knob("COMPACTION_SEEDS", 3000)


@pytest.mark.parametrize("seed", sweep(range(60), fast=range(4), rest="integration"))
def test_nothing_is_lost_or_left_over(seed: int, tmp_path: Path) -> None:
    World(seed, tmp_path).run()


@pytest.mark.soak
def test_nothing_is_lost_or_left_over_in_thousands_of_orders(tmp_path: Path) -> None:
    done = void = died = 0
    for seed in range(1000, 1000 + SOAK_SEEDS):
        world = World(seed, tmp_path)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        done, void, died = done + world.rounds, void + world.void, died + world.died
    assert min(done, void, died) > SOAK_SEEDS / 4


# -- defects --------------------------------------------------------------------------------------------------


@contextmanager
def changed_drafts(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Drafts of the compactor, changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "CommitDraft", lambda kind, **values: CommitDraft(kind, **change(values)))
        yield


def no_sources_deleted() -> Any:
    """Sources become no pending deletions: they are left over."""
    return changed_drafts(
        lambda values: values | {"pending_deletions": ()} if values["reason"] == Reason.COMPACTED else values
    )


@contextmanager
def unannounced() -> Iterator[None]:
    """Nothing is announced: a compaction that dies leaves objects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "output_keys", lambda *_: [])
        yield


@contextmanager
def kept_runs_forgotten() -> Iterator[None]:
    """New pages have only what was moved."""
    put_pages = rounds._put_pages

    def forgetting(store: ObjectStore, state: CatalogState, planned: rounds.PlannedRound, *rest: Any) -> Any:
        moved_only = replace(planned.candidates, runs=planned.candidates.runs[:0])
        return put_pages(store, state, replace(planned, candidates=moved_only), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "_put_pages", forgetting)
        yield


@contextmanager
def changes_ignored() -> Iterator[None]:
    """A round commits although pages, runs in memory or the epoch have changed since its plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Requirements, "unmet", lambda self, state, is_compacted: "")
        yield


DEFECTS = (
    no_sources_deleted,
    unannounced,
    kept_runs_forgotten,
    changes_ignored,
)


@pytest.mark.integration
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_is_caught(defect: Callable[[], Any], tmp_path: Path) -> None:
    caught: Sequence[int] = []
    with defect():
        for seed in range(30):
            try:
                World(seed, tmp_path).run()
            except Exception:
                caught = [*caught, seed]
                break
    assert caught, "no seed of 30 notices it"


STEPS = 40
PAGE_RUNS = 9
GRACE_S = 40
KEPT_S = 30
"""How long a reader keeps its version, at most."""
OF_EPOCH = "pages/"
"""Of what a compactor put for a commit and died: it stays until the next owner."""
TTL_S = {QUEUES[0].topic: 25, QUEUES[1].topic: 60}


class DiedError(BaseException):
    """kill -9 of the compactor."""


class World:
    """The archive, its actors, and who is next."""

    def __init__(self, seed: int, spool: Path) -> None:
        self.random = random.Random(seed)
        self.spool = spool
        self.now_ms = NOW_MS
        self.store = MemoryStore(f"memory://{seed}", clock_ms=lambda: self.now_ms)
        self.limits = CatalogLimits(
            root_every=4,
            spill_runs=self.random.choice((8, 16, 10**6)),
            page_runs_max=PAGE_RUNS,
            merge_sequences=self.random.choice((3, 6)),
            spill_deletions=self.random.choice((6, 512)),
        )
        self.owner = ArchiveBuilder(self.store, limits=self.limits)
        self.readers: list[tuple[CatalogState, int]] = []
        self.ends: list[tuple[int, int]] = []
        """(version, physical end) of each commit of the log as it is."""
        self.is_in_round = False
        self.rounds = self.void = self.died = self.read_rows = self.cuts = 0
        self.cut_weight = seed % 2
        self.compaction_limits = replace(LIMITS, growth_min=self.random.choice((1, 4)), dead_share_min=0.5)
        if seed % 3 == 0:  # rounds of some queues of a sequence
            self.compaction_limits = replace(self.compaction_limits, runs_max=seed % 40 + 5)

    def run(self) -> None:
        """All steps, then everything comes to rest. Raises AssertionError where something is wrong."""
        with patch.object(ranges, "PAGE_RUNS", PAGE_RUNS):
            for _ in range(5):
                self.grow()
            for _ in range(STEPS):
                self.step()
            self.finish()

    def step(self) -> None:
        """One actor acts."""
        self.now_ms += 1000
        actors: list[tuple[Callable[[], None], int]] = [
            (self.grow, 5),
            (self.read, 4),
            (self.expire, 1),
            (self.collect, 1),
            (self.restart, 1),
            (self.cut_log, self.cut_weight),
        ]
        if not self.is_in_round:
            actors.append((self.compact, 3))
        self.random.choices([act for act, _ in actors], [weight for _, weight in actors])[0]()

    # -- actors -----------------------------------------------------------------------------------------------

    def grow(self) -> None:
        """The owner commits a cycle, mostly of shared objects."""
        sent = [
            Sent(
                queue := self.random.choice(QUEUES),
                self.random.randbytes(60),
                stored_ms=self.now_ms,
                lmq=[LMQ] if queue == QUEUES[0] else [],
                inner_num=2 if queue == QUEUES[1] else 1,
            )
            for _ in range(self.random.randint(1, 7))
        ]
        state = self.owner.commit(sent, as_set=self.random.random() < 0.8)
        self.ends.append((state.version, state.cursor.phys))

    def restart(self) -> None:
        """Another process takes the archive over."""
        self.owner.restart(self.random.random())

    def cut_log(self) -> None:
        """The broker's log loses its end, at most twelve commits; the owner continues behind the rest."""
        if len(self.ends) < 3:
            return
        at = self.random.randrange(max(0, len(self.ends) - 12), len(self.ends) - 1)
        version, phys = self.ends[at]
        self.owner.writer.append_history(common_version=version, phys=phys)
        self.owner.forget_above(phys)
        self.readers = []  # they have what the log no longer has
        del self.ends[at + 1 :]
        self.cuts += 1

    def expire(self) -> None:
        """A pass of expiry; a time passes that makes some messages due."""
        self.now_ms += 5000
        state = load(self.store)
        found = plan_pass(self.store, state, self.rule_of, clock=lambda: self.now_ms)
        commit_pass(self.store, state, found, clock=lambda: self.now_ms)

    def rule_of(self, topic: str) -> TopicRule:
        """Some topics expire within the simulation."""
        ttl_ms = TTL_S[topic] * 1000 if topic in TTL_S else None
        return TopicRule(topic, ttl_ms, 0, "test", None, "test", "NOT_IN_DISK", "test")

    def collect(self) -> None:
        """Garbage is collected after its grace."""
        run_gc(self.store, load(self.store), apply=True, grace_ms=GRACE_S * 1000, clock=lambda: self.now_ms)

    def read(self) -> None:
        """A reader reads a queue at a version that it has kept for a while."""
        self.readers = [(state, at) for state, at in self.readers if self.now_ms - at < KEPT_S * 1000]
        if len(self.readers) < 3:
            self.readers.append((load(self.store), self.now_ms))
        state, _ = self.random.choice(self.readers)
        known = [queue for queue in self.owner.truth if state.queue(queue) is not None]
        self.check_queue(state, self.random.choice(known))

    def check_queue(self, state: CatalogState, queue: QueueKey) -> None:
        """The reader finds what was sent, from its first offset to its last."""
        row = state.queue(queue)
        assert row is not None
        first, end = int(row["min_queue_offset"]), int(row["end_queue_offset"])
        reader, found, offset = QueueReader(self.store, state, queue), [], first
        while offset < end:
            batch = reader.read(offset, max_rows=100, max_bytes=10**6)
            for at, start in enumerate(batch.starts.tolist()):
                record = batch.data[start : start + int(batch.sizes[at])].tobytes()
                found.append((int(batch.queue_offsets[at]), record))
            assert batch.next_offset > offset
            offset = batch.next_offset
        sent = [(one.offset, one.record) for one in self.owner.truth[queue].rows if first <= one.offset < end]
        if queue == LMQ:
            assert state.queue(QUEUES[0]) is not None
            assert sent[len(sent) - len(found) :] == found, (
                queue,
                first,
                end,
            )  # others end with their parents
        else:
            assert found == sent, (queue, first, end, len(found), len(sent))
        self.read_rows += len(found)

    # -- the compactor ----------------------------------------------------------------------------------------

    def compact(self) -> None:
        """One round, as far as it comes."""
        state = self.owner.writer.state if self.random.random() < 0.5 else load(self.store)
        wanted = gains if self.random.random() < 0.5 else CompactionDue(10**9, self.now_ms)
        before = self.random.choice((1 << 40, state.version - 3))
        planned = next(
            rounds.plan_rounds(
                self.store, state, self.compaction_limits, before_version=before, is_wanted=wanted
            ),
            None,
        )
        if planned is None:
            return
        own = self.random.random() < 0.5
        store = Perilous(self.store, self)
        options = RewriteOptions(self.spool, 10**7, BlockCodec(block_bytes=600), wait=lambda _seconds: None)
        self.is_in_round = True
        try:
            result = rounds.run_round(
                store,
                state,
                planned,
                options,
                clock=lambda: self.now_ms,
                page_runs_max=PAGE_RUNS,
                maintenance=MaintenanceCommit(self.store, self.owner.writer, lambda: self.now_ms)
                if own
                else None,
            )
            self.rounds += result is not None
            self.void += result is None
        except (DiedError, UnavailableError):
            self.died += 1
        finally:
            self.is_in_round = False

    # -- the end ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Compaction comes to its end, garbage is collected, and the archive is sound and has everything."""
        self.random = random.Random(0)
        self.grow()  # names what the owner has put for commits that lost their version
        for _ in range(50):
            state = load(self.store)
            planned = next(rounds.plan_rounds(self.store, state, LIMITS, before_version=1 << 40), None)
            if planned is None:
                break
            options = RewriteOptions(self.spool, 10**7, BlockCodec(block_bytes=600))
            made = rounds.run_round(
                self.store, state, planned, options, clock=lambda: self.now_ms, page_runs_max=PAGE_RUNS
            )
            assert made is not None, "no other actor is left"
        else:
            raise AssertionError("rounds come to an end")
        left = self.leftovers()
        if self.died:
            left = [key for key in left if not key.startswith(OF_EPOCH)]
        assert left == [], left[:3]
        self.restart()
        left = self.leftovers()
        assert left == [], left[:3]
        state = load(self.store)
        for queue in self.owner.truth:
            self.check_queue(state, queue)

    def leftovers(self) -> list[str]:
        """Of a sound archive, when all grace is over."""
        for _ in range(2):
            self.now_ms += GRACE_S * 2000
            self.collect()
        report = verify_archive(self.store, depth="full")
        assert report.anomalies == [], report.anomalies[:3]
        return report.leftovers


class Perilous(StoreWrapper):
    """The compactor's way to the store: others act before its requests, replies are lost, it dies."""

    def __init__(self, store: ObjectStore, world: World) -> None:
        super().__init__(store)
        self._world = world
        self._fuse = world.random.choice((1, 2, 3, 5, 8, 1 << 30, 1 << 30, 1 << 30))
        self._dies_after = world.random.random() < 0.5

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._perhaps(
            lambda: self._store.put_if_absent(key, body), can_be_lost=not key.startswith("catalog/")
        )

    def compose_if_absent(self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None) -> None:
        self._perhaps(lambda: self._store.compose_if_absent(key, pieces), can_be_lost=True)

    def _perhaps(self, act: Callable[[], None], *, can_be_lost: bool) -> None:
        while self._world.random.random() < 0.4:
            self._world.step()
        self._fuse -= 1
        if self._fuse == 0 and not self._dies_after:
            raise DiedError
        chance = self._world.random.random() if can_be_lost else 1.0
        if chance < 0.05:
            raise UnansweredError("lost before effect")
        act()
        if self._fuse == 0:
            raise DiedError
        if chance < 0.1:
            raise UnansweredError("lost after effect")
