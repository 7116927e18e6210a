"""Timers in a seeded world without time: owners that die, pause and follow each other, a broker that goes away, loses
replies, stores late and indexes late, a clock that jumps. `World.run` raises AssertionError for a timer that is lost,
early, late without cause, out of order, sent twice, or sent although it was cancelled; and for counts that are not
those of the entries. Keys are drawn from three, so that most timers share theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from fetcher.rows.message import Message
from rocketmq_tiered.sending.timer_broker import WHEEL_TOPIC, RemoteTimerBroker
from rocketmq_tiered.sending.timer_delivery import (
    CLAIM_S,
    SETTLE_S,
    Place,
    TimerDelivery,
    put_timers,
)
from rocketmq_tiered.sending.timer_send import TimerSend
from tests.archive.timer_fates import entries_of, fate_of
from tests.kernels.record_builder import Message as Written
from tests.kernels.record_builder import encode, properties
from tiered.archive.timers import NEVER_MS, hash_of
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.requirements import Requirements
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import FencedError, UnavailableError
from tiered.formats.timer_object import ENTRY_DTYPE
from tiered.model.queue import QueueKey
from tiered.model.timer import (
    DELIVER_MS,
    HOUR_MS,
    PLACE,
    TOPIC,
    EntryKind,
    TimerPlace,
    cancel_properties,
    timer_of,
)
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import TimerSettings

GATEWAY = QueueKey("TIERED_TIMERS", 0, 0)
START_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS - 20 * 60_000
MAX_DELAY_MS = 30 * 24 * HOUR_MS
AHEAD_MS = 20 * 60_000
HOURS = 2
TARGETS, MISSING, KEYS = ("orders", "mails"), "created-later", ("K0", "K1", "K2")
ALL_TOPICS = [*TARGETS, MISSING]


class Killed(BaseException):
    """kill -9."""


@dataclass
class Time:
    """``ms``: of the host, which jumps; ``s``: monotonic."""

    ms: int = START_MS
    s: float = 1000.0


@dataclass
class Stored:
    """A message at the broker. ``place``: of the timer, empty: a producer sent it. ``wheel_ms``: its time if it waits
    in the wheel, else 0. ``indexed_s``: when it can be found, and ``real_indexed_s`` as delivered."""

    topic: str
    key: str
    place: str
    body: bytes
    wheel_ms: int
    stored_ms: int
    indexed_s: float
    real_indexed_s: float = float("inf")


@dataclass
class Asked:
    """A timer that a producer sent. ``is_cancelled``: while it was not handed over; ``may_be_cancelled``: while it was
    claimed, and perhaps refused by the broker afterwards."""

    key: str
    topic: str
    deliver_ms: int
    place: TimerPlace
    is_cancelled: bool = False
    may_be_cancelled: bool = False

    @property
    def name(self) -> tuple[str, str, int]:
        """What a producer cancels it by, and others."""
        return self.topic, self.key, self.deliver_ms


class SteppingStore(MemoryStore):
    """``step`` before and after each PUT."""

    def __init__(self, step: Callable[[str], None], clock_ms: Callable[[], int]) -> None:
        super().__init__(clock=Clock(wall_ms=clock_ms))
        self._step = step

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._step("before put")
        super().put_if_absent(key, body, timeout_s=timeout_s)
        self._step("after put")


class ModelBroker(RemoteTimerBroker):
    """What a broker does with sends and queries; which topics are queried is the code's."""

    answers_few = 2

    def __init__(self, world: World, max_delay_ms: int) -> None:
        self._world, self.max_delay_ms = world, max_delay_ms
        self._places, self._ahead_ms = {}, AHEAD_MS
        self.stored: list[Stored] = []
        self._flying: list[tuple[float, int, TimerSend]] = []
        """Received by the broker, and stored later although the connection has ended."""
        self.away_until_s = 0.0
        self.has_missing_topic = False
        self.orders: list[list[int]] = []
        """Times of what was sent, by call."""

    def tick(self) -> None:
        """Time has passed."""
        clock = self._world.clock
        landing = [one for one in self._flying if one[0] <= clock.s]
        self._flying = [one for one in self._flying if one[0] > clock.s]
        for _, sent_ms, send in landing:
            self._store(send, sent_ms)
        for one in self.stored:
            if one.wheel_ms and one.wheel_ms <= clock.ms and one.real_indexed_s == float("inf"):
                one.real_indexed_s = clock.s + 0.1

    def _check(self) -> None:
        if self._world.clock.s < self.away_until_s:
            raise UnavailableError("the broker is away")

    def longest_ms(self) -> int:
        self._check()
        return self.max_delay_ms

    def _connected(self) -> Any:
        self._check()
        return self

    def runtime_info(self) -> dict[str, str]:
        """As a client asks."""
        now_s = self._world.clock.s
        return {"dispatchBehindBytes": str(sum(now_s < one.indexed_s for one in self.stored))}

    def _places_with_key(self, topic: str, unique_key: str) -> Iterator[str]:
        """The newest."""
        self._world.step("has")
        found = [one.place for one in self._visible(topic) if one.key == unique_key]
        return iter(found[-self.answers_few :])

    def _places_since(self, topic: str, since_ms: int) -> Iterator[str]:
        self._world.step("has")
        return (one.place for one in self._visible(topic) if (one.wheel_ms or one.stored_ms) >= since_ms)

    def _visible(self, topic: str) -> list[Stored]:
        self._check()
        now_s, is_wheel = self._world.clock.s, topic == WHEEL_TOPIC
        return [
            one
            for one in self.stored
            if (
                one.wheel_ms and one.indexed_s <= now_s
                if is_wheel
                else topic == one.topic and (one.real_indexed_s if one.wheel_ms else one.indexed_s) <= now_s
            )
        ]

    def send(
        self, sends: Sequence[TimerSend], sent: Callable[[TimerSend], None], until_s: float
    ) -> Mapping[int, str]:
        refused, world, order = dict[int, str](), self._world, list[int]()
        self.orders.append(order)
        for number, send in enumerate(sends):
            world.step("before send")
            self._check()
            if world.clock.s >= until_s:
                raise UnavailableError("not in time")
            if send.message.topic == MISSING and not self.has_missing_topic:
                refused[number] = "topic does not exist"
                continue
            fate = world.fate()
            if fate == "flying":
                self._flying.append((world.clock.s + 1.6, world.clock.ms, send))
                raise UnavailableError("connection lost")
            why = self._store(send, world.clock.ms)
            if why:
                refused[number] = why
                continue
            if fate == "reply lost":
                raise UnavailableError("no reply")
            world.step("after send")
            sent(send)
            order.append(send.deliver_ms)
        return refused

    def _store(self, send: TimerSend, sent_ms: int) -> str:
        """Why it is refused."""
        clock, given = self._world.clock, send.message.properties.get("TIMER_DELIVER_MS")
        wheel_ms = int(given) if given and self.max_delay_ms else 0
        if wheel_ms - clock.ms > self.max_delay_ms:
            return "the delay time should not be bigger than the max delay"
        waits_ms = wheel_ms if wheel_ms > clock.ms else 0
        message, indexed_s = send.message, clock.s + self._world.index_lag_s()
        self.stored.append(
            Stored(
                message.topic,
                send.key,
                message.properties[PLACE],
                message.body,
                waits_ms,
                max(sent_ms, clock.ms),
                indexed_s,
            )
        )
        return ""


class Process:
    """An owner of the archive, from its claim on."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        clock = world.clock
        self.writer = CatalogWriter(
            world.store,
            cluster="c",
            broker="b",
            instance=f"p{number}",
            kind="run",
            clock=Clock(wall_ms=lambda: clock.ms),
            random=Random(number),
            wait=lambda _: None,
            root_every=10,
        )
        self.writer.claim(take_over=True)
        self.epoch = self.writer.state.epoch
        self.task = TimerDelivery(
            MaintenanceCommit(world.store, self.writer, Clock(wall_ms=lambda: clock.ms)),
            TimerSettings(ahead_ms=AHEAD_MS, rate_per_s=1),
            world.broker,
            world.read,
            clock=Clock(wall_ms=lambda: clock.ms, monotonic_s=lambda: clock.s),
        )

    def state(self) -> CatalogState | None:
        """As the owner's tasks see it."""
        if self.world.standby_delivers:
            return self.writer.refresh()
        return self.writer.state if self.writer.is_claimed else None

    def run(self) -> None:
        """One pass, as `run_pass` makes it; what it cannot do now comes with a later one."""
        try:
            while (state := self.state()) is not None and (plan := self.task.plan(state)) is not None:
                self.world.between(self)
                if not self.task.step(state, plan):
                    break
        except (UnavailableError, FencedError):
            self.world.retries = True

    def enqueue(self, entries: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Commit entries, as the write path does with their messages."""
        commits = MaintenanceCommit(self.world.store, self.writer, Clock(wall_ms=lambda: self.world.clock.ms))
        ref = put_timers(commits, [(entries, [GATEWAY], ALL_TOPICS)], self.epoch)
        draft = CommitDraft(CommitKind.MAINTENANCE, timers=[ref])
        assert commits.commit(lambda _: draft, Requirements(epoch=self.epoch))


@dataclass
class World:
    """One run. ``max_delay_ms`` of the broker, 0: of 4.9. ``is_calm``: nothing fails."""

    seed: int
    standby_delivers: bool = False
    is_torn: bool = False
    """The entries of a message are committed before it."""
    retries: bool = False
    """The last pass failed: the next one comes soon."""
    clock: Time = field(default_factory=Time)
    messages: dict[Place, Message] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.is_calm = self.seed % 8 == 0
        self.has_refusals = not self.is_calm and self.seed % 5 == 0
        self.store = SteppingStore(self.step, lambda: self.clock.ms)
        self.broker = ModelBroker(self, 0 if self.seed % 3 == 0 else 2 * HOUR_MS)
        self._kill_at = self._steps = 0
        self._is_inside = True
        self._phys = 0
        self._torn: list[tuple[Place, Message]] = []
        self._next, self._counted = 0, ()
        self.old: Process | None = None
        self.owner = self._successor()
        self._is_inside = False

    # -- what happens -----------------------------------------------------------------------------------------

    def step(self, _: str) -> None:
        """A step of a process, at which it may die, or pause while another takes over."""
        if self._is_inside:
            return
        self._steps += 1
        if self._steps == self._kill_at:
            raise Killed
        if not self.is_calm and self.random.random() < 0.01:
            self._pause()

    def _pause(self) -> None:
        """The process stands still: another claims the archive, and delivers."""
        self._is_inside = True
        self.old = self.owner
        try:
            self.owner = self._successor()
            for _ in range(self.random.randint(0, 4)):
                self.pass_time(self.random.choice([1.0, CLAIM_S, CLAIM_S + SETTLE_S + 1]))
                self.owner.run()
        finally:
            self._is_inside = False

    def between(self, process: Process) -> None:
        """After a plan, before it is carried out."""
        if not self._is_inside and process is self.owner and self.random.random() < 0.15:
            self._is_inside = True
            self._produce(is_cancel=True)
            self._is_inside = False

    def fate(self) -> str:
        """What becomes of a send."""
        if self.is_calm or self.random.random() > 0.08:
            return ""
        return self.random.choice(["reply lost", "flying"])

    def index_lag_s(self) -> float:
        """Until a stored message is found by key."""
        return 0.01 if self.is_calm else self.random.choice([0.01, 0.01, 1.0, 30.0])

    def pass_time(self, seconds: float) -> None:
        """For all."""
        self.clock.s += seconds
        self.clock.ms += int(seconds * 1000)
        self.broker.tick()

    def _successor(self) -> Process:
        self._next += 1
        return Process(self, self._next)

    def read(self, places: Sequence[Place]) -> Mapping[Place, Message]:
        """Archived messages."""
        self.step("read")
        return {place: self.messages[place] for place in places if place in self.messages}

    # -- producers ----------------------------------------------------------------------------------------------

    def _produce(self, *, is_cancel: bool = False) -> None:
        """Timers, one that is sent twice, and cancellations, in one commit."""
        random, now_ms = self.random, self.clock.ms
        rows, cancelled, new = [], list[Asked](), list[Asked]()
        for _ in range(0 if is_cancel else random.randint(1, 4)):
            hour_ms = (now_ms // HOUR_MS + random.randint(1, HOURS)) * HOUR_MS
            deliver_ms = hour_ms + random.choice([0, 0, 1, random.randrange(-HOUR_MS // 2, HOUR_MS)])
            if random.random() < 0.1:
                deliver_ms = (
                    now_ms + MAX_DELAY_MS if random.random() < 0.3 else now_ms + random.randrange(60_000)
                )
            topic = MISSING if self.has_refusals and random.random() < 0.2 else random.choice(TARGETS)
            timer = Asked(random.choice(KEYS), topic, deliver_ms, TimerPlace(0, self._phys))
            self.asked.append(timer)
            new.append(timer)
            rows.append(self._put(timer.key, {TOPIC: topic, DELIVER_MS: str(deliver_ms)}))
        living = [one for one in self.asked if not one.is_cancelled]
        if living and (is_cancel or random.random() < 0.4):
            one = random.choice(living)
            place = one.place if random.random() < 0.5 else None
            rows.append(self._put("C", cancel_properties(one.topic, one.deliver_ms, one.key, place)))
            cancelled = [one] if place else [other for other in living if other.name == one.name]
        if random.random() < 0.3:  # a message that is no timer has the key of one
            self.broker.stored.append(
                Stored(random.choice(TARGETS), random.choice(KEYS), "", b"", 0, now_ms, self.clock.s)
            )
        if not rows:
            return
        pending = [one for one in cancelled if one in new or self._is_pending(one)]
        self.owner.enqueue(np.concatenate(rows))
        for one in cancelled:
            one.is_cancelled |= one in pending
            one.may_be_cancelled = True
        if not self.is_torn:
            self._land()

    def _land(self) -> None:
        self.messages.update(self._torn)
        self._torn.clear()

    def _put(self, key: str, pairs: Mapping[str, str]) -> np.ndarray[Any, np.dtype[Any]]:
        """A message in the gateway topic, and its entries."""
        now_ms, offset = self.clock.ms, self._phys
        all_pairs = {"UNIQ_KEY": key, **pairs}
        text = properties(*((name.encode(), value.encode()) for name, value in all_pairs.items()))
        body = TimerPlace(0, offset).text.encode()
        data = encode(Written(b"TIERED_TIMERS", 0, offset, body, text, 0, now_ms), offset)
        self._torn.append(((GATEWAY, offset), Message(GATEWAY, offset, memoryview(data), now_ms)))
        self._phys += 1
        found = timer_of(all_pairs, stored_ms=now_ms, sys_flag=0, max_delay_ms=MAX_DELAY_MS)
        assert not found.refusal, found
        entry = np.zeros(1, ENTRY_DTYPE)
        entry["physical_offset"] = entry["queue_offset"] = offset
        entry["topic"] = ALL_TOPICS.index(found.topic)
        if found.cancel is not None:
            entry["kind"], entry["deliver_ms"] = EntryKind.CANCEL, found.cancel[0]
            entry["key_hash"] = hash_of(found.cancel[1])
        else:
            entry["deliver_ms"], entry["key_hash"] = found.deliver_ms, hash_of(found.unique_key)
        if found.cancel_place is not None:
            entry["kind"], entry["queue_offset"] = EntryKind.CANCEL_PLACE, found.cancel_place.queue_offset
        return entry

    def _is_pending(self, timer: Asked) -> bool:
        """Whether no claim covers it."""
        return any(
            row["queue_offset"] == timer.place.queue_offset
            and row["kind"] in (EntryKind.TIMER, EntryKind.POSTPONED)
            for row in self._unclaimed()
        )

    def _unclaimed(self) -> list[Any]:
        """The entries of the newest state, one by one."""
        files, state = self.owner.task.files, self.owner.writer.state
        return list(entries_of(files, state.timers))

    def _check_counts(self) -> None:
        """Counts are what entries are, one by one, after cancellations."""
        if self._counted == self.owner.writer.state.timers:
            return
        self._counted = self.owner.writer.state.timers
        rows = [row.tolist() for row in self._unclaimed()]
        pending = [row for row in rows if fate_of(row, rows) == "timers"]
        counts = self.owner.task.files.counts(self.owner.writer.state)
        found = counts.pending, counts.postponed
        wanted = len(pending), sum(row[6] == EntryKind.POSTPONED for row in pending)
        assert found == wanted, f"counts: {found}, not {wanted}"

    # -- a run ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Everything goes wrong for some hours, then nothing until all is delivered; and what must come of it."""
        random = self.random
        end_ms = START_MS + HOURS * HOUR_MS
        while self.clock.ms < end_ms:
            if random.random() < 0.25 and len(self.asked) < 6:
                self._is_inside = True
                self._produce()
                self._is_inside = False
            if not self.is_calm:
                self._trouble()
            self._pass()
            self.pass_time(random.choice([1.0, 30.0] if self.retries else [2.0, 600.0, 600.0, 900.0]))
            self.retries = False
            self._land()
        self.is_calm, self.broker.away_until_s, self.broker.has_missing_topic = True, 0.0, True
        for _ in range(60):
            self._pass()
            files, refs = self.owner.task.files, self.owner.writer.state.timers
            if not refs:
                break
            due_ms = min(map(files.next_ms, refs))
            ahead_ms = AHEAD_MS if self.broker.max_delay_ms else 0
            wait_ms = due_ms - ahead_ms + 60_000 - self.clock.ms if due_ms < NEVER_MS else 0
            self.pass_time(max(CLAIM_S + SETTLE_S + 31, wait_ms / 1000))
        self.pass_time(HOURS * 3600)
        self._check()

    def _pass(self) -> None:
        self._steps = 0
        try:
            self.owner.run()
        except Killed:
            self._kill_at = 0
            self._is_inside = True
            self.owner = self._successor()
            self._is_inside = False
        if self.standby_delivers and self.old is not None:
            self.old.run()
        self._check_counts()

    def _trouble(self) -> None:
        random = self.random
        kind = random.random()
        if kind < 0.25:
            self._kill_at = random.randint(1, 25)
        elif kind < 0.32:
            self.clock.ms += random.choice([-1, 1]) * random.randrange(2 * HOUR_MS)
        elif kind < 0.4:
            self.broker.away_until_s = self.clock.s + random.choice([5.0, 600.0, 3 * 3600.0])
        elif kind < 0.45:
            self.broker.has_missing_topic = True

    def _check(self) -> None:
        sent: dict[str, list[Stored]] = {}
        for one in self.broker.stored:
            if one.place:
                sent.setdefault(one.place.rsplit(":", 2)[0], []).append(one)
        for timer in self.asked:
            found = sent.pop(timer.place.text, [])
            wanted = (0,) if timer.is_cancelled else (0, 1) if timer.may_be_cancelled else (1,)
            assert len(found) in wanted, f"{timer}: sent {len(found)} times"
            for one in found:
                assert (one.topic, one.body) == (timer.topic, timer.place.text.encode()), f"{timer}: {one}"
                assert one.wheel_ms == timer.deliver_ms or one.stored_ms >= timer.deliver_ms, (
                    f"early: {timer}, {one}"
                )
                assert one.wheel_ms in (0, timer.deliver_ms), f"{timer}: {one}"
        assert not sent, f"sent without a timer: {sent}"
        assert not self.owner.writer.state.timers, "something is left"
        if not self.has_refusals:
            for order in self.broker.orders:
                assert order == sorted(order), f"out of order: {order}"
