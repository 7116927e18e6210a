"""Where a group is in a topic, where it is to begin again, and moving it: at a running server, or in an archive alone.

A server may be `tiered serve`, the server of `tiered run`, or a broker: they speak one protocol. Members that are
connected are told (222); without any, offsets are committed (15). In an archive the groups' snapshot is written, which
only their owner may: not while a server runs.

Owns the plan and its execution. The command line is cli/reset_offset.py's. Sources: RequestCode, AdminBrokerProcessor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from fetcher.archive import Archive
from fetcher.queries.time_search import Boundary
from server.groups.group_state import GroupLog
from server.wire.codes import RequestCode, ResponseCode
from tiered.errors import CorruptionError, NotFoundError, TieredError, UnavailableError
from tiered.formats import fastjson
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand
from tiered.remoting.credentials import Credentials
from tiered.remoting.tls import ClientTls


class NotMovedError(TieredError):
    """A server moved the group elsewhere, or not at all."""


class StartKind(Enum):
    """From where to begin again."""

    EARLIEST = "earliest"
    TIME = "time"
    OFFSET = "offset"


@dataclass(frozen=True)
class Start:
    """``value``: milliseconds since the epoch, or a queue offset, which is kept within the queue's bounds."""

    kind: StartKind
    value: int = 0

    def within(self, minimum: int, maximum: int, by_time: int) -> int:
        """The offset to begin at in a queue; ``by_time`` is that of the time."""
        if self.kind is StartKind.EARLIEST:
            return minimum
        wanted = by_time if self.kind is StartKind.TIME else self.value
        return min(max(wanted, minimum), maximum)


@dataclass(frozen=True)
class QueueMove:
    """``before``: where the group was, None for nowhere. ``after``: where it will be, or is."""

    broker: str
    queue_id: int
    before: int | None
    after: int
    minimum: int
    maximum: int


class ArchiveGroups:
    """A group's offsets in an archive that no server serves."""

    def __init__(self, archive: Archive, log: GroupLog, lease_ms: int) -> None:
        self._archive, self._log, self._lease_ms = archive, log, lease_ms

    def plan(self, group: str, topic: str, start: Start) -> list[QueueMove]:
        """What ``move`` would do. Raises NotFoundError for an unknown topic."""
        known = self._log.read().get((group, topic), {})
        found = []
        for listing in self._archive.queues(topic):
            queue = self._archive.queue(*listing.key[:2], generation=listing.generation)
            by_time = queue.offset_by_time(start.value, Boundary.LOWER) if start.kind is StartKind.TIME else 0
            after = start.within(queue.min_offset, queue.max_offset, by_time)
            before = known.get(self._log.number(topic, queue.queue_id))
            place = self._archive.access.broker, queue.queue_id, before
            found.append(QueueMove(*place, after, queue.min_offset, queue.max_offset))
        if not found:
            raise NotFoundError(f"{self._archive.title} has no {topic}", hint="tiered ls shows what there is")
        return found

    def move(self, group: str, topic: str, moves: list[QueueMove]) -> list[QueueMove]:
        """Write it. Raises FencedError while a server owns the groups."""
        self._log.claim(self._lease_ms)
        offsets = {key: dict(queues) for key, queues in self._log.offsets.items()}
        numbers = {self._log.number(topic, move.queue_id): move.after for move in moves}
        offsets.setdefault((group, topic), {}).update(numbers)
        self._log.write(offsets, released=True)
        return moves


class ServerGroups:
    """A group's offsets at a running server, reached by its name-server codes at ``address``. ``credentials`` sign
    what it is asked, ``tls`` is how it and its brokers are dialled."""

    def __init__(
        self,
        address: str,
        timeout_s: float = 10.0,
        credentials: Credentials | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._timeout_s, self._credentials, self._tls = timeout_s, credentials, tls
        self._names = self._client(address)
        self._brokers: dict[str, BrokerClient] = {}

    def _client(self, address: str) -> BrokerClient:
        return BrokerClient(address, self._timeout_s, self._credentials, self._tls)

    def close(self) -> None:
        """Hang up."""
        for client in (self._names, *self._brokers.values()):
            client.close()

    def plan(self, group: str, topic: str, start: Start) -> list[QueueMove]:
        """What ``move`` would do. Raises NotFoundError for an unknown topic, UnavailableError."""
        route = _document(self._names, _asked(self._names, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic))
        addresses = {
            str(data["brokerName"]): str(data["brokerAddrs"]["0"])
            for data in route.get("brokerDatas") or []
            if "0" in (data.get("brokerAddrs") or {})
        }
        found = []
        for data in route.get("queueDatas") or []:
            broker = str(data["brokerName"])
            if broker not in addresses:
                raise UnavailableError(f"broker {broker} has no master now")
            self._brokers.setdefault(broker, self._client(addresses[broker]))
            found += [
                self._plan_queue(broker, group, topic, queue_id, start)
                for queue_id in range(int(data["readQueueNums"]))
            ]
        return found

    def _plan_queue(self, broker: str, group: str, topic: str, queue_id: int, start: Start) -> QueueMove:
        client, queue = self._brokers[broker], {"topic": topic, "queueId": queue_id}
        minimum = max(0, _number(client, RequestCode.GET_MIN_OFFSET, **queue))
        maximum = max(minimum, _number(client, RequestCode.GET_MAX_OFFSET, **queue))
        by_time = 0
        if start.kind is StartKind.TIME:
            asked = {"timestamp": start.value, "boundaryType": "LOWER"}
            by_time = _number(client, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, **queue, **asked)
        after = start.within(minimum, maximum, by_time)
        return QueueMove(
            broker, queue_id, self._committed(broker, group, topic, queue_id), after, minimum, maximum
        )

    def _committed(self, broker: str, group: str, topic: str, queue_id: int) -> int | None:
        fields = {"consumerGroup": group, "topic": topic, "queueId": queue_id}
        answer = _call(self._brokers[broker], RequestCode.QUERY_CONSUMER_OFFSET, **fields)
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        return int(_checked(answer, RequestCode.QUERY_CONSUMER_OFFSET).ext_fields["offset"])

    def move(self, group: str, topic: str, start: Start, moves: list[QueueMove]) -> list[QueueMove]:
        """Do it, and where the group is then. Raises NotMovedError when that is elsewhere."""
        found = []
        for broker, client in self._brokers.items():
            own = [move for move in moves if move.broker == broker]
            online = _call(client, RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup=group)
            if online.code == ResponseCode.SUCCESS:
                found += self._tell(client, group, topic, start, own)
            else:
                found += self._commit(client, broker, group, topic, own)
        missed = [move for move, got in zip(moves, found, strict=True) if move.after != got.after]
        if missed:
            first = missed[0]
            raise NotMovedError(
                f"{len(missed)} queues of {group} were not moved, such as {first.broker} queue {first.queue_id} "
                f"to {first.after}",
                hint="stop the group's consumers and repeat",
            )
        return found

    def _commit(
        self, client: BrokerClient, broker: str, group: str, topic: str, moves: list[QueueMove]
    ) -> list[QueueMove]:
        found = []
        for move in moves:
            fields = {"consumerGroup": group, "topic": topic, "queueId": move.queue_id}
            _asked(client, RequestCode.UPDATE_CONSUMER_OFFSET, **fields, commitOffset=move.after)
            now = self._committed(broker, group, topic, move.queue_id)
            found.append(replace(move, after=-1 if now is None else now))
        return found

    def _tell(
        self, client: BrokerClient, group: str, topic: str, start: Start, moves: list[QueueMove]
    ) -> list[QueueMove]:
        """All queues at once, since a client begins again ten seconds after each time it is told; then those that
        are elsewhere, one by one: a broker takes an offset only for a single queue."""
        is_offset = start.kind is StartKind.OFFSET
        moved = _reset(
            client, group, topic, timestamp=0 if is_offset else start.value, queueId=-1,
            offset=start.value if is_offset else -1,
        )  # fmt: skip
        for move in moves:
            if moved.get(move.queue_id) != move.after:
                moved |= _reset(client, group, topic, timestamp=0, queueId=move.queue_id, offset=move.after)
        return [replace(move, after=moved.get(move.queue_id, -1)) for move in moves]


def _reset(client: BrokerClient, group: str, topic: str, **fields: object) -> dict[int, int]:
    """Queue id -> offset, as the answer says; nothing where the server does not want to."""
    code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    answer = _call(client, code, topic=topic, group=group, isForce="true", **fields)
    if answer.code == ResponseCode.SYSTEM_ERROR:
        return {}  # such as an offset below the first one that a broker still has
    return _moved(_document(client, _checked(answer, code)))


def _moved(document: Mapping[str, Any]) -> dict[int, int]:
    """Queue id -> offset of an answer to 222, whose keys are queues."""
    table = document.get("offsetTable") or {}
    return {int(json.loads(queue)["queueId"]): int(offset) for queue, offset in table.items()}


def _call(client: BrokerClient, code: RequestCode, **fields: object) -> RemotingCommand:
    return client.call(code, {name: str(value) for name, value in fields.items()})


def _asked(client: BrokerClient, code: RequestCode, **fields: object) -> RemotingCommand:
    return _checked(_call(client, code, **fields), code)


def _checked(answer: RemotingCommand, code: RequestCode) -> RemotingCommand:
    if answer.code == ResponseCode.SUCCESS:
        return answer
    words = answer.remark or f"code {answer.code}"
    if answer.code == ResponseCode.TOPIC_NOT_EXIST:
        raise NotFoundError(words)
    raise UnavailableError(f"{code.name} failed: {words}")


def _number(client: BrokerClient, code: RequestCode, **fields: object) -> int:
    return int(_asked(client, code, **fields).ext_fields["offset"])


def _document(client: BrokerClient, answer: RemotingCommand) -> dict[str, Any]:
    try:
        found = fastjson.loads(answer.body)
    except CorruptionError as error:
        raise UnavailableError(f"an answer of {client!r} does not parse: {error}") from error
    return found if isinstance(found, dict) else {}
