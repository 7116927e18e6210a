"""One sidecar: the real writer of an archive, its parts called one after the other instead of by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER
from tests.world.actors import Actor
from tests.world.broker_model import EXPIRING
from tests.world.timers import SETTINGS as TIMER_SETTINGS
from tests.world.timers import TimerTask
from tiered.archive.task import run_pass
from tiered.broker_store.pins import PinKeeper, PinLimits
from tiered.broker_store.retention import DiskUse
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.formats.keys import archive_prefix
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.rule_entries import RuleEntry
from tiered.settings.sections import IndexSettings, OffloadSettings
from tiered.settings.topic_rules import TopicRules
from uploader.bound_source import no_offsets
from uploader.log_rule import LogLimits
from uploader.offload import Environment, ObjectOptions, Offloader, OffloadIdentity

if TYPE_CHECKING:
    from tests.world.world import World

SETTINGS = OffloadSettings(
    batch_bytes=64 << 10, split_bytes=4 << 10, block_bytes=1 << 10, root_every=4, memory_budget_bytes=16 << 20
)
RULES = TopicRules((RuleEntry(EXPIRING, ttl="1m"),))
INDEX = IndexSettings(unindexed_objects_max=4, day_files_max=2)


class Inline(Executor):
    """Work is done when it is submitted."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments, **named))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        return


class Sidecar(Actor):
    """Follows the broker model. Loses its memory when it dies."""

    weight = 9

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name, self.store = world, name, world.store_of(name)
        self._offloader: Any = None
        self._timers: TimerTask | None = None
        self._broker_store: BrokerStore | None = None
        self._starts = 0
        self.replaces_log = False
        """A person allows it to replace a log of which nothing is archived."""

    @property
    def writer(self) -> CatalogWriter | None:
        """Of the epoch that it owns."""
        offloader = self._offloader
        return offloader._writer if offloader is not None and offloader._writer.is_claimed else None

    @property
    def cursor_phys(self) -> int:
        """Up to which its version has the log."""
        return int(self._offloader._writer.state.cursor.phys)

    @property
    def has_compared(self) -> bool:
        """Whether it has seen the log since the broker started last."""
        return self._starts == self._world.broker.starts

    def die(self) -> None:
        self._offloader = self._timers = None
        if self._broker_store is not None:
            self._broker_store.close()

    def act(self) -> None:
        if self._offloader is not None and not self.has_compared:
            self.die()  # as FollowLoop does when the broker was started again
        if self._offloader is None:
            if self._world.random.random() < 0.35:  # one that fails waits
                self._start()
        else:
            chance = self._world.random.random()
            for begin, end, part in PARTS:
                if begin <= chance < end:
                    part(self)

    def _start(self) -> None:
        world = self._world
        self._starts = world.broker.starts
        self.replaces_log |= world.random.random() < 0.05
        environment = Environment(
            clock=world.clock,
            jitter=world.random.random,
            wait=world.pass_s,
            may_take_over=lambda state, end_phys: world.is_ending or world.random.random() < 0.15,
        )
        place = world.directory / f"pins-{self.name}"
        pins = PinKeeper([place], PinLimits(), lambda _: DiskUse(0.9 if world.seed % 2 else 0.1, 1 << 40))
        self.die()
        self._broker_store = open_broker_store(world.broker.store.path, pinned=pins.files)
        offloader = Offloader(
            self._broker_store,
            self.store,
            OffloadIdentity(CLUSTER, BROKER, self.name, "run"),
            SETTINGS,
            topic_filter=FILTER,
            offsets_source=no_offsets,
            take_over=self.replaces_log or world.is_ending,
            log_limits=LogLimits(
                self.replaces_log, same_broker=self.replaces_log, truncate_max_bytes=float("inf")
            ),
            environment=environment,
            pins=pins,
            options=ObjectOptions(INDEX, RULES, timers=TIMER_SETTINGS),
        )
        offloader._open(claim_now=True)
        self._offloader = offloader
        offloader._uploader._in_flight.wait = self._commit_while_waiting  # type: ignore[method-assign]

    def _commit_while_waiting(self, timeout_s: float, after: int) -> None:
        """The builder waits for commits, which another thread makes in a real process."""
        if timeout_s:
            self._world.now_ms += int(timeout_s * 1000)
            self._commit_stored()

    def _read(self) -> None:
        offloader = self._offloader
        offloader._log.refresh()
        offloader._bound_source.ask(offloader._dispatcher.cursor)
        offloader._loop._refuse_overwritten_log()
        offloader._dispatcher.dispatch_step(offloader._bound_source.feed)
        offloader._loop.step_pins()
        offloader._dispatcher.close_if_due(force=self._world.random.random() < 0.7)

    def _build(self) -> None:
        self._offloader._uploader.builder.build_next(0)
        self._commit_stored()

    def _commit_stored(self) -> None:
        """Commit the oldest cycle if all of its objects are stored."""
        uploader = self._offloader._uploader
        oldest = uploader._in_flight.oldest()
        if oldest is not None and oldest.durable_attempt() is not None:
            uploader.commit_next(0)

    def _tables(self) -> None:
        if self._offloader._writer.is_claimed:
            self._offloader._metadata.step(self._world.now_ms)

    def _index(self) -> None:
        writer = self._offloader._writer
        run_pass(self._offloader._index_builder, lambda: writer.state if writer.is_claimed else None)

    def _deliver(self) -> None:
        offloader = self._offloader
        if offloader._writer.is_claimed:
            self._timers = self._timers or TimerTask(
                self,
                offloader._writer,
                PrefixedStore(self.store, archive_prefix(CLUSTER, BROKER)),
                self._world,
            )
            self._timers.run()

    def archive_more(self) -> None:
        """What the log has now, and may have been waiting."""
        self._read()
        self._offloader._dispatcher.close_if_due(force=True)
        for _ in range(2):
            self._build()

    def drain(self) -> None:
        """Archive everything, and release the archive."""
        if self._offloader is None or not self.has_compared:
            self._start()
        offloader, end_phys = self._offloader, self._world.broker.disk.phys
        for _ in range(1_000):
            self.archive_more()
            self._world.now_ms += 1_000
            idle = offloader._uploader.builder.is_idle and not offloader._dispatcher.has_open_range
            if idle and offloader._writer.state.cursor.phys >= end_phys:
                break
        else:
            raise AssertionError(f"{self.name} does not reach {end_phys}")
        offloader._finish_backfill()
        offloader._index_builder.run_to_end(threading.Event())
        for _ in range(100):
            self._deliver()
            if not offloader._writer.state.timers:
                break
            self._world.now_ms += 10_000  # what the broker refused waits for ten minutes
        else:
            raise AssertionError("timers are left")
        offloader._writer.release(pending_deletions=offloader._uploader.pending_deletions)
        self.die()


PARTS: tuple[tuple[float, float, Callable[[Sidecar], None]], ...] = (
    (0.0, 0.7, Sidecar._read),
    (0.1, 0.8, Sidecar._build),
    (0.8, 0.84, Sidecar._tables),
    (0.84, 0.9, Sidecar._index),
    (0.5, 1.0, Sidecar._deliver),
)
"""What a step does: the parts in whose range a random number lies."""
