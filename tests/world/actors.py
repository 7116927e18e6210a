"""Who acts in the world beside its sidecars: real code, a step at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import rocketmq_tiered.maintenance.compaction_round as rounds
from rocketmq_tiered.maintenance.compaction_plan import CompactionDue, gains
from rocketmq_tiered.maintenance.expire import commit_pass, plan_pass
from rocketmq_tiered.maintenance.gc import collect, plan_collection
from rocketmq_tiered.maintenance.key_job import KeyCompaction
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.maintenance.compaction_scene import LIMITS
from tests.world.broker_model import EXPIRING, KEYED, PLAIN
from tests.world.invariants import Kept
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.task import run_pass
from tiered.catalog.catalog_reader import head_version, load
from tiered.catalog.garbage import Grace
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.clock import Clock
from tiered.errors import UsageError
from tiered.formats.keys import archive_prefix
from tiered.formats.segment import BlockCodec
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRule

if TYPE_CHECKING:
    from tests.world.world import World

GRACE_S, KEPT_S, CUT_S = 120, 90, 100
"""A log loses at most the last ``CUT_S``: key compaction leaves what is younger (key_compaction.min_age_ms)."""
TTL_S = {EXPIRING: 60}
PAGE_RUNS = 9


class Actor:
    """``weight``: how often it acts. Ends with the errors of its requests, or is killed; then ``die`` is called."""

    name: str = ""
    weight: int = 1

    def __init__(self, world: World) -> None:
        self.world = world
        self.store: ObjectStore = PrefixedStore(world.store_of(self.name), archive_prefix(CLUSTER, BROKER))

    def act(self) -> None:
        """One step. Raises what ends a process."""
        raise NotImplementedError

    def die(self) -> None:
        """It has lost its memory."""

    def finish(self) -> None:
        """Its part in the archive's coming to rest."""

    def options(self) -> RewriteOptions:
        spool = self.world.directory / "spool"
        return RewriteOptions(spool, 10**7, BlockCodec(block_bytes=600), wait=self.world.pass_s)


class Broker(Actor):
    """Takes messages; deletes files; dies; starts again, also on another disk; deletes and creates a topic."""

    name = "broker"
    weight = 6

    def act(self) -> None:
        world, broker, chance = self.world, self.world.broker, self.world.random.random()
        broker.disk_was_not_written_to()
        if chance < 0.82:
            broker.send(world.now_ms)
        elif chance < 0.84:
            since_ms = world.now_ms - CUT_S * 1000
            world.counts["offsets used again"] += broker.use_offset_again(world.now_ms, since_ms)
        elif chance < 0.89:
            if world.free_writers():  # of a log that was cut, what both have would go before it is compared
                is_late = world.random.random() < 0.2
                broker.delete_files(load(world.archive).cursor.phys, is_late=is_late)
                world.counts["files deleted late"] += is_late
        elif chance < 0.90:
            broker.lists_all = not broker.lists_all
            broker.write_topics()
            (broker.store.path / "config" / "consumerOffset.json").write_bytes(bytes(40))  # a torn table
            broker.lose_queues()
        elif chance < 0.915:
            broker.recreate()
            world.counts["topics recreated"] += 1
        elif chance < 0.945:
            broker.save_disk(Path(mkdtemp(dir=world.directory)) / "disk", world.now_ms)
        elif chance < 0.97:
            world.counts["disks put back"] += broker.put_disk_back(world.now_ms, world.now_ms - CUT_S * 1000)
        else:
            cuts = world.random.choice((0, 0, 1, 4, 15))
            broker.start_again(
                tears=world.random.random() < 0.5, cuts=cuts, since_ms=world.now_ms - CUT_S * 1000
            )
            world.counts["logs cut"] += cuts > 0
        broker.watch()
        world.trace("broker", f"log ends at {broker.disk.phys}")


class Reader(Actor):
    """Keeps versions for less than the grace, and reads queues at them."""

    name = "reader"
    weight = 3

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._kept: list[Kept] = []

    def act(self) -> None:
        world = self.world
        if not head_version(world.archive):
            return
        self._kept = [kept for kept in self._kept if world.now_ms - kept.since_ms < KEPT_S * 1000]
        if len(self._kept) < 3:
            self._kept.append(Kept(load(world.archive), world.now_ms))
        kept = world.random.choice(self._kept)
        if world.random.random() < 0.15:
            topic, key = world.random.choice((PLAIN, KEYED)), f"k{world.random.randrange(9)}"
            world.counts["messages found by key"] += world.invariants.keys_are_found(kept.state, topic, key)
        if world.random.random() < 0.1 and kept.state.log_histories:
            world.invariants.what_is_hidden_is_listed(load(world.archive), world.now_ms - GRACE_S * 1000)
            world.counts["hidden histories checked"] += 1
        world.counts["rows read"] += world.invariants.what_was_committed_is_readable(kept, world.random)


class Expiry(Actor):
    """Hides what is older than its time to live."""

    name = "expiry"

    def act(self) -> None:
        hours_off = self.world.random.choice((0, 0, 0, -3, 3))
        try:
            self._pass(self.store, Clock(lambda: self.world.now_ms + hours_off * 3_600_000))
        except UsageError:  # as if the log was cut at the same time
            self.world.counts["clocks off"] += hours_off != 0
        else:
            assert not hours_off, "a clock that is hours off expires messages"

    def finish(self) -> None:
        self._pass(self.world.archive, self.world.clock)

    def _pass(self, store: ObjectStore, clock: Clock) -> None:
        state = load(store)
        found = plan_pass(store, state, self._rule_of, clock=clock)
        commit_pass(store, state, found, clock=clock)
        self.world.counts["floors"] += len(found.plan.floors)

    @staticmethod
    def _rule_of(topic: str) -> TopicRule:
        ttl_ms = TTL_S[topic] * 1000 if topic in TTL_S else None
        return TopicRule(topic, ttl_ms, 0, "test", None, "test", "NOT_IN_DISK", "test")


class Collector(Actor):
    """Deletes garbage after its grace."""

    name = "gc"

    def act(self) -> None:
        self._collect(self.store)

    def finish(self) -> None:
        self._collect(self.world.archive)

    def _collect(self, store: ObjectStore) -> None:
        state = load(store)
        plan = plan_collection(store, state, Grace(GRACE_S * 1000, GRACE_S * 1000), self.world.clock)
        self.world.counts["unexplained objects"] += len(plan.unexplained)
        collect(store, state, plan, clock=self.world.clock)


class Compactor(Actor):
    """Joins objects, as a command, or as a task of a sidecar that commits with its writer."""

    name = "compactor"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.weight = world.random.choice((2, 6))
        self._limits = replace(LIMITS, growth_min=world.random.choice((1, 4)), dead_share_min=0.5)
        if world.seed % 3 == 0:  # rounds of some queues of a sequence
            self._limits = replace(self._limits, runs_max=world.seed % 40 + 5)

    def act(self) -> None:
        world, store = self.world, self.store
        writers = world.free_writers()
        own = writers[0] if writers and world.random.random() < 0.5 else None
        state = load(store) if own is None else own.state
        wanted = gains if world.random.random() < 0.5 else CompactionDue(10**9, world.now_ms)
        before = world.random.choice((1 << 40, state.version - 3))
        plans = rounds.plan_rounds(store, state, self._limits, before_version=before, is_wanted=wanted)
        if (planned := next(plans, None)) is not None:
            result = rounds.run_round(
                store,
                state,
                planned,
                self.options(),
                clock=self.world.clock,
                page_runs_max=PAGE_RUNS,
                maintenance=None if own is None else MaintenanceCommit(store, own, self.world.clock),
            )
            world.counts["rounds" if result is not None else "void rounds"] += 1


class KeyCompactor(Actor):
    """Keeps the latest message of each key, as a task of a sidecar that has compared the broker's log."""

    name = "key compactor"

    def act(self) -> None:
        for writer in self.world.free_writers():
            self._compact(MaintenanceCommit(self.store, writer, self.world.clock))

    def finish(self) -> None:
        store = self.world.archive
        self._compact(MaintenanceCommit.opened(store, load(store), "keys", self.world.clock))

    def _compact(self, commits: MaintenanceCommit) -> None:
        own = replace(Settings().key_compaction, min_age_ms=CUT_S * 1000)
        settings = replace(Settings(), key_compaction=own)
        task = KeyCompaction(commits, settings, self.options(), lambda _: lambda topic: topic == KEYED)
        run_pass(task, commits.refresh)
        self.world.counts["rounds of key compaction"] += task.rounds


ACTORS: tuple[type[Actor], ...] = (Broker, Reader, Expiry, Compactor, KeyCompactor, Collector)
