"""POP requests (200050, 200051, 200151, 200053), which gRPC clients use through a RocketMQ 5 proxy; and assignments of
a topic's queues to the members of a group (400, 401), with mode PULL or POP, for RocketMQ 5 clients that do not
rebalance themselves.

Group offsets are written soon after they move, as at a broker. Only the owner of the groups serves POP. Modes, set by
mqadmin, are in memory only; a broker stores them.

Sources: org.apache.rocketmq.broker.processor.QueryAssignmentProcessor, AllocateMessageQueueAveragely and …ByCircle.
"""

import asyncio
import base64
import time
from collections.abc import Iterable, Sequence

from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.client_table import TAG, ClientTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.queue_locks import MessageQueue
from rocketmq_tiered.server.pop.pop_delivery import BYTES_MAX as POP_BYTES_MAX
from rocketmq_tiered.server.pop.pop_delivery import (
    UNACKED_MAX,
    GroupQueueKey,
    PopBatch,
    PopDelivery,
    PopQueues,
    PopRequest,
    offset_fields,
    popped_ms_of,
)
from rocketmq_tiered.server.wire.request import (
    BadRequestError,
    HandlerTable,
    Request,
    Response,
    json_response,
)
from rocketmq_tiered.server.wire.turns import first_of
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import UsageError
from tiered.model.queue import RETRY_PREFIX
from tiered.remoting.command import RequestCode, ResponseCode

PULL, POP = "PULL", "POP"
ANY_QUEUE = -1
MODES_MAX = 10_000
AVERAGELY, BY_CIRCLE = "AVG", "AVG_BY_CIRCLE"


def averagely(queues: Sequence[int], members: Sequence[str], member: str) -> list[int]:
    """A contiguous share for each member; the first members get one more. Pure."""
    if member not in members:
        return []
    index, (share, more) = members.index(member), divmod(len(queues), len(members))
    begin = index * share + min(index, more)
    return list(queues[begin : begin + share + (index < more)])


def by_circle(queues: Sequence[int], members: Sequence[str], member: str) -> list[int]:
    """Queues dealt out in turn. Pure."""
    return list(queues[members.index(member) :: len(members)]) if member in members else []


_STRATEGIES = {AVERAGELY: averagely, BY_CIRCLE: by_circle}


class AssignmentHandlers:
    """Handlers of assignment and modes."""

    def __init__(self, routes: RouteTable, clients: ClientTable) -> None:
        self._routes, self._clients = routes, clients
        self._modes: dict[tuple[str, str], str] = {}

    def register(self, table: HandlerTable) -> None:
        table.register(RequestCode.QUERY_ASSIGNMENT)(self.assignment)
        table.register(RequestCode.SET_MESSAGE_REQUEST_MODE)(self.set_mode)

    async def assignment(self, request: Request) -> Response:
        """QUERY_ASSIGNMENT: the queues of a topic that a member of a group consumes, and whether it pulls or pops. To a
        reply without "messageQueueAssignments" the client keeps the queues it has."""
        document = request.document()
        topic, group = str(document.get("topic", "")), str(document.get("consumerGroup", ""))
        config, members = self._routes.find(topic), self._clients.group(group)
        mode = PULL if topic.startswith(RETRY_PREFIX) else self._modes.get((group, topic), PULL)
        if config is None:
            return json_response({})
        queues = list(range(config.read_queues))
        if document.get("messageModel") != "BROADCASTING":
            strategy = _STRATEGIES.get(str(document.get("strategyName", AVERAGELY)))
            if members is None or strategy is None:
                return json_response({})
            if mode == POP:
                queues = [ANY_QUEUE]  # each member pops all queues
            else:
                queues = strategy(queues, sorted(members.members), str(document.get("clientId", "")))
        broker = self._routes.archive.broker
        return json_response(
            {
                "messageQueueAssignments": [
                    {"messageQueue": MessageQueue(broker, topic, queue_id).document(), "mode": mode}
                    for queue_id in queues
                ],
            }
        )

    async def set_mode(self, request: Request) -> Response:
        """SET_MESSAGE_REQUEST_MODE, for ``mqadmin setConsumeMode``: whether a group pulls or pops a topic, kept in
        memory."""
        document = request.document()
        topic, group = str(document.get("topic", "")), str(document.get("consumerGroup", ""))
        mode = str(document.get("mode", PULL))
        if (refusal := self._routes.group_refusal(group)) is not None:
            return refusal
        if topic.startswith(RETRY_PREFIX):
            return Response(ResponseCode.NO_PERMISSION, remark="retry topics are always pulled")
        if self._routes.find(topic) is None:
            return Response(ResponseCode.TOPIC_NOT_EXIST, remark=f"topic {topic} is not in the archive")
        if mode not in (PULL, POP):
            return Response(ResponseCode.SYSTEM_ERROR, remark=f"mode {mode[:20]} is neither PULL nor POP")
        if len(self._modes) >= MODES_MAX and (group, topic) not in self._modes:
            return Response(ResponseCode.SYSTEM_ERROR, remark=f"{MODES_MAX} modes are set already")
        self._modes[group, topic] = mode
        return Response()


COUNT_MAX = 32
HOLD_S_MAX = 25.0


class PopHandlers:
    """``bytes_max``: of one reply; ``unacked_bytes_max``: memory of unacknowledged messages."""

    def __init__(
        self,
        archive: Backend,
        routes: RouteTable,
        offsets: GroupOffsets,
        *,
        bytes_max: int = 4 * 1024 * 1024,
        unacked_bytes_max: int = POP_BYTES_MAX,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """``archive``: what is popped; ``routes``: which topics exist; ``offsets``: those of the consumer groups, whose
        owner alone serves POP."""
        self._archive, self._routes, self._offsets = archive, routes, offsets
        self._clock = clock
        self._queues = PopQueues(archive, offsets, bytes_max=unacked_bytes_max)
        self._delivery = PopDelivery(archive, self._queues, bytes_max, clock)
        self._first_queue = 0
        self._freed = asyncio.Event()

    def register(self, table: HandlerTable) -> None:
        table.register(RequestCode.POP_MESSAGE)(self.pop)
        table.register(RequestCode.ACK_MESSAGE)(self.acknowledge)
        table.register(RequestCode.BATCH_ACK_MESSAGE)(self.acknowledge_many)
        table.register(RequestCode.CHANGE_MESSAGE_INVISIBLETIME)(self.hide)

    # -- popping ----------------------------------------------------------------------------------------------

    async def pop(self, request: Request) -> Response:
        """POP_MESSAGE: messages of one or all queues of a topic, invisible to others until they are acknowledged.
        Without messages the reply waits as long as the client's pollTime says."""
        topic, queue_id = request.text("topic"), request.number("queueId", -1)
        if (refusal := self._routes.group_refusal(request.text("consumerGroup"))) is not None:
            return refusal
        config = self._routes.find(topic)
        if config is None:
            return Response(ResponseCode.TOPIC_NOT_EXIST, remark=f"topic {topic} is not in the archive")
        if queue_id >= max(config.read_queues, 1):
            return Response(ResponseCode.SYSTEM_ERROR, remark=f"{topic} has no queue {queue_id}")
        if not self._offsets.may_pop:
            remark = "another server owns the consumer groups of this archive"
            return Response(ResponseCode.NO_PERMISSION, remark=remark)
        wanted = _pop_request(request)
        queues = [queue_id] if queue_id >= 0 else self._rotate(config.read_queues)
        ends_s = time.monotonic() + min(max(request.number("pollTime", 0), 0) / 1000, HOLD_S_MAX)
        while True:
            try:
                answer = await self._delivery.batch(wanted, queues)
            except UsageError as error:
                return Response(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
            left_s = ends_s - time.monotonic()
            if answer.body or left_s <= 0:
                return self._response(wanted, answer)
            await self._wait_for_messages(wanted, queues, left_s)

    def _rotate(self, count: int) -> list[int]:
        """The numbers of all ``count`` queues, beginning with another one each time."""
        self._first_queue += 1
        return [(self._first_queue + number) % count for number in range(count)]

    async def _wait_for_messages(self, wanted: PopRequest, queues: list[int], left_s: float) -> None:
        """Wait until a pop may find messages, or for ``left_s``: the archive has new ones, one that was popped becomes
        visible again, or an acknowledgement frees an ordered queue."""
        visible_again = (
            entry.state.next_visible_ms()
            for queue_id in queues
            if (entry := self._queues.find((wanted.group, wanted.topic, queue_id))) is not None
        )
        first_ms = min((time_ms for time_ms in visible_again if time_ms is not None), default=None)
        if first_ms is not None:
            left_s = min(left_s, max(0.01, (first_ms - self._clock.wall_ms()) / 1000))
        await first_of(self._archive.changed(left_s), self._freed.wait())

    def _response(self, wanted: PopRequest, answer: PopBatch) -> Response:
        """Return the reply to a pop: the records, and the offsets from which clients make the receipts that they
        acknowledge with. Without messages its code is POLLING_TIMEOUT."""
        ext = {
            "popTime": str(self._popped_ms(wanted, answer)),
            "invisibleTime": str(wanted.invisible_ms),
            "reviveQid": "0",
            "restNum": str(answer.rest),
            **offset_fields(answer.offsets),
        }
        code = ResponseCode.SUCCESS if answer.body else ResponseCode.POLLING_TIMEOUT
        return Response(code, ext, answer.body)

    def _popped_ms(self, wanted: PopRequest, answer: PopBatch) -> int:
        """Give all messages of a reply the present time as the one at which they were popped, as they have one in their
        receipts, and return it in ms."""
        now_ms = self._clock.wall_ms()
        for queue_id, offsets in answer.offsets.items():
            entry = self._queues.find((wanted.group, wanted.topic, queue_id))
            unacked = entry.state.unacked if entry is not None else {}
            for offset in offsets:
                if offset in unacked:
                    unacked[offset].popped_ms = now_ms
        return now_ms

    # -- acknowledging ----------------------------------------------------------------------------------------

    async def acknowledge(self, request: Request) -> Response:
        key = request.text("consumerGroup"), request.text("topic"), request.number("queueId")
        return self._acknowledged(key, [request.number("offset")])

    async def acknowledge_many(self, request: Request) -> Response:
        """BATCH_ACK_MESSAGE: acknowledge messages of several queues, each a bit set (b) counted from a start offset
        (so). The reply is the last failure, if there is one."""
        reply = Response()
        acknowledgements = request.document().get("acks") or []
        if not isinstance(acknowledgements, list):
            raise BadRequestError("acks in the body of the request is not a list")
        for item in acknowledgements:
            try:
                start, bits = int(item["so"]), base64.b64decode(str(item["b"]), validate=True).rstrip(b"\0")
                key = str(item["c"]), str(item["t"]), int(item["q"])
            except (KeyError, TypeError, ValueError) as error:
                raise BadRequestError(
                    f"an acknowledgement in the body of the request does not parse: {error}"
                ) from error
            answer = self._acknowledged(key, self._offsets_in(key, start, bits))
            reply = reply if answer.code == ResponseCode.SUCCESS else answer
        return reply

    def _offsets_in(self, key: GroupQueueKey, start: int, bits: bytes) -> list[int]:
        """Return the offsets whose bits are set in ``bits``, where the first bit stands for ``start``. Of a set so
        large that a client cannot have popped it, only those that wait for an acknowledgement and the last one are
        returned."""
        if not bits:
            return []
        entry = self._queues.find(key)
        last = 8 * (len(bits) - 1) + bits[-1].bit_length() - 1
        numbers: Iterable[int] = range(last)
        if last > UNACKED_MAX:
            unacked = entry.state.unacked if entry is not None else {}
            numbers = (offset - start for offset in unacked if 0 <= offset - start < last)
        return [start + number for number in (*numbers, last) if bits[number // 8] >> number % 8 & 1]

    def _acknowledged(self, key: GroupQueueKey, offsets: list[int]) -> Response:
        """Acknowledge the messages at ``offsets`` of a queue, and return the reply. ``key``: group, topic and queue id.
        A message that was not popped here is no error: it was popped before a restart, and is delivered again, as at a
        broker."""
        bounds = self._archive.bounds(key[1], key[2])
        if bounds is None or any(not 0 <= offset <= bounds.maximum for offset in offsets):
            return Response(ResponseCode.NO_MESSAGE, remark=f"offsets {offsets[:3]} of {key[1]} do not exist")
        entry = self._queues.find(key)
        if entry is not None:
            for offset in offsets:
                entry.state.acknowledge(offset)
            self._queues.note(key, entry)
            self._wake()
        return Response()

    async def hide(self, request: Request) -> Response:
        """CHANGE_MESSAGE_INVISIBLETIME: how long a popped message stays invisible from now on; 0 makes it visible at
        once."""
        key = request.text("consumerGroup"), request.text("topic"), request.number("queueId")
        offset, invisible_ms = request.number("offset"), max(0, request.number("invisibleTime"))
        try:
            popped_ms = popped_ms_of(request.text("extraInfo"))
        except UsageError as error:
            raise BadRequestError(str(error)) from error
        entry, now_ms = self._queues.find(key), self._clock.wall_ms()
        if entry is None or not entry.state.hide(offset, popped_ms, now_ms, invisible_ms):
            return Response(ResponseCode.NO_MESSAGE, remark=f"offset {offset} is not popped by this client")
        self._wake()
        return Response(ext={"popTime": str(now_ms), "invisibleTime": str(invisible_ms), "reviveQid": "0"})

    def _wake(self) -> None:
        """Wake waiting requests: an ordered queue may be free, a message visible earlier."""
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    def expire(self) -> None:
        """Remove unused queues."""
        self._queues.expire()


def _pop_request(request: Request) -> PopRequest:
    """Return the pop that ``request`` describes, with numbers kept within their limits."""
    return PopRequest(
        group=request.name("consumerGroup"),
        topic=request.text("topic"),
        count=max(1, min(request.number("maxMsgNums", COUNT_MAX), COUNT_MAX)),
        invisible_ms=max(0, request.number("invisibleTime")),
        expression=request.text("exp", "*") or "*",
        expression_type=request.text("expType", TAG) or TAG,
        in_order=request.flag("order"),
        client=request.peer.id,
    )
