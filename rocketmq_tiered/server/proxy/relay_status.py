"""Counters and status values of proxy and slave mode, and the reads of each consumer group: archive or broker, and lag.
The status values are also members of the status report.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rocketmq_tiered.server.wire.request import Request, Response
from tiered.model.lru import Lru
from tiered.remoting.command import ResponseCode


@dataclass
class RelayCounters:
    """Since the start. ``answered`` and ``relayed`` by request code, ``failed`` by outcome (relay_rules.Failure);
    ``recreated``: positions that were moved to the beginning of a recreated topic."""

    answered: Counter[int] = field(default_factory=Counter)
    relayed: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    recreated: int = 0


@dataclass(frozen=True)
class GroupReading:
    """One group: members, pulls that found messages by source, and its lag behind the end that its last replies named
    (for archived messages the archive's end)."""

    name: str
    members: int
    archive_pulls: int
    broker_pulls: int
    behind_messages: int


@dataclass(frozen=True)
class RelayStatus:
    """Current state. ``address``: advertised; ``groups``: groups with members here, and their reads;
    ``has_plain_accounts``: clients on other hosts sign requests on connections without TLS."""

    address: str
    connections: int
    is_archive_open: bool
    groups: tuple[GroupReading, ...]
    has_plain_accounts: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class ProxyStatus(RelayStatus):
    """``broker_connections``: open connections to the broker, made for clients. ``name_server_problem``: why no name
    server answers; empty if one does."""

    broker_connections: int
    name_server_problem: str = ""


@dataclass(frozen=True)
class SlaveStatus(RelayStatus):
    """``redirects``: whether the master sends slow consumers here (slaveReadEnable); None: unknown.
    ``name_servers``: (address, registration state); ``master_failure``: why the master is unavailable, if known."""

    broker_id: int
    is_master_available: bool
    redirects: bool | None
    name_servers: tuple[tuple[str, str], ...]
    master_failure: str = ""


BYTES_MAX = 16 * 1024 * 1024
QUEUE_BYTES = 500
"""Measured memory of a queue's counts, without names."""

Key = tuple[str, str, int]
"""Group, topic, queue id."""


@dataclass(slots=True)
class _Queue:
    archive_pulls: int = 0
    broker_pulls: int = 0
    behind: int = 0


class GroupReadStats:
    """Counts since the start."""

    def __init__(self) -> None:
        self._queues: Lru[Key, _Queue] = Lru(BYTES_MAX, resists_floods=True)

    def note(self, request: Request, response: Response | None) -> None:
        """Count the reply to a pull for its group, topic and queue: whether archive or broker had the messages, and how
        far the group is behind the end. Other replies are not counted."""
        if response is None or "nextBeginOffset" not in response.ext:
            return
        key = request.text("consumerGroup", ""), request.text("topic", ""), request.number("queueId", 0)
        queue = self._queues.get(key)
        if queue is None:
            queue = _Queue()
            self._queues.add(key, queue, QUEUE_BYTES + sys.getsizeof(key[0]) + sys.getsizeof(key[1]))
        if response.code == ResponseCode.SUCCESS:
            if response.version is None:  # relayed replies carry the broker's version
                queue.archive_pulls += 1
            else:
                queue.broker_pulls += 1
        end, offset = response.ext.get("maxOffset", ""), response.ext["nextBeginOffset"]
        if end.isdecimal() and offset.isdecimal():
            queue.behind = max(0, int(end) - int(offset))

    def readings(self, members: Iterable[tuple[str, int]]) -> tuple[GroupReading, ...]:
        """Return what each group has read, over all its queues. ``members``: groups with their numbers of members."""
        queues = list(self._queues)
        readings = []
        for name, count in members:
            of_group = [queue for (group, _, _), queue in queues if group == name]
            readings.append(
                GroupReading(
                    name,
                    count,
                    sum(queue.archive_pulls for queue in of_group),
                    sum(queue.broker_pulls for queue in of_group),
                    sum(queue.behind for queue in of_group),
                )
            )
        return tuple(readings)
