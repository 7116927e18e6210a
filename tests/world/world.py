"""The whole of an archive on virtual time: one seed is one history.

Single-threaded: whenever an actor makes a request, others may act first, its reply may be lost, or it is killed there.
Real code but the threads: a broker's store, two sidecars of its name, expiry, garbage collection, compaction, and
readers that keep their version of the catalog for less than the grace. After every step: the rules of ``invariants``.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import rocketmq_tiered.maintenance.compaction_ranges as ranges
import rocketmq_tiered.maintenance.compaction_round as rounds
import uploader.archive_owner
import uploader.cycle_builder
import uploader.offload
from rocketmq_tiered.maintenance.compaction_plan import CompactionDue, gains
from rocketmq_tiered.maintenance.expire import commit_pass, plan_pass
from rocketmq_tiered.maintenance.gc import collect, plan_collection
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.maintenance.compaction_scene import LIMITS
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tests.world.broker_model import BrokerModel
from tests.world.invariants import Invariants, Kept
from tests.world.sidecar import Inline, Sidecar
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.verify import verify_archive
from tiered.catalog import catalog_reader
from tiered.catalog.catalog_reader import head_version, load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.deletions import Reason
from tiered.catalog.garbage import Grace
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import FencedError, LogDivergedError, TieredError
from tiered.formats.keys import archive_prefix
from tiered.formats.segment import BlockCodec
from tiered.object_store.interface import Body, ObjectStore, Piece
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.topic_rules import TopicRule

BEGIN_MS = 1_700_000_000_000
GRACE_S, KEPT_S = 120, 90
TTL_S = {"mails": 60}
PAGE_RUNS = 9
DEPTH_MAX = 3
PREFIX = archive_prefix(CLUSTER, BROKER)


class KilledError(BaseException):
    """kill -9 of an actor."""


class ActorStore(FaultStore):
    """An actor's way to the store. ``fuse``: it is killed at this request, before or after its effect."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.root, seed=world.random.getrandbits(32), wait=world.pass_s)
        self._world, self._name = world, name
        self.fuse, self._after_effect = 1 << 30, False

    def light(self) -> None:
        """Perhaps kill it at one of the next requests."""
        source = self._world.random
        self.fuse = (
            source.choice((1, 2, 3, 5, 8))
            if source.random() < 0.12 and not self._world.is_ending
            else 1 << 30
        )
        self._after_effect = source.random() < 0.5

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._perhaps(
            "put", key, lambda: super(ActorStore, self).put_if_absent(key, body, timeout_s=timeout_s)
        )

    def compose_if_absent(self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None) -> None:
        act = lambda: super(ActorStore, self).compose_if_absent(key, pieces, timeout_s=timeout_s)  # noqa: E731
        self._perhaps("compose", key, act)

    def delete(self, keys: Sequence[str]) -> None:
        self._perhaps("delete", " ".join(keys), lambda: super(ActorStore, self).delete(keys))

    def get(self, key: str, max_bytes: int = 1 << 30) -> bytes:
        return self._perhaps("get", key, lambda: super(ActorStore, self).get(key, max_bytes))

    def _perhaps(self, operation: str, key: str, act: Callable[[], Any]) -> Any:
        self._world.others_act()
        self.fuse -= 1
        if self.fuse == 0 and not self._after_effect:
            self._world.trace(self._name, f"killed before {operation} {key}")
            raise KilledError
        answer = act()
        if self.fuse == 0:
            self._world.trace(self._name, f"killed after {operation} {key}")
            raise KilledError
        self._world.trace(self._name, f"{operation} {key}")
        return answer


class World:
    """The broker, the store, every actor, and who is next. ``tell``: called with each line of the history."""

    def __init__(self, seed: int, directory: Path, tell: Callable[[str], None] = lambda line: None) -> None:
        self.random, self.now_ms, self._tell = random.Random(seed), BEGIN_MS, tell
        self.root = MemoryStore(f"memory://world-{seed}", clock_ms=lambda: self.now_ms)
        self.archive = PrefixedStore(self.root, PREFIX)
        self.broker = BrokerModel(directory / "store", self.random, BEGIN_MS)
        self.spool = directory / "spool"
        self.is_ending, self._depth = False, 0
        self._digest = hashlib.sha256()
        self.counts: Counter[str] = Counter()
        self._stores = {
            name: ActorStore(self, name) for name in ("master", "slave", "compactor", "expiry", "gc")
        }
        self.sidecars = [Sidecar(self, name, self._stores[name]) for name in ("master", "slave")]
        self.invariants = Invariants(self.archive, self.broker, TTL_S)
        self._kept: list[Kept] = []
        self._busy: set[str] = set()
        self._compacts_most = self.random.random() < 0.5
        self._limits = replace(LIMITS, growth_min=self.random.choice((1, 4)), dead_share_min=0.5)
        if seed % 3 == 0:  # rounds of some queues of a sequence
            self._limits = replace(self._limits, runs_max=seed % 40 + 5)

    # -- time and order ---------------------------------------------------------------------------------------

    def pass_s(self, seconds: float) -> None:
        """An actor waits."""
        self.now_ms += int(seconds * 1000)
        self.others_act()

    def others_act(self) -> None:
        """While an actor waits for the store, others may act."""
        while not self.is_ending and self._depth < DEPTH_MAX and self.random.random() < 0.12:
            self.step()

    def trace(self, actor: str, text: str) -> None:
        line = f"{(self.now_ms - BEGIN_MS) / 1000:9.1f} {'  ' * self._depth}{actor}: {text}"
        self._digest.update(line.encode())
        self._tell(line)

    def digest(self) -> str:
        """Of the history and of what the store has."""
        for info in self.root.list(""):
            self._digest.update(info.key.encode() + self.root.get(info.key))
        return self._digest.hexdigest()

    def run(self, steps: int) -> None:
        """So many steps, then everything comes to rest. Raises AssertionError where a rule is broken."""
        with self._virtual():
            for store in self._stores.values():
                for fault in (
                    Fault.LOST_BEFORE,
                    Fault.LOST_AFTER,
                    Fault.STALLED,
                    Fault.THROTTLED,
                    Fault.CONFLICT,
                ):
                    operations = (
                        {"put"} if fault is Fault.STALLED else {"put", "compose"}
                    )  # its files are gone later
                    store.add(FaultRule(fault, frozenset(operations), "*", probability=0.03))
                for fault in (Fault.LOST_BEFORE, Fault.THROTTLED):
                    operations = frozenset({"get", "get_range", "list", "delete"})
                    store.add(FaultRule(fault, operations, "*", probability=0.005))
            for _ in range(steps):
                self.step()
            self.finish()

    @contextmanager
    def _virtual(self) -> Iterator[None]:
        """What is not injected takes its time and randomness from here, and has no threads."""
        source = random.Random(self.random.getrandbits(64))
        limits = CatalogLimits(
            spill_runs=self.random.choice((12, 10**6)), page_runs_max=PAGE_RUNS, merge_sequences=3
        )
        writer = partial(CatalogWriter, random=source, wait=self.pass_s, limits=limits)
        clock = SimpleNamespace(
            monotonic=lambda: self.now_ms / 1000, sleep=self.pass_s, thread_time=lambda: 0.0
        )
        with ExitStack() as patches:
            for place, name, value in (
                (uploader.archive_owner, "CatalogWriter", writer),
                (uploader.offload, "ThreadPoolExecutor", Inline),
                (uploader.cycle_builder, "ThreadPoolExecutor", Inline),
                (uploader.offload, "time", clock),
                (
                    uploader.offload,
                    "IndexBuilder",
                    partial(uploader.offload.IndexBuilder, random_source=source),
                ),
                (catalog_reader, "READ_THREADS", 1 << 30),
                (ranges, "PAGE_RUNS", PAGE_RUNS),
            ):
                patches.enter_context(patch.object(place, name, value))
            patches.enter_context(patch("random.SystemRandom", lambda: source))
            patches.enter_context(patch("secrets.randbits", source.getrandbits))
            patches.enter_context(
                patch("secrets.token_hex", lambda size=8: f"{source.getrandbits(size * 8):x}")
            )
            yield

    def step(self) -> None:
        """One actor acts, and every rule holds."""
        self.now_ms += self.random.choice((10, 200, 3_000))
        actors: list[tuple[str, Callable[[], None], int]] = [
            ("broker", self._broker_acts, 5),
            ("reader", self._read, 3),
            ("expiry", self._expire, 1),
            ("gc", self._collect, 1),
            ("compactor", self._compact, 6 if self._compacts_most else 2),
            *((sidecar.name, sidecar.step, 9) for sidecar in self.sidecars),
        ]
        free = [actor for actor in actors if actor[0] not in self._busy]
        name, act, _ = self.random.choices(free, [weight for *_, weight in free])[0]
        self._act(name, act)
        self.invariants.check()
        for store in self._stores.values():
            if self.random.random() < 0.02:
                self.counts["stalled requests that land"] += len(store.land_stalled())

    def _act(self, name: str, act: Callable[[], None]) -> None:
        self.counts[name] += 1
        self._busy.add(name)
        self._depth += 1
        if (store := self._stores.get(name)) is not None:
            store.light()
        try:
            act()
        except (KilledError, TieredError) as error:
            self.counts[f"{name}: {type(error).__name__}"] += 1
            self.trace(name, f"ended by {type(error).__name__}: {error}")
            for sidecar in self.sidecars:
                if sidecar.name == name:
                    sidecar.die()
        finally:
            self._depth -= 1
            self._busy.discard(name)

    # -- actors -----------------------------------------------------------------------------------------------

    def _broker_acts(self) -> None:
        broker, chance = self.broker, self.random.random()
        if chance < 0.86:
            broker.send(self.now_ms)
        elif chance < 0.92:
            if head_version(self.archive):
                broker.delete_files(load(self.archive).cursor.phys)
        else:
            cuts = self.random.choice((0, 0, 1, 4, 15))
            broker.start_again(tears=self.random.random() < 0.5, cuts=cuts)
            self.counts["logs cut"] += cuts > 0
        broker.watch()
        self.trace("broker", f"log ends at {broker.store.phys}")

    def _read(self) -> None:
        if not head_version(self.archive):
            return
        self._kept = [kept for kept in self._kept if self.now_ms - kept.since_ms < KEPT_S * 1000]
        if len(self._kept) < 3:
            self._kept.append(Kept(load(self.archive), self.now_ms))
        self.counts["rows read"] += self.invariants.read(self.random.choice(self._kept), self.random)

    def _expire(self) -> None:
        store = PrefixedStore(self._stores["expiry"], PREFIX)
        state = load(store)
        found = plan_pass(store, state, self._rule_of, clock=lambda: self.now_ms)
        commit_pass(store, state, found, clock=lambda: self.now_ms)
        self.counts["floors"] += len(found.plan.floors)

    @staticmethod
    def _rule_of(topic: str) -> TopicRule:
        ttl_ms = TTL_S[topic] * 1000 if topic in TTL_S else None
        return TopicRule(topic, ttl_ms, 0, "test", None, "test", "NOT_IN_DISK", "test")

    def _collect(self) -> None:
        self._collect_from(PrefixedStore(self._stores["gc"], PREFIX))

    def _collect_from(self, store: ObjectStore) -> None:
        state, clock = load(store), lambda: self.now_ms
        plan = plan_collection(store, state, Grace(GRACE_S * 1000, GRACE_S * 1000), clock)
        self.counts["unexplained objects"] += len(plan.unexplained)
        collect(store, state, plan, clock=clock)

    def _compact(self) -> None:
        store = PrefixedStore(self._stores["compactor"], PREFIX)
        state, wanted = (
            load(store),
            gains if self.random.random() < 0.5 else CompactionDue(10**9, self.now_ms),
        )
        before = self.random.choice((1 << 40, state.version - 3))
        plans = rounds.plan_rounds(store, state, self._limits, before_version=before, is_wanted=wanted)
        if (planned := next(plans, None)) is not None:
            options = RewriteOptions(self.spool, 10**7, BlockCodec(block_bytes=600), wait=self.pass_s)
            result = rounds.run_round(
                store, state, planned, options, clock=lambda: self.now_ms, page_runs_max=PAGE_RUNS
            )
            self.counts["rounds" if result is not None else "void rounds"] += 1

    # -- the end ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Faults end, everything is archived, garbage is collected: the archive is sound and has everything, and
        nothing else."""
        self.is_ending = True
        for store in self._stores.values():
            self.counts.update(request.outcome for request in store.requests if request.outcome != "ok")
            store.clear()
            store.fuse = 1 << 30
            store.land_stalled()
        self.broker.recover()
        self.broker.send(self.now_ms)
        self.broker.watch()
        for sidecar in self.sidecars:
            sidecar.die()
        last = self.random.choice(self.sidecars)
        for _ in range(2):  # the second epoch lists what the first one left
            try:
                last.drain()
            except (FencedError, LogDivergedError) as error:
                self.counts[f"drain: {type(error).__name__}"] += 1
                last.replaces_log = isinstance(error, LogDivergedError)
                last.drain()
        for _ in range(3):
            self.now_ms += GRACE_S * 2_000
            self._collect_from(self.archive)
        self.broker.disk_was_not_written_to()
        self.invariants.check()
        self.invariants.everything_is_archived(self.now_ms)
        report = verify_archive(self.archive, depth="full")
        assert report.anomalies == [], report.anomalies[:3]
        pending = load(self.archive).pending_deletions
        left = {
            key for key in report.leftovers if key not in pending or pending[key].reason != Reason.UNEXPLAINED
        }
        assert not left, sorted(left)[:3]
        self.counts["objects of messages that were cut before a commit"] += len(report.leftovers)
