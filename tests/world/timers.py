"""Timers of the world: a broker that takes what is handed over, and what must come of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fetcher.rows.message import Message
from rocketmq_tiered.sending.timer_broker import WHEEL_TOPIC, RemoteTimerBroker
from rocketmq_tiered.sending.timer_delivery import SETTLE_S, Place, TimerDelivery, TimerPlan
from rocketmq_tiered.sending.timer_send import TimerSend
from tests.archive.queue_reader import QueueReader
from tests.world.broker_model import Timer
from tiered.archive.task import run_pass
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.state import CatalogState
from tiered.errors import UnavailableError
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import TimerSettings

if TYPE_CHECKING:
    from tests.world.sidecar import Sidecar
    from tests.world.world import World

SETTINGS = TimerSettings(ahead_ms=60_000, rate_per_s=4)


@dataclass
class Delivered:
    """A message at the broker. ``wheel_ms``: its time if it waits in the wheel, else 0; ``indexed_s``: when it can be
    found by key."""

    topic: str
    key: str
    place: str
    wheel_ms: int
    indexed_s: float


Name = tuple[str, str, int]


def timer_of(send: TimerSend) -> tuple[str, Name]:
    """Place, and topic, key and time."""
    return send.place.rpartition(":")[0], (send.message.topic, send.key, send.deliver_ms)


def place_of(timer: Timer) -> tuple[str, Name]:
    """The same."""
    return f"{timer.at.text if timer.at else ''}:{timer.phys}", timer.name


class Deliveries:
    """What the broker took, of all owners. It loses none of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.longest_ms = 0 if world.seed % 3 == 0 else 90_000
        self.stored: list[Delivered] = []
        self.sent: Counter[tuple[str, Name]] = Counter()
        self.flying: list[tuple[float, TimerSend]] = []
        """Received, and stored later although the connection has ended."""
        self.doubted: set[str] = set()
        """Places that were searched: a cancellation may have come after their claim."""

    def land(self, send: TimerSend) -> None:
        """Store it; not early."""
        world, timer = self.world, timer_of(send)
        given = send.message.properties.get("TIMER_DELIVER_MS")
        wheel_ms = int(given) if given and self.longest_ms else 0
        assert timer[1][2] in (wheel_ms, 0) or world.now_ms >= timer[1][2], f"{timer} is sent early"
        lag_s = world.random.choice((0.01, 0.01, 1.0, 10.0))
        self.stored.append(
            Delivered(send.message.topic, send.key, send.place, wheel_ms, world.now_ms / 1000 + lag_s)
        )
        self.sent[timer] += 1
        assert self.sent[timer] == 1, f"{timer} is sent twice"
        world.counts["timers handed over"] += 1

    def each_timer_comes(self) -> None:
        """But for those that the log lost for some time, and those that a producer cancelled."""
        broker = self.world.broker
        asked = {place_of(timer): timer for timer in broker.timers if not timer.cancels}
        assert self.sent.keys() <= asked.keys(), f"no timers: {self.sent.keys() - asked.keys()}"
        for place, timer in asked.items():
            is_cancelled = any(
                one.cancels and one.name == timer.name and one.at in (None, timer.at) for one in broker.timers
            )
            is_sure = not timer.was_lost and timer.phys not in broker.lost and not is_cancelled
            assert place in self.sent or not is_sure, f"{timer} is not sent"


class TimerTarget(RemoteTimerBroker):
    """The broker as one process reaches it; which topics are searched is the code's."""

    answers_few = 2

    def __init__(self, sidecar: Sidecar, deliveries: Deliveries) -> None:
        self._sidecar, self._to, self._world = sidecar, deliveries, deliveries.world
        self._places, self._ahead_ms = {}, SETTINGS.ahead_ms

    def longest_ms(self) -> int:
        return self._connected()._to.longest_ms

    def _connected(self) -> Any:
        source, now_s = self._world.random, self._world.now_ms / 1000
        landing = [one for one in self._to.flying if one[0] <= now_s]
        for one in landing:
            self._to.flying.remove(one)
            self._to.land(one[1])
        if source.random() < 0.02 and not self._world.is_ending:
            raise UnavailableError("the broker is away")
        return self

    def runtime_info(self) -> dict[str, str]:
        """As a client asks. What has arrived until now is stored, and perhaps not indexed."""
        stored, now_s = self._connected()._to.stored, self._world.now_ms / 1000
        return {"dispatchBehindBytes": str(sum(now_s < one.indexed_s for one in stored))}

    def has(self, send: TimerSend) -> bool:
        self._to.doubted.add(send.place)
        return super().has(send)

    def _places_with_key(self, topic: str, unique_key: str) -> Iterator[str]:
        """The newest."""
        found = [one.place for one in self._visible(topic) if one.key == unique_key]
        return iter(found[-self.answers_few :])

    def _places_since(self, topic: str, since_ms: int) -> Iterator[str]:
        return (one.place for one in self._visible(topic))

    def _visible(self, topic: str) -> list[Delivered]:
        world, now_s = self._connected()._world, self._world.now_ms / 1000
        return [
            one
            for one in self._to.stored
            if one.indexed_s <= now_s
            and (
                one.wheel_ms if topic == WHEEL_TOPIC else topic == one.topic and one.wheel_ms <= world.now_ms
            )
        ]

    def send(
        self, sends: Sequence[TimerSend], sent: Callable[[TimerSend], None], until_s: float
    ) -> Mapping[int, str]:
        world, sidecar, refused = self._world, self._sidecar, dict[int, str]()
        assert [*sends] == sorted(sends, key=lambda send: send.deliver_ms), "sent out of order"
        for number, send in enumerate(sends):
            self._connected()
            if world.now_ms / 1000 >= until_s:
                raise UnavailableError("not in time")
            cancelled = {
                place_of(one)
                for one in world.broker.timers
                if not one.cancels and world.broker.is_cancelled(one, sidecar.cursor_phys)
            }
            is_doubted = send.place in self._to.doubted
            assert is_doubted or timer_of(send) not in cancelled, f"{timer_of(send)} is sent, and cancelled"
            chance = 1.0 if world.is_ending else world.random.random()
            if chance < 0.02:
                refused[number] = "full"
                continue
            if chance < 0.06:
                self._to.flying.append((world.now_ms / 1000 + SETTLE_S - 0.1, send))
                raise UnavailableError("connection lost")
            sidecar.store.perhaps("send", send.place, lambda send=send: self._to.land(send))
            if chance < 0.1:
                raise UnavailableError("no reply")
            sent(send)
        world.counts["timers refused"] += len(refused)
        return refused


class Delivery(TimerDelivery):
    """``between``: what the process does after a plan, before it carries it out."""

    between: Callable[[], None]

    def step(self, state: CatalogState, plan: TimerPlan) -> bool:
        self.between()
        return super().step(state, plan)


class TimerTask:
    """The task of an owner, from its claim on."""

    def __init__(self, sidecar: Sidecar, writer: CatalogWriter, store: ObjectStore, world: World) -> None:
        self._store, self.writer, self._sidecar, self._world = store, writer, sidecar, world
        commits = MaintenanceCommit(store, writer, world.clock)
        target = TimerTarget(sidecar, world.deliveries)
        self._task = Delivery(commits, SETTINGS, target, self._read, clock=world.clock)
        self._task.between = self._archive_more

    def _read(self, places: Sequence[Place]) -> Mapping[Place, Message]:
        """Messages of the gateway topic at the owner's version."""
        state, found = self.writer.state, dict[Place, Message]()
        for queue, offset in places:
            row = state.queue(queue)
            if row is not None and int(row["min_queue_offset"]) <= offset < int(row["end_queue_offset"]):
                batch = QueueReader(self._store, state, queue).read(offset, max_rows=1, max_bytes=1 << 20)
                if batch.queue_offsets[:1].tolist() == [offset]:
                    size = int(batch.sizes[0])
                    data = memoryview(batch.data[int(batch.starts[0]) :][:size].tobytes())
                    found[queue, offset] = Message(queue, offset, data, 0)
        return found

    def _archive_more(self) -> None:
        """Sometimes, and among it a cancellation."""
        world = self._world
        if self._sidecar.has_compared and not world.is_ending and world.random.random() < 0.3:
            with world.alone():
                world.broker.cancel(world.now_ms)
                world.broker.watch()
                try:
                    self._sidecar.archive_more()
                except UnavailableError:
                    self._sidecar.die()
                    raise

    def run(self) -> None:
        """One pass, as `tiered run` makes it: what cannot be done now comes with a later one."""
        with suppress(UnavailableError):
            run_pass(self._task, lambda: self.writer.state if self.writer.is_claimed else None)
