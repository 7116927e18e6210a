"""A queue whose topic is deleted and recreated: in any order of events no consumer is moved past a message of the new
generation. Only the broker, its files, the catalog and time are played (stateful; see hypothesis.stateful).

An archive that begins later than the broker's files, or holds an earlier generation: no message is passed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fetcher.policy.read_policy import BrokerSide, HeldOffsets, LocalView, ReadPolicies, ReadPolicy
from fetcher.policy.read_router import ArchivedQueue, ReadRouter
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from fetcher.rows.run_list import status_at
from rocketmq_tiered.server.backend.backend import Bounds
from rocketmq_tiered.server.backend.pull_handlers import SUSPEND, PullLimits
from rocketmq_tiered.server.groups.client_table import Subscription
from rocketmq_tiered.server.proxy.broker_view import BrokerViews
from rocketmq_tiered.server.proxy.proxy_pull import ProxyPulls, PullContext
from tests.end_to_end.offloading import FILTER
from tests.kernels.record_builder import Message, encode
from tests.server.proxy.offset_simulation import Known
from tests.server.proxy.proxy_pulls import ARCHIVED, STORED, SUBSCRIPTION, Scene, beside_a_broker
from tests.server.proxy.scripted_broker import stored_ms_of
from tests.server.proxy.simulated_sides import Inline
from tests.server.serving_peer import request
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand
from tiered.remoting.command import RequestCode as R

RECORD_BYTES, COUNT = 200, 4


@dataclass
class Row:
    """A message of generation ``generation`` at ``offset``."""

    generation: int
    offset: int
    phys: int

    @property
    def record(self) -> bytes:
        return encode(Message(b"t", 0, self.offset, b"%d" % self.generation), self.phys)


@dataclass
class World:
    """``log``: all that was ever sent. ``archived`` and ``known``: rows of it in the archive, and in the version that
    the proxy read last."""

    log: list[Row] = field(default_factory=list)
    generation: int = 0
    exists: bool = True
    archived: int = 0
    known: int = 0
    time_s: float = 0.0
    during: list[Callable[[], None]] = field(default_factory=list)
    """What happens at the next waits of a pull."""

    def rows(self) -> list[Row]:
        """What the broker has of the queue."""
        return [row for row in self.log if row.generation == self.generation] if self.exists else []

    def send(self, count: int) -> None:
        for _ in range(count if self.exists else 0):
            self.log.append(Row(self.generation, len(self.rows()), len(self.log) * RECORD_BYTES))

    def delete(self) -> None:
        self.exists = False

    def create(self) -> None:
        if not self.exists:
            self.time_s += 1.1  # at least, since it was deleted
            self.exists, self.generation = True, self.generation + 1

    def recreate(self, count: int) -> None:
        self.delete()
        self.create()
        self.send(count)

    def archive(self, count: int) -> None:
        self.archived = min(len(self.log), self.archived + count)

    def refresh(self) -> None:
        self.known = self.archived

    def wait(self) -> None:
        if self.during:
            self.during.pop(0)()

    # -- the catalog ------------------------------------------------------------------------------------------

    @property
    def state(self) -> list[Row]:
        """See KnownCatalog."""
        return self.log[: self.known]

    def refresh_if_due(self) -> None:
        """See KnownCatalog."""


def newest(state: list[Row]) -> list[Row]:
    """Rows of the newest archived generation."""
    return [row for row in state if row.generation == state[-1].generation] if state else []


def archived_queue(state: list[Row], topic: str, queue_id: int) -> ArchivedQueue:
    """See archived_queues.archived_queue."""
    rows, dispatched = newest(state), len(state) * RECORD_BYTES
    if not rows:
        return ArchivedQueue(None, 0, dispatched)
    generation = rows[0].generation
    ends = [row.offset + 1 for row in state if row.generation < generation]
    return ArchivedQueue(
        HeldOffsets(0, len(rows)),
        rows[-1].phys + RECORD_BYTES,
        dispatched,
        rows[0].phys,
        generation,
        max(ends, default=0),
    )


class Files:
    """As BrokerFiles."""

    def __init__(self, world: World) -> None:
        self._world = world

    def local_view(self, topic: str, queue_id: int, offset: int) -> LocalView:
        rows = self._world.rows()
        if not rows:
            return LocalView(BrokerSide.READABLE)
        phys = rows[offset].phys if offset < len(rows) else -1
        queue = HeldOffsets(0, len(rows))
        return LocalView(BrokerSide.READABLE, queue, phys >= 0, phys, 0, rows[-1].phys)

    def oldest_file(self) -> None:
        return None

    def expire(self) -> None:
        pass


class Broker:
    """An Upstream; answers as PullMessageProcessor does."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def send(self, command: RemotingCommand) -> None:
        pass

    async def call(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        fields, world = command.ext_fields, self._world
        if command.code == R.PULL_MESSAGE:
            return self._pull(int(fields["queueOffset"]))
        rows = world.rows()
        if command.code == R.GET_MIN_OFFSET:
            return RemotingCommand(0, 0, ext_fields={"offset": "0" if rows else "-1"})
        if command.code == R.GET_MAX_OFFSET:
            return RemotingCommand(0, 0, ext_fields={"offset": str(len(rows))})
        if command.code == R.GET_BROKER_RUNTIME_INFO:
            return RemotingCommand(0, 0, body=b'{"table":{"commitLogMinOffset":"0"}}')
        index = int(fields["index"])
        row = b'{"physicOffset":%d}' % rows[index].phys if index < len(rows) else b""
        return RemotingCommand(0, 0, body=b'{"maxQueueIndex":9,"queueData":[%s]}' % row)

    def _pull(self, offset: int) -> RemotingCommand:
        world = self._world
        if world.exists and offset == len(world.rows()) > 0:
            world.time_s += 0.5
            world.wait()  # long polling
        if not world.exists:
            return RemotingCommand(17, 0, remark="the topic does not exist")
        rows = world.rows()
        high, body = len(rows), b"".join(row.record for row in rows[offset : offset + COUNT])
        if not high:
            code, after = (19, 0) if offset == 0 else (21, 0)
        elif offset >= high:
            code, after = (19, offset) if offset == high else (21, high)
        else:
            code, after = 0, min(high, offset + COUNT)
        numbers = {"nextBeginOffset": after, "minOffset": 0, "maxOffset": high}
        return replace(
            RemotingCommand(
                code, 0, ext_fields={name: str(value) for name, value in numbers.items()}, body=body
            ),
            version=477,
        )


class Archive:
    """A Backend for pulls, which serves the newest archived generation."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def pull(self, wish: PullRequest) -> PullResult:
        rows = newest(self._world.state)
        bounds: Any = type("Bounds", (), {"min_offset": 0, "max_offset": len(rows)})
        status, after = status_at(bounds if rows else None, wish.offset)
        if status is not PullStatus.FOUND:
            return PullResult(status, after, 0, len(rows))
        found = rows[wish.offset : wish.offset + COUNT]
        body = [row.record for row in found]
        return PullResult(status, wish.offset + len(found), 0, len(rows), body, len(body))

    async def changed(self, timeout_s: float) -> None:
        self._world.time_s += timeout_s
        self._world.wait()


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["send"]), st.integers(1, 12)),
    st.tuples(st.sampled_from(["archive"]), st.integers(1, 20)),
    st.tuples(st.sampled_from(["delete", "create", "refresh"])),
)


class TwoGenerations(RuleBasedStateMachine):
    """One consumer of the queue, through the proxy. ``seen``: the generation of its offset; ``got``: what it received;
    ``is_lost``: its offset of an earlier generation existed in the current one before a pull moved it, so that it may
    continue there, as at the broker; but not if this proxy has given it a message of the earlier one."""

    @initialize(
        policy=st.sampled_from(["NOT_IN_DISK", "FORCE"]), with_files=st.booleans(), count=st.integers(0, 20)
    )
    def begin(self, policy: str, with_files: bool, count: int) -> None:
        self.world, self.policy, self.with_files = World(), policy, with_files
        self.world.send(count)
        self.offset = self.seen = 0
        self.got: set[tuple[int, int]] = set()
        self.is_lost = False
        self.loop = asyncio.new_event_loop()
        self.restart()

    @rule()
    def restart(self) -> None:
        """The proxy restarts."""
        world = self.world
        router = ReadRouter(world, ReadPolicies(ReadPolicy(self.policy)), FILTER)  # type: ignore[arg-type]
        views = BrokerViews(
            Files(world) if self.with_files else None,  # type: ignore[arg-type]
            executor=Inline(),
            clock=Clock(monotonic_s=lambda: world.time_s),
        )
        context = PullContext(
            Archive(world),
            views,
            Known(Subscription("t", "*")),
            clock=Clock(monotonic_s=lambda: world.time_s),  # type: ignore[arg-type]
        )
        self.has_read = False
        self.pulls = ProxyPulls(router, context, PullLimits(hold_s_max=3.0))

    @rule(event=EVENTS)
    def happen(self, event: tuple[Any, ...]) -> None:
        """Broker or uploader act."""
        getattr(self.world, event[0])(*event[1:])

    @rule(seconds=st.sampled_from([0.1, 1.5, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.time_s += seconds

    @rule(during=st.lists(EVENTS, max_size=4))
    def pull(self, during: list[tuple[Any, ...]]) -> None:
        """The consumer pulls while things happen."""
        world, offset = self.world, self.offset
        world.during = [lambda event=event: self._during(event) for event in during]  # type: ignore[misc]
        self._doubt()
        ext = {
            "topic": "t",
            "queueId": 0,
            "queueOffset": offset,
            "consumerGroup": "g",
            "maxMsgNums": COUNT,
            "sysFlag": SUSPEND,
            "suspendTimeoutMillis": 2000,
            "commitOffset": 0,
            "subVersion": 0,
        }
        with patch("fetcher.policy.read_router.archived_queue", archived_queue):
            response = self.loop.run_until_complete(
                self.pulls.pull(request(R.PULL_MESSAGE, **ext), Broker(world))  # type: ignore[arg-type]
            )
        if response.code not in (0, 19, 20, 21):
            return
        self.offset = int(response.ext["nextBeginOffset"])
        found = _rows(response.body)
        self.got |= set(found)
        if found:
            self.has_read = True
            assert [number for _, number in found] == list(range(offset, self.offset))
            self.seen = found[0][0]
        elif self.offset != offset:
            assert (response.code, self.offset) == (21, 0), "moved elsewhere than to the minimum"
            self.seen, self.is_lost = world.generation, False

    def _during(self, event: tuple[Any, ...]) -> None:
        self.happen(event)
        self._doubt()

    def _doubt(self) -> None:
        rows = self.world.rows()
        may_continue = self.seen < self.world.generation and 0 < self.offset <= len(rows)
        self.is_lost |= may_continue and not self.has_read

    @precondition(lambda self: self.world.exists)
    @rule()
    def come_to_the_end(self) -> None:
        """Nothing happens any more: the consumer reads to the end, and has the whole generation."""
        world = self.world
        for _ in range(40):
            world.time_s += 1.1
            world.archive(len(world.log))
            world.refresh()
            self.pull([])
            if self.seen == world.generation and self.offset == len(world.rows()):
                break
        if not self.is_lost:
            wanted = {(world.generation, row.offset) for row in world.rows()}
            assert wanted <= self.got, f"lost: {sorted(wanted - self.got)}"
            assert not wanted or self.offset == len(wanted)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()


def _rows(body: Any) -> list[tuple[int, int]]:
    """(generation, offset) of every record."""
    data, found = b"".join(bytes(piece) for piece in body), []
    while data:
        size = int.from_bytes(data[:4], "big")
        length = int.from_bytes(data[84:88], "big")
        found.append((int(data[88 : 88 + length]), int.from_bytes(data[20:28], "big")))
        data = data[size:]
    return found


TestTwoGenerations = TwoGenerations.TestCase
TestTwoGenerations.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


BEGINS = 100


def begin_late(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive has [BEGINS, ARCHIVED) only."""
    whole, bounds = scene.archive.pull, Bounds(BEGINS, ARCHIVED)

    async def pull(wish: PullRequest) -> PullResult:
        if wish.offset < BEGINS:
            return PullResult(PullStatus.OFFSET_TOO_SMALL, BEGINS, *bounds)
        found = await whole(wish)
        return PullResult(found.status, found.next_offset, *bounds, found.body, found.records)

    async def offset_by_time(topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        return max(BEGINS, await by_time(topic, queue_id, store_ms, upper=upper))

    by_time = scene.archive.offset_by_time
    queue = ArchivedQueue(HeldOffsets(BEGINS, ARCHIVED), 1 << 40, 1 << 40)
    monkeypatch.setattr(scene.archive, "pull", pull)
    monkeypatch.setattr(scene.archive, "offset_by_time", offset_by_time)
    monkeypatch.setattr("fetcher.policy.read_router.archived_queue", lambda *_: queue)


@pytest.mark.parametrize(("policy", "flags"), [("NOT_IN_DISK", SUSPEND), ("FORCE", SUSPEND | SUBSCRIPTION)])
async def test_while_the_broker_is_away_no_consumer_is_moved_past_what_only_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, flags: int
) -> None:
    async with beside_a_broker(tmp_path, with_files=False) as scene:
        begin_late(scene, monkeypatch)
        scene.policy(policy)
        assert scene.numbers(await scene.pull(7, flags=flags))[0] == 7
        await scene.broker.kill()
        scene.forget()
        held = await scene.pull(7, flags=flags)
        assert (held.code, held.ext["nextBeginOffset"]) == (20, "7")
        assert scene.numbers(await scene.pull(BEGINS, flags=flags))[0] == BEGINS


@pytest.mark.parametrize("policy", ["NOT_IN_DISK", "FORCE"])
async def test_a_broker_without_known_bounds_gets_pulls_below_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    async with beside_a_broker(tmp_path, with_files=False) as scene:
        begin_late(scene, monkeypatch)
        scene.policy(policy)
        scene.broker.refuses = {R.GET_MIN_OFFSET: (16, "no"), R.GET_MAX_OFFSET: (16, "no")}
        response = await scene.pull(7)
        assert scene.numbers(response) == list(range(7, 39))
        minimum = scene.expire(150)
        scene.forget()
        assert minimum > BEGINS
        gone = await scene.pull(7)
        assert (gone.code, int(gone.ext["nextBeginOffset"])) in ((20, BEGINS), (21, BEGINS))
        assert scene.numbers(await scene.pull(BEGINS))[0] == BEGINS


async def test_a_time_before_the_archive_is_not_its_begin_while_the_broker_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with beside_a_broker(tmp_path, with_files=False) as scene:
        begin_late(scene, monkeypatch)
        await scene.broker.kill()
        with pytest.raises(UnavailableError):
            await scene.ask(R.SEARCH_OFFSET_BY_TIMESTAMP, topic="t", queueId=0, timestamp=0)
        later_ms = stored_ms_of(scene.store.records["t", 0][BEGINS + 60])
        response = await scene.ask(R.SEARCH_OFFSET_BY_TIMESTAMP, topic="t", queueId=0, timestamp=later_ms)
        assert BEGINS < int(response.ext["offset"]) <= BEGINS + 60


async def test_who_may_not_search_learns_nothing_from_the_archive(scene: Scene) -> None:
    scene.broker.refuses = dict.fromkeys(
        (R.SEARCH_OFFSET_BY_TIMESTAMP, R.GET_EARLIEST_MSG_STORETIME), (16, "no")
    )
    response = await scene.ask(R.SEARCH_OFFSET_BY_TIMESTAMP, topic="t", queueId=0, timestamp=0)
    assert response.code == 16


@pytest.mark.parametrize("policy", ["NOT_IN_DISK", "NOT_IN_MEM", "FORCE"])
async def test_an_earlier_generation_of_the_queue_is_not_served_as_the_current_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    scene.policy(policy)
    # All that the broker has of the queue lies behind what is archived of it.
    earlier = ArchivedQueue(HeldOffsets(0, ARCHIVED), 0, 1 << 40)
    monkeypatch.setattr("fetcher.policy.read_router.archived_queue", lambda *_: earlier)
    response = await scene.pull(7)
    assert scene.broker.codes().count(R.PULL_MESSAGE) == 1, "the broker answers"
    assert response.ext["maxOffset"] == str(STORED)


@pytest.mark.parametrize("policy", ["DISABLE", "NOT_IN_DISK", "FORCE"])
async def test_an_offset_below_zero_leads_to_the_begin_of_the_queue(scene: Scene, policy: str) -> None:
    minimum = scene.expire(150)
    scene.policy(policy)
    response = await scene.pull(-1)
    begin = minimum if policy == "DISABLE" else 0
    assert (response.code, response.ext["nextBeginOffset"]) == (21, str(begin))
    assert (response.ext["minOffset"], response.ext["maxOffset"]) == (str(begin), str(STORED))
    assert response.ext["suggestWhichBrokerId"] == "0"


@pytest.mark.parametrize("with_files", [True, False])
@pytest.mark.parametrize("policy", ["NOT_IN_DISK", "FORCE"])
@pytest.mark.parametrize("is_awaited", [True, False])
@pytest.mark.parametrize("new", [10, 11, 25])
def test_a_new_topic_that_has_reached_the_old_position_is_read_from_its_beginning(
    policy: str, with_files: bool, is_awaited: bool, new: int
) -> None:
    machine = TwoGenerations()
    machine.begin(policy, with_files, 10)
    for _ in range(3):
        machine.pull([])
    if is_awaited:
        machine.pull([("recreate", new)])
    else:
        machine.happen(("recreate", new))
    machine.come_to_the_end()
    assert not machine.is_lost and len([row for row in machine.got if row[0] == 1]) == new
    machine.teardown()
