"""Assigns a topic's queues to the members of a group (QUERY_ASSIGNMENT), with mode PULL or POP.

For RocketMQ 5 clients that do not rebalance themselves. Modes, set by mqadmin, are in memory only; a broker stores
them.

Sources: org.apache.rocketmq.broker.processor.QueryAssignmentProcessor, AllocateMessageQueueAveragely and …ByCircle.
"""

from __future__ import annotations

from collections.abc import Sequence

from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.groups.queue_locks import MessageQueue
from rocketmq_tiered.server.retries.retry_record import RETRY_PREFIX
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response, json_response

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
        """QUERY_ASSIGNMENT; without "messageQueueAssignments" the client keeps its queues."""
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
        return json_response({
            "messageQueueAssignments": [
                {"messageQueue": MessageQueue(broker, topic, queue_id).document(), "mode": mode} for queue_id in queues
            ],
        })  # fmt: skip

    async def set_mode(self, request: Request) -> Response:
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
