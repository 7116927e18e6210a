"""The whole of an archive on virtual time: one seed is one history.

Single-threaded: whenever an actor makes a request, others may act first, its reply may be lost, or it is killed there.
Real code but the threads; who acts is in ``actors``. After every step: the rules of ``invariants``.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy.random  # noqa: F401 - takes a seed when it is imported

import rocketmq_tiered.maintenance.compaction_ranges as ranges
import uploader.archive_owner
import uploader.offload
from rocketmq_tiered.server.mount.node_lease import decode_lease
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tests.world.actors import ACTORS, GRACE_S, PAGE_RUNS, TTL_S, Actor
from tests.world.broker_model import BrokerModel
from tests.world.invariants import Invariants
from tests.world.nodes import Nodes
from tests.world.sidecar import Inline, Sidecar
from tests.world.timers import Deliveries
from tests.world.upkeep import Scrub, damaged_and_repaired, restored_as_it_was
from tiered.archive import found_objects, key_section_reader, segment_reader, verify_segment
from tiered.archive.rewrite import sources
from tiered.archive.verify import verify_archive
from tiered.catalog import catalog_reader, maintenance_commit, run_cuts
from tiered.catalog.apply import apply
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import Commit, decode_commit, decode_root
from tiered.catalog.deletions import Reason
from tiered.catalog.pages import decode_catalog_page
from tiered.catalog.state import CatalogState
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import FencedError, LogDivergedError, NoArchiveError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.formats.segment_index import SegmentIndex
from tiered.object_store.interface import Body, Piece
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.index_builder import IndexBuilder

BEGIN_MS = 1_700_000_000_000
DEPTH_MAX = 3
PREFIX = archive_prefix(CLUSTER, BROKER)
PACKAGES = ("tiered.", "uploader.", "fetcher.", "rocketmq_tiered.")
WRITES, READS = frozenset({"put", "compose"}), frozenset({"get", "get_range", "list", "delete"})
FAULTS = (
    *(
        (fault, WRITES, 0.03)
        for fault in (Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.THROTTLED, Fault.CONFLICT)
    ),
    (Fault.STALLED, frozenset({"put"}), 0.03),  # of composed ones the files are gone later
    (Fault.FULL, WRITES, 0.005),
    *((fault, READS, 0.005) for fault in (Fault.LOST_BEFORE, Fault.THROTTLED)),
)
KILLS = "KILLED"
EVERYONE: tuple[type[Actor], ...] = (*ACTORS, Scrub)
DECODERS = (decode_commit, decode_root, decode_catalog_page, decode_lease)
TAIL_READERS = (found_objects, key_section_reader, run_cuts, segment_reader, sources, verify_segment)
"""Of what never changes: a world decodes the same bytes once."""
ENDS = (UnavailableError, FencedError, LogDivergedError, NoArchiveError)
"""What a process may end with: all else is a violation."""


def applied_once() -> Callable[..., CatalogState]:
    """``apply``, done once for the same state and commit."""
    known: dict[tuple[int, int], tuple[CatalogState, Commit, CatalogState]] = {}

    def applied(state: CatalogState, commit: Commit, history: CatalogState | None) -> CatalogState:
        place = id(state), id(commit)
        if history is not None or place not in known:
            known[place] = state, commit, apply(state, commit, history)
        return known[place][2]

    return applied


class KilledError(BaseException):
    """kill -9 of an actor."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class ActorStore(FaultStore):
    """An actor's way to the store. ``fuse``: it is killed at this request, before or after its effect."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.root, seed=world.random.getrandbits(32), wait=world.pass_s)
        self._world, self._name = world, name
        self.fuse, self._after_effect = 1 << 30, False

    def light(self) -> None:
        """Perhaps kill it at one of the next requests."""
        source = self._world.random
        is_lit = source.random() < 0.12 and not self._world.is_ending and KILLS not in self._world.without
        self.fuse = source.choice((1, 2, 3, 5, 8)) if is_lit else 1 << 30
        self._after_effect = source.random() < 0.5

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self.perhaps(
            "put", key, lambda: super(ActorStore, self).put_if_absent(key, body, timeout_s=timeout_s)
        )

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        act = lambda: super(ActorStore, self).compose_if_absent(key, pieces, timeout_s=timeout_s, spool=spool)  # noqa: E731
        self.perhaps("compose", key, act)

    def delete(self, keys: Sequence[str]) -> None:
        if self.fuse == 1:  # killed amid a batch
            self._store.delete(keys[: len(keys) // 2])
        self.perhaps("delete", " ".join(keys), lambda: super(ActorStore, self).delete(keys))

    def get(self, key: str, max_bytes: int = 1 << 30) -> bytes:
        found: bytes = self.perhaps("get", key, lambda: super(ActorStore, self).get(key, max_bytes))
        return found

    def perhaps(self, operation: str, key: str, act: Callable[[], Any]) -> Any:
        world = self._world
        world.others_act(self._name)
        self.fuse -= 1
        if self.fuse == 0 and not self._after_effect:
            world.trace(self._name, f"killed before {operation} {key}")
            raise KilledError(self._name)
        answer = act()
        if self.fuse == 0:
            world.trace(self._name, f"killed after {operation} {key}")
            raise KilledError(self._name)
        world.trace(self._name, f"{operation} {key}")
        return answer


class World:
    """The broker, the store, every actor, and who is next. ``tell``: called with each line of the history.
    ``without``: names of actors and faults that it does not have."""

    def __init__(
        self,
        seed: int,
        directory: Path,
        tell: Callable[[str], None] = lambda line: None,
        without: Collection[str] = (),
    ) -> None:
        self.seed, self.without, self.directory = seed, without, directory
        self.random, self.now_ms, self._tell = random.Random(seed), BEGIN_MS, tell
        self.clock = Clock(
            lambda: self.now_ms, lambda: self.now_ms / 1000, cpu_s=lambda: 0.0, sleep=self.pass_s
        )
        self.root = MemoryStore(f"memory://world-{seed}", clock=self.clock)
        self.archive = PrefixedStore(self.root, PREFIX)
        self.broker = BrokerModel(directory / "store", self.random, BEGIN_MS)
        self.is_ending, self._depth = False, 0
        self._digest = hashlib.sha256()
        self.counts: Counter[str] = Counter()
        self._stores: dict[str, ActorStore] = {}
        self.busy: set[str] = set()
        self.invariants = Invariants(self.archive, self.broker, TTL_S)
        self.deliveries = Deliveries(self)
        self.sidecars = [Sidecar(self, name) for name in ("master", "slave")]
        self.actors: list[Actor] = [
            *self.sidecars,
            *(kind(self) for kind in EVERYONE if kind.name not in without),
        ]
        self._nodes = Nodes(self) if seed % 5 == 0 and Nodes.name not in without else None
        self.actors += [] if self._nodes is None else [self._nodes]

    def store_of(self, name: str) -> ActorStore:
        """The way of the actor ``name`` to the bucket."""
        store = self._stores[name] = ActorStore(self, name)
        for fault, operations, probability in FAULTS:
            if fault.name not in self.without:
                store.add(FaultRule(fault, operations, "*", probability=probability))
        return store

    def free_writers(self, *, compared: bool = True) -> list[CatalogWriter]:
        """Of sidecars that own the archive, have ``compared`` the broker's log, and do nothing now."""
        free = [
            one for one in self.sidecars if one.name not in self.busy and (one.has_compared or not compared)
        ]
        return [one.writer for one in free if one.writer is not None]

    # -- time and order ---------------------------------------------------------------------------------------

    def pass_s(self, seconds: float, waiting: str = "") -> None:
        """An actor waits; the one named ``waiting`` does nothing else at that time."""
        self.now_ms += int(seconds * 1000)
        self.others_act(waiting)

    def others_act(self, waiting: str) -> None:
        """While an actor waits for the store, others may act."""
        if self.is_ending or self._depth >= DEPTH_MAX or self.random.random() >= 0.12:
            return
        is_mine = waiting not in self.busy
        self.busy.add(waiting)
        try:
            self.step()
            while self.random.random() < 0.12:
                self.step()
        finally:
            if is_mine:
                self.busy.discard(waiting)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other actor acts at that time."""
        depth, self._depth = self._depth, DEPTH_MAX
        try:
            yield
        finally:
            self._depth = depth

    def trace(self, actor: str, text: str) -> None:
        text = text.replace(str(self.directory), "disk")
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
            for _ in range(steps):
                self.step()
            self.finish()

    @contextmanager
    def _virtual(self) -> Iterator[None]:
        """What is not injected takes its time and randomness from here, and has no threads."""
        source = random.Random(self.random.getrandbits(64))
        limits = CatalogLimits(
            spill_runs=self.random.choice((12, 10**6)),
            page_runs_max=PAGE_RUNS,
            merge_sequences=3,
            spill_deletions=self.random.choice((6, 512)),
        )

        def writer(*given: Any, instance: str, **more: Any) -> CatalogWriter:
            """One that keeps its lock while it waits."""
            wait = partial(self.pass_s, waiting=instance)
            return CatalogWriter(*given, instance=instance, random=source, wait=wait, limits=limits, **more)

        clock = SimpleNamespace(
            monotonic=lambda: self.now_ms / 1000,
            perf_counter=lambda: self.now_ms / 1000,
            time=lambda: self.now_ms / 1000,
            sleep=self.pass_s,
            thread_time=lambda: 0.0,
        )
        index = lru_cache(1024)(SegmentIndex)
        places: list[tuple[Any, str, Any]] = [
            (uploader.archive_owner, "CatalogWriter", writer),
            (maintenance_commit, "CatalogWriter", partial(CatalogWriter, random=source, wait=self.pass_s)),
            (uploader.offload, "IndexBuilder", partial(IndexBuilder, random_source=source)),
            (catalog_reader, "READ_THREADS", 1 << 30),
            (catalog_reader, "apply", applied_once()),
            (ranges, "PAGE_RUNS", PAGE_RUNS),
            *((module, "SegmentIndex", index) for module in TAIL_READERS),
        ]
        instead = {"ThreadPoolExecutor": (ThreadPoolExecutor, Inline), "time": (time, clock)}
        instead |= {decoder.__name__: (decoder, lru_cache(1024)(decoder)) for decoder in DECODERS}
        for name, module in list(sys.modules.items()):
            if name.startswith(PACKAGES):
                known = vars(module)
                places += [
                    (module, it, own) for it, (right, own) in instead.items() if known.get(it) is right
                ]
        with ExitStack() as patches:
            for place, name, value in places:
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
        for node in [] if self._nodes is None else self._nodes.due():
            self._act(node)
        free = [actor for actor in self.actors if actor.name not in self.busy]
        self._act(self.random.choices(free, [actor.weight for actor in free])[0])
        self.invariants.check(self.now_ms)
        for store in self._stores.values():
            if self.random.random() < 0.02:
                self.counts["stalled requests that land"] += len(store.land_stalled())

    def _act(self, actor: Actor) -> None:
        name = actor.name
        self.counts[name] += 1
        self.busy.add(name)
        self._depth += 1
        if (store := self._stores.get(name)) is not None:
            store.light()
        try:
            actor.act()
        except (KilledError, *ENDS) as error:
            self.counts[f"{name}: {type(error).__name__}"] += 1
            self.trace(name, f"ended by {type(error).__name__}: {error}")
            dead = {name} | ({error.name} if isinstance(error, KilledError) else set())
            for one in [*self.actors, actor]:
                if one.name in dead:
                    one.die()
        finally:
            self._depth -= 1
            self.busy.discard(name)

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
        self.broker.send_where_repeated(self.now_ms)
        self.broker.lists_all = True
        self.broker.write_topics()
        self.broker.lose_queues()
        self.broker.watch()
        if self._nodes is not None:
            self._nodes.settle()
        for actor in self.actors:
            actor.die()
        last = self.random.choice(self.sidecars)
        for number in range(2):  # the second epoch lists what the first one left
            try:
                last.drain()
            except (FencedError, LogDivergedError) as error:
                self.counts[f"drain: {type(error).__name__}"] += 1
                last.replaces_log = isinstance(error, LogDivergedError)
                last.drain()
            if number == 0 and self.seed % 4 == 0:
                damaged_and_repaired(self)
        for _ in range(3):
            self.now_ms += GRACE_S * 2_000
            for actor in self.actors:
                actor.finish()
        self.broker.disk_was_not_written_to()
        self.invariants.check(self.now_ms)
        self.invariants.everything_is_archived(self.now_ms)
        self.invariants.tables_are_archived()
        self.deliveries.each_timer_comes()
        report = verify_archive(self.archive, depth="full")
        assert report.anomalies == [], report.anomalies[:3]
        pending = load(self.archive).pending_deletions
        left = {
            key for key in report.leftovers if key not in pending or pending[key].reason != Reason.UNEXPLAINED
        }
        assert not left, sorted(left)[:3]
        if self.seed % 4 == 1:
            restored_as_it_was(self)
        self.counts["objects of messages that were cut before a commit"] += len(report.leftovers)
