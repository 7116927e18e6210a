"""Plans and executes the reset of a consumer group's offsets, at a running server or in an archive.

A server is `tiered serve`, `tiered run` or a broker: they share one protocol. Connected members receive the reset (code
222); without members, offsets are committed (code 15). In an archive the groups' snapshot is written, which requires
that no server owns it. Sources: RequestCode, AdminBrokerProcessor.
"""

import json
import os
import secrets
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from fetcher.archive import Archive
from fetcher.queries.time_search import Boundary
from rocketmq_tiered.server.backend.served_archive import BrokerTables
from rocketmq_tiered.server.groups.group_state import GroupLog
from tiered.errors import NotFoundError, TieredError, UnavailableError
from tiered.remoting.client import BrokerClient, document_of
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode
from tiered.remoting.credentials import Credentials
from tiered.remoting.tls import ClientTls


def own_name() -> str:
    """``host/boot.namespace:pid`` of this process. Host names may repeat; process ids are per namespace."""
    return f"{_own_place()}:{os.getpid()}"


def _own_place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        numbers = secrets.token_hex(8)  # unknown: unique
    return f"{os.uname().nodename}/{numbers}"


def is_gone(owner_name: str) -> bool:
    """Whether ``owner_name``, which ``own_name`` made in some process, is of a process of this machine and container
    that no longer runs: its lease on consumer groups need not expire first."""
    place, _, pid = owner_name.rpartition(":")
    if place != _own_place() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)  # sends nothing, but asks whether there is such a process
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class NotMovedError(TieredError):
    """A server did not set the requested offsets."""


class StartKind(Enum):
    """Kinds of reset targets."""

    EARLIEST = "earliest"
    TIME = "time"
    OFFSET = "offset"


@dataclass(frozen=True)
class Start:
    """A reset target. ``value``: milliseconds since the epoch, or a queue offset."""

    kind: StartKind
    value: int = 0

    def within(self, minimum: int, maximum: int, by_time: int) -> int:
        """The target offset within a queue's bounds; ``by_time``: the offset of the time."""
        if self.kind is StartKind.EARLIEST:
            return minimum
        wanted = by_time if self.kind is StartKind.TIME else self.value
        return min(max(wanted, minimum), maximum)


@dataclass(frozen=True)
class QueueMove:
    """``before``: the group's offset, None without one. ``after``: its new offset."""

    broker: str
    queue_id: int
    before: int | None
    after: int
    minimum: int
    maximum: int


class ArchiveGroups:
    """Offsets in an archive without a server."""

    def __init__(self, archive: Archive, log: GroupLog, lease_ms: int) -> None:
        self._archive, self._log, self._lease_ms = archive, log, lease_ms

    def knows(self, group: str) -> bool:
        """Whether the group exists: it has offsets in the archive, or the broker's archived tables have a configuration
        or offsets of it."""
        tables = BrokerTables(self._archive.access.store)
        tables.refresh(self._archive.access.state)
        return (
            any(group == name for name, _ in self._log.offsets)
            or group in tables.table("subscription_groups")
            or group in tables.consumed().topics
        )

    def plan(self, group: str, topic: str, start: Start) -> list[QueueMove]:
        """What a reset of ``group`` to ``start`` would do to each queue of ``topic`` in the archive, for ``move``.
        Raises NotFoundError for an unknown topic."""
        known = self._log.read().get((group, topic), {})
        found = []
        for listing in self._archive.queues(topic):
            queue = self._archive.queue(*listing.key[:2], generation=listing.generation)
            by_time = queue.offset_by_time(start.value, Boundary.LOWER) if start.kind is StartKind.TIME else 0
            after = start.within(queue.min_offset, queue.max_offset, by_time)
            before = known.get(self._log.number(topic, queue.queue_id))
            bounds = queue.min_offset, queue.max_offset
            found.append(QueueMove(self._archive.access.broker, queue.queue_id, before, after, *bounds))
        if not found:
            raise NotFoundError(
                f"{self._archive.title} has no topic {topic}", hint="tiered ls lists the topics"
            )
        return found

    def move(self, group: str, topic: str, moves: list[QueueMove]) -> list[QueueMove]:
        """Set the offsets of ``moves`` for the group in the archive, and return them. Raises FencedError while a server
        owns the archive's consumer groups."""
        self._log.claim(self._lease_ms)
        offsets = {key: dict(queues) for key, queues in self._log.offsets.items()}
        numbers = {self._log.number(topic, move.queue_id): move.after for move in moves}
        offsets.setdefault((group, topic), {}).update(numbers)
        self._log.write(offsets, released=True)
        return moves


TIMEOUT_S = 10.0


class ServerGroups:
    """Offsets at a running server, whose name-server requests go to ``address``. ``credentials`` sign requests; ``tls``
    is for the server and its brokers."""

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """``address`` returns the brokers of a topic; each broker is connected to when it is first needed."""
        self._credentials, self._tls = credentials, tls
        self._names = self._client(address)
        self._brokers: dict[str, BrokerClient] = {}

    def _client(self, address: str) -> BrokerClient:
        return BrokerClient(address, TIMEOUT_S, self._credentials, self._tls)

    def close(self) -> None:
        """Disconnect."""
        for client in (self._names, *self._brokers.values()):
            client.close()

    def knows(self, group: str) -> bool:
        """Whether the group exists: it has connected members or, in any topic, offsets at the brokers that ``plan`` has
        found."""
        for client in self._brokers.values():
            if _is_online(client, group):
                return True
            answer = _request(client, RequestCode.GET_CONSUME_STATS, consumerGroup=group)
            if document_of(answer).get("offsetTable"):
                return True
        return False

    def plan(self, group: str, topic: str, start: Start) -> list[QueueMove]:
        """What a reset of ``group`` to ``start`` would do to each queue of ``topic`` at its brokers, for ``move``.
        Raises NotFoundError for an unknown topic, and UnavailableError if a broker does not answer or has no master."""
        route = document_of(_request(self._names, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic))
        addresses = {
            str(data["brokerName"]): str(data["brokerAddrs"]["0"])
            for data in route.get("brokerDatas") or []
            if "0" in (data.get("brokerAddrs") or {})
        }
        found = []
        for data in route.get("queueDatas") or []:
            broker = str(data["brokerName"])
            if broker not in addresses:
                raise UnavailableError(
                    f"broker {broker} of topic {topic} has no master at its name server",
                    hint="run the command again once the master runs",
                )
            self._brokers.setdefault(broker, self._client(addresses[broker]))
            found += [
                self._plan_queue(broker, group, topic, queue_id, start)
                for queue_id in range(int(data["readQueueNums"]))
            ]
        return found

    def _plan_queue(self, broker: str, group: str, topic: str, queue_id: int, start: Start) -> QueueMove:
        """What a reset of ``group`` to ``start`` would do to one queue of ``topic``. The new offset is never below the
        queue's minimum nor above its maximum."""
        client, queue = self._brokers[broker], {"topic": topic, "queueId": queue_id}
        minimum = max(0, _number(client, RequestCode.GET_MIN_OFFSET, **queue))
        maximum = max(minimum, _number(client, RequestCode.GET_MAX_OFFSET, **queue))
        by_time = 0
        if start.kind is StartKind.TIME:
            time = {"timestamp": start.value, "boundaryType": "LOWER"}
            by_time = _number(client, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, **queue, **time)
        after = start.within(minimum, maximum, by_time)
        return QueueMove(
            broker, queue_id, self._committed(broker, group, topic, queue_id), after, minimum, maximum
        )

    def _committed(self, broker: str, group: str, topic: str, queue_id: int) -> int | None:
        fields = {"consumerGroup": group, "topic": topic, "queueId": queue_id}
        code = RequestCode.QUERY_CONSUMER_OFFSET
        answer = _request(self._brokers[broker], code, ResponseCode.QUERY_NOT_FOUND, **fields)
        return int(answer.ext_fields["offset"]) if answer.code == ResponseCode.SUCCESS else None

    def move(self, group: str, topic: str, start: Start, moves: list[QueueMove]) -> list[QueueMove]:
        """Execute ``moves``, which ``plan`` has made for ``start``: connected members of the group get a reset, and
        without members the offsets are committed. Returns the moves with the offsets that the brokers then have. Raises
        NotMovedError if one is not the planned one."""
        done = []
        for broker, client in self._brokers.items():
            own = [move for move in moves if move.broker == broker]
            if _is_online(client, group):
                done += self._reset(client, group, topic, start, own)
            else:
                done += self._commit(client, broker, group, topic, own)
        missed = [planned for planned, move in zip(moves, done, strict=True) if planned.after != move.after]
        if missed:
            first = missed[0]
            raise NotMovedError(
                f"{len(missed)} queues of topic {topic} were not reset for group {group}, such as queue "
                f"{first.queue_id} of {first.broker} to offset {first.after}",
                hint="stop the group's consumers and run the command again",
            )
        return done

    def _commit(
        self, client: BrokerClient, broker: str, group: str, topic: str, moves: list[QueueMove]
    ) -> list[QueueMove]:
        """Commit the offsets of ``moves`` for a group without connected members, and return the moves with the offsets
        that the broker then has as ``after``, -1 for none."""
        found = []
        for move in moves:
            fields = {"consumerGroup": group, "topic": topic, "queueId": move.queue_id}
            _request(client, RequestCode.UPDATE_CONSUMER_OFFSET, **fields, commitOffset=move.after)
            now = self._committed(broker, group, topic, move.queue_id)
            found.append(replace(move, after=-1 if now is None else now))
        return found

    def _reset(
        self, client: BrokerClient, group: str, topic: str, start: Start, moves: list[QueueMove]
    ) -> list[QueueMove]:
        """Have the broker send a reset to the connected members of ``group``, and return the moves with the offsets
        that it reports as ``after``, -1 for none. All queues are reset in one request, as clients stop for ten seconds
        at each reset; queues that then have another offset than planned are reset one by one, each to its own offset,
        which a broker takes for a single queue only."""
        is_offset = start.kind is StartKind.OFFSET
        moved = _reset_at(
            client,
            group,
            topic,
            timestamp=0 if is_offset else start.value,
            queueId=-1,
            offset=start.value if is_offset else -1,
        )
        for move in moves:
            if moved.get(move.queue_id) != move.after:
                moved |= _reset_at(
                    client, group, topic, timestamp=0, queueId=move.queue_id, offset=move.after
                )
        return [replace(move, after=moved.get(move.queue_id, -1)) for move in moves]


def _reset_at(client: BrokerClient, group: str, topic: str, **fields: object) -> dict[int, int]:
    """Request a reset at one broker (code 222) with the target in ``fields``. Returns the new offset by queue id; empty
    if the broker refuses the target."""
    code, fields = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, {"topic": topic, "group": group, **fields}
    # A broker answers SYSTEM_ERROR to a target such as an offset below its minimum.
    answer = _request(client, code, ResponseCode.SYSTEM_ERROR, isForce="true", **fields)
    if answer.code != ResponseCode.SUCCESS:
        return {}
    table = document_of(answer).get("offsetTable") or {}  # its keys are queues
    return {int(json.loads(queue)["queueId"]): int(offset) for queue, offset in table.items()}


def _is_online(client: BrokerClient, group: str) -> bool:
    answer = client.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": group})
    return answer.code == ResponseCode.SUCCESS


def _request(
    client: BrokerClient, code: RequestCode, *accepted: ResponseCode, **fields: object
) -> RemotingCommand:
    """Send a request that has to succeed, or to be answered with one of the codes ``accepted``. Raises what
    ``BrokerClient.request`` raises."""
    return client.request(code, {name: str(value) for name, value in fields.items()}, accepted=accepted)


def _number(client: BrokerClient, code: RequestCode, **fields: object) -> int:
    return int(_request(client, code, **fields).ext_fields["offset"])
