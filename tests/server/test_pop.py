"""POP: nothing is lost, an unacknowledged message comes again, a group's offset never passes one."""

import asyncio
import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from rocketmq_tiered.server.backend.backend import Bounds, TopicConfig
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.pop.pop_delivery import (
    BYTES_MAX,
    QUEUE_BYTES,
    UNACKED_BYTES,
    UNACKED_MAX,
    PopQueue,
    Unacked,
    offset_fields,
    popped_ms_of,
    records,
)
from rocketmq_tiered.server.pop.pop_handlers import (
    COUNT_MAX,
    AssignmentHandlers,
    PopHandlers,
    averagely,
    by_circle,
)
from rocketmq_tiered.server.wire.request import BadRequestError, HandlerTable, Response
from tests.peak_memory import peak_below
from tests.server.group_clock import Time
from tests.server.serving_peer import request
from tiered.clock import Clock
from tiered.errors import CorruptionError, UsageError
from tiered.formats.record import decode_record
from tiered.object_store.memory import MemoryStore
from tiered.remoting.command import RequestCode, ResponseCode

COUNT = 100


def message(offset: int, sys_flag: int = 0, properties: bytes = b"") -> bytes:
    """A record at ``offset``."""
    host = bytes([10, 0, 0, 1]) + struct.pack(">i", 10911)
    tail = b"".join(
        (
            host,
            struct.pack(">q", 5),
            host,
            struct.pack(">iqi", 0, 0, 1),
            b"x",
            b"\x01t",
            struct.pack(">h", len(properties)),
            properties,
        )
    )
    return struct.pack(">iIIiiqqiq", 48 + len(tail), 0xDAA320A7, 0, 0, 0, offset, 777, sys_flag, 4) + tail


class PopMachine(RuleBasedStateMachine):
    """Any order of giving out, acknowledging, hiding and waiting, beside a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.now_ms = PopQueue(10), 0
        self.done: set[int] = set()

    @rule(invisible_ms=st.integers(1, 20))
    def give_new(self, invisible_ms: int) -> None:
        assert self.queue.deliver(self.queue.next_offset, self.now_ms, invisible_ms).times == 0

    @rule(steps=st.integers(1, 3))
    def skip(self, steps: int) -> None:
        self.done |= set(range(self.queue.next_offset, self.queue.next_offset + steps))
        self.queue.skip_to(self.queue.next_offset + steps)

    @rule(invisible_ms=st.integers(1, 20))
    def give_again(self, invisible_ms: int) -> None:
        for offset in self.queue.visible(self.now_ms):
            assert offset not in self.done
            assert self.queue.deliver(offset, self.now_ms, invisible_ms).times > 0

    @precondition(lambda self: self.queue.unacked)
    @rule(pick=st.integers(0, 1000))
    def acknowledge(self, pick: int) -> None:
        offset = list(self.queue.unacked)[pick % len(self.queue.unacked)]
        assert self.queue.acknowledge(offset)
        assert not self.queue.acknowledge(offset)
        self.done.add(offset)

    @precondition(lambda self: self.queue.unacked)
    @rule(pick=st.integers(0, 1000), invisible_ms=st.integers(0, 20), right=st.booleans())
    def hide(self, pick: int, invisible_ms: int, right: bool) -> None:
        offset = list(self.queue.unacked)[pick % len(self.queue.unacked)]
        found = self.queue.unacked[offset]
        popped_ms = found.popped_ms if right else found.popped_ms - 1
        is_hidden = found.visible_ms > self.now_ms
        assert self.queue.hide(offset, popped_ms, self.now_ms, invisible_ms) == (right and is_hidden)

    @rule(by_ms=st.integers(1, 30))
    def wait(self, by_ms: int) -> None:
        self.now_ms += by_ms

    @invariant()
    def the_groups_offset_never_passes_what_is_not_done(self) -> None:
        done = self.queue.done_offset
        assert set(range(10, done)) <= self.done
        assert done == self.queue.next_offset or done not in self.done
        assert list(self.queue.unacked) == sorted(self.queue.unacked)


TestPopMachine = PopMachine.TestCase


@given(st.lists(st.integers(0, 2**40), max_size=10, unique=True))
def test_records_come_apart_with_their_offsets(offsets: list[int]) -> None:
    body = [message(offset) for offset in offsets]
    pieces: list[bytes | bytearray | memoryview] = [memoryview(b"".join(body[:3])), *body[3:]]
    assert [(one.offset, one.data) for one in records(pieces, "t")] == list(zip(offsets, body, strict=True))


def test_records_that_cannot_be_popped() -> None:
    with pytest.raises(UsageError, match="hold batches of messages"):
        list(records([message(1, sys_flag=0x80)], "t"))
    with pytest.raises(CorruptionError):
        list(records([message(1)[:-1]], "t"))
    lmq = message(
        1, properties=b"INNER_MULTI_DISPATCH\x01%LMQ%a,%LMQ%b\x02INNER_MULTI_QUEUE_OFFSET\x017,9\x02"
    )
    assert [one.offset for one in records([lmq], "%LMQ%b")] == [9]


def test_receipts_and_offsets_as_java_writes_them() -> None:
    assert popped_ms_of("10 1700000000000 60000 0 0 broker-a 3 12") == 1_700_000_000_000
    for text in ("", "a b c d e f g h", "1 2 3"):
        with pytest.raises(UsageError):
            popped_ms_of(text)
    assert offset_fields({1: [4, 5], 0: [9]}) == {
        "startOffsetInfo": "0 1 4;0 0 9",
        "msgOffsetInfo": "0 1 4,5;0 0 9",
        "orderCountInfo": "",
    }


class Archive:
    """Topic t with two queues of COUNT messages, the first at 10; the filter "odd" leaves odd offsets."""

    cluster, broker = "c", "b"

    def topics(self) -> dict[str, TopicConfig]:
        return {"t": TopicConfig("t", 2, 2)}

    def subscription_groups(self) -> dict[str, dict[str, Any]]:
        return {}

    def archived_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        return 50 if group == "old" else None

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        return Bounds(10, 10 + COUNT) if topic == "t" and queue_id < 2 else None

    async def pull(self, wish: PullRequest) -> PullResult:
        bounds = Bounds(10, 10 + COUNT)
        await asyncio.sleep(0)
        if wish.offset >= bounds.maximum:
            return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, wish.offset, *bounds)
        looked = range(wish.offset, min(wish.offset + wish.count, bounds.maximum))
        found = [message(offset) for offset in looked if wish.expression == "*" or offset % 2]
        status = PullStatus.FOUND if found else PullStatus.NO_MATCHED_MESSAGE
        return PullResult(status, looked.stop, *bounds, found, len(found))

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


class Scene:
    """One server."""

    def __init__(self, store: MemoryStore | None = None, unacked_bytes_max: int = BYTES_MAX) -> None:
        self.clock, self.table = Time(), HandlerTable()
        self.offsets = GroupOffsets(
            GroupLog(store or MemoryStore(), "one", Clock(wall_ms=self.clock)), lease_ms=60_000
        )
        archive: Any = Archive()
        self.handlers = PopHandlers(
            archive,
            RouteTable(archive, "127.0.0.1:1"),
            self.offsets,
            unacked_bytes_max=unacked_bytes_max,
            clock=Clock(wall_ms=self.clock),
        )
        self.handlers.register(self.table)

    async def ask(self, code: int, body: Any = None, **fields: object) -> Response:
        handler = self.table.find(code)
        assert handler is not None
        response = await handler(request(code, None, body, **({"consumerGroup": "g", "topic": "t"} | fields)))
        assert response is not None
        return response

    async def pop(self, **fields: object) -> tuple[Response, list[tuple[int, int]]]:
        """The answer, and queue ids with offsets as its fields name them."""
        given_fields = {"queueId": 0, "maxMsgNums": 10, "invisibleTime": 5_000, "pollTime": 0} | fields
        response = await self.ask(RequestCode.POP_MESSAGE, **given_fields)
        named = [part.split(" ") for part in response.ext.get("msgOffsetInfo", "").split(";") if part]
        queues = [(int(queue), int(offset)) for _, queue, offsets in named for offset in offsets.split(",")]
        assert [decode_record(bytes(data)).queue_offset for data in response.body] == [o for _, o in queues]
        return response, queues

    async def ack(self, offset: int, queue_id: int = 0) -> Response:
        return await self.ask(
            RequestCode.ACK_MESSAGE,
            queueId=queue_id,
            offset=offset,
            extraInfo=f"0 1 2 0 0 b {queue_id} {offset}",
        )


@pytest.fixture
async def one() -> Scene:
    """A server that owns the groups."""
    one = Scene()
    await one.offsets.claim()
    return one


async def test_the_groups_offset_follows_acknowledgements_without_a_gap(one: Scene) -> None:
    first, queues = await one.pop()
    assert first.code == 0 and queues == [(0, offset) for offset in range(10, 20)]
    assert first.ext["restNum"] == str(COUNT - 10)
    for offset in (11, 12, 19):
        assert (await one.ack(offset)).code == 0
    assert one.offsets.find("g", "t", 0) == 10
    await one.ack(10)
    assert one.offsets.find("g", "t", 0) == 13
    one.clock.now_ms += 5_000
    again, queues = await one.pop()
    assert [offset for _, offset in queues] == [13, 14, 15, 16, 17, 18, 20, 21, 22, 23]
    attempts = [decode_record(bytes(data)).reconsume_times for data in again.body]
    assert attempts == [1] * 6 + [0] * 4
    everything = {offset for _, offset in queues}
    while True:
        answer, queues = await one.pop()
        if answer.code == ResponseCode.POLLING_TIMEOUT:
            break
        everything |= {offset for _, offset in queues}
    for offset in everything:
        await one.ack(offset)
    assert one.offsets.find("g", "t", 0) == 10 + COUNT
    assert (await one.ack(10 + COUNT + 1)).code == ResponseCode.NO_MESSAGE


async def test_all_queues_are_popped_and_two_clients_share_them(one: Scene) -> None:
    seen: list[tuple[int, int]] = []
    while len(seen) < 2 * COUNT:
        for _, queues in await asyncio.gather(*(one.pop(queueId=-1, maxMsgNums=COUNT_MAX) for _ in range(3))):
            seen += queues
    assert sorted(seen) == [(queue, offset) for queue in (0, 1) for offset in range(10, 10 + COUNT)]


async def test_what_a_filter_skips_counts_as_done(one: Scene) -> None:
    _, queues = await one.pop(exp="odd")
    assert [offset for _, offset in queues] == [11, 13, 15, 17, 19]
    for _, offset in queues[1:]:
        await one.ack(offset)
    assert one.offsets.find("g", "t", 0) == 11
    await one.ack(11)
    assert one.offsets.find("g", "t", 0) == 20


async def test_in_order_a_queue_waits_for_unacknowledged_messages(one: Scene) -> None:
    _, queues = await one.pop(order="true", maxMsgNums=3)
    assert (await one.pop(order="true"))[0].code == ResponseCode.POLLING_TIMEOUT
    for _, offset in queues[:2]:
        await one.ack(offset)
    assert (await one.pop(order="true"))[0].code == ResponseCode.POLLING_TIMEOUT
    waiting = asyncio.create_task(one.pop(order="true", pollTime=10_000, maxMsgNums=2))
    await asyncio.sleep(0.05)
    await one.ack(12)
    async with asyncio.timeout(5):
        assert (await waiting)[1] == [(0, 13), (0, 14)]


async def test_hiding_longer_and_giving_back_at_once(one: Scene) -> None:
    popped, _ = await one.pop(maxMsgNums=2)
    fields = {"queueId": 0, "offset": 10, "invisibleTime": 60_000}
    receipt = f"10 {popped.ext['popTime']} 5000 0 0 b 0 10"
    one.clock.now_ms += 4_000
    hidden = await one.ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, extraInfo=receipt, **fields)
    assert (hidden.code, hidden.ext["popTime"]) == (0, str(one.clock.now_ms))
    stale = await one.ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, extraInfo=receipt, **fields)
    assert stale.code == ResponseCode.NO_MESSAGE
    one.clock.now_ms += 2_000
    assert [offset for _, offset in (await one.pop(maxMsgNums=1))[1]] == [11]
    receipt = f"10 {hidden.ext['popTime']} 60000 0 0 b 0 10"
    await one.ask(
        RequestCode.CHANGE_MESSAGE_INVISIBLETIME, extraInfo=receipt, **fields | {"invisibleTime": 0}
    )
    assert [offset for _, offset in (await one.pop(maxMsgNums=1))[1]] == [10]
    with pytest.raises(BadRequestError):
        await one.ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, extraInfo="x", **fields)


async def test_a_group_continues_where_it_or_its_broker_was_and_can_be_moved() -> None:
    store = MemoryStore()
    one = Scene(store)
    await one.offsets.claim()
    assert (await one.pop(consumerGroup="old", maxMsgNums=1))[1] == [(0, 50)]
    await one.pop()
    await one.ack(10)
    await one.offsets.close()
    two = Scene(store)
    await two.offsets.claim()
    assert (await two.pop(maxMsgNums=1))[1] == [(0, 11)]
    two.offsets.note("g", "t", 0, 70)  # a reset
    assert (await two.pop(maxMsgNums=1))[1] == [(0, 70)]
    assert (await two.ack(11)).code == 0
    assert two.offsets.find("g", "t", 0) == 70


async def test_batches_of_acknowledgements(one: Scene) -> None:
    await one.pop()
    bits = base64.b64encode(bytes([0b00000111, 0b1])).decode()
    item = {"c": "g", "t": "t", "r": "0", "so": 10, "q": 0, "rq": 0, "pt": 1, "it": 2, "b": bits}
    answer = await one.ask(RequestCode.BATCH_ACK_MESSAGE, {"brokerName": "b", "acks": [item]})
    assert (answer.code, one.offsets.find("g", "t", 0)) == (0, 13)
    with pytest.raises(BadRequestError):
        await one.ask(RequestCode.BATCH_ACK_MESSAGE, {"acks": [{"c": "g"}]})


async def test_an_acknowledgement_of_very_many_messages_costs_what_is_unacknowledged(one: Scene) -> None:
    await one.pop()
    item = {"c": "g", "t": "t", "so": 10, "q": 0, "b": base64.b64encode(b"\xff" * 500_000).decode()}
    with peak_below(20_000_000):
        answer = await one.ask(RequestCode.BATCH_ACK_MESSAGE, {"acks": [item]})
    assert answer.code == ResponseCode.NO_MESSAGE, "most of them do not exist"
    assert one.offsets.find("g", "t", 0) == 10
    item["b"] = base64.b64encode(b"\x07" + bytes(500_000)).decode()
    assert (await one.ask(RequestCode.BATCH_ACK_MESSAGE, {"acks": [item]})).code == 0
    assert one.offsets.find("g", "t", 0) == 13


async def test_refusals_and_the_bound() -> None:
    store = MemoryStore()
    one, two = Scene(store), Scene(store)
    await one.offsets.claim()
    await two.offsets.claim()
    assert (await two.pop())[0].code == ResponseCode.NO_PERMISSION
    assert (await one.pop(topic="none"))[0].code == ResponseCode.TOPIC_NOT_EXIST
    assert (await one.pop(queueId=2))[0].code == ResponseCode.SYSTEM_ERROR
    await one.pop(consumerGroup="full", maxMsgNums=1)
    entry = one.handlers._queues.find(("full", "t", 0))
    assert entry is not None
    state = entry.state
    for offset in range(11, 10 + UNACKED_MAX):
        state.unacked[offset] = Unacked(one.clock.now_ms, one.clock.now_ms + 9_000)
    assert (await one.pop(consumerGroup="full"))[0].code == ResponseCode.POLLING_TIMEOUT
    await one.ack(10)  # another group's
    assert (await one.pop(consumerGroup="full"))[0].code == ResponseCode.POLLING_TIMEOUT
    state.acknowledge(12)
    assert (await one.pop(consumerGroup="full"))[1] == [(0, 11)]


@given(
    st.integers(1, 40),
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=12, unique=True),
    st.sampled_from([averagely, by_circle]),
)
def test_every_queue_has_one_member(count: int, members: list[str], share_out: Any) -> None:
    shares = [share_out(range(count), members, member) for member in members]
    assert sorted(queue for share in shares for queue in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert share_out(range(count), members, "unknown") == []


async def test_assignments_by_mode() -> None:
    archive: Any = Archive()
    clients, table = ClientTable(Clock(monotonic_s=lambda: 0.0)), HandlerTable()
    AssignmentHandlers(RouteTable(archive, "127.0.0.1:1"), clients).register(table)
    for name in ("x", "y"):
        data = {"clientID": name, "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": []}]}
        clients.heartbeat(request(RequestCode.HEART_BEAT, body=data))
    asked = {
        "topic": "t",
        "consumerGroup": "g",
        "clientId": "y",
        "strategyName": "AVG",
        "messageModel": "CLUSTERING",
    }

    async def ask(code: int, **changes: str) -> Response:
        handler = table.find(code)
        assert handler is not None
        answer = await handler(request(code, body=asked | changes))
        assert answer is not None
        return answer

    async def queues(**changes: str) -> list[tuple[int, str]] | None:
        document = json.loads(bytes((await ask(RequestCode.QUERY_ASSIGNMENT, **changes)).body[0]))
        found = document.get("messageQueueAssignments")
        return None if found is None else [(one["messageQueue"]["queueId"], one["mode"]) for one in found]

    assert await queues() == [(1, "PULL")]
    assert await queues(messageModel="BROADCASTING") == [(0, "PULL"), (1, "PULL")]
    assert (
        await queues(topic="none")
        is await queues(consumerGroup="none")
        is await queues(strategyName="x")
        is None
    )
    assert (await ask(RequestCode.SET_MESSAGE_REQUEST_MODE, mode="POP")).code == 0
    assert await queues() == [(-1, "POP")]
    assert await queues(topic="%RETRY%g") == []  # one queue, which x has
    for changes, code in (({"topic": "%RETRY%g"}, 16), ({"topic": "none"}, 17), ({"mode": "PUSH"}, 1)):
        assert (await ask(RequestCode.SET_MESSAGE_REQUEST_MODE, **changes)).code == code


async def test_unacknowledged_messages_fill_no_memory_and_go_out_again_when_some_are_acknowledged() -> None:
    bytes_max = 40 * (QUEUE_BYTES + 100) + 100 * UNACKED_BYTES
    one = Scene(unacked_bytes_max=bytes_max)
    await one.offsets.claim()
    queues = one.handlers._queues

    async def popped(group: str) -> int:
        _, found = await one.pop(consumerGroup=group, maxMsgNums=32, invisibleTime=60_000)
        assert queues.held_bytes <= bytes_max
        return len(found)

    batch = list(await asyncio.gather(*(popped(f"g{number}") for number in range(40))))
    assert batch[0] == 32 and batch[-1] == 0
    assert 100 <= sum(batch) < 140
    with pytest.raises(BadRequestError, match="memory_bytes"):
        for number in range(1_000):
            await popped(f"another{number}")
    for offset in range(10, 42):
        assert (
            await one.ask(RequestCode.ACK_MESSAGE, consumerGroup="g0", queueId=0, offset=offset)
        ).code == 0
    assert await popped("g0") > 20
