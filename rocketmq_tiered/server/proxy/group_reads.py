"""Reads of each consumer group, from its answered pulls: archive or broker, and lag. Bounded to the queues pulled last.
Belongs to one event loop; ``readings`` may be called from any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from rocketmq_tiered.server.proxy.relay_status import GroupReading
from rocketmq_tiered.server.wire.codes import ResponseCode
from rocketmq_tiered.server.wire.request import Request, Response
from tiered.model.lru import Lru

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
        """Count a pull reply. Relayed replies carry the broker's version."""
        if response is None or "nextBeginOffset" not in response.ext:
            return
        key = request.text("consumerGroup", ""), request.text("topic", ""), request.number("queueId", 0)
        queue = self._queues.get(key)
        if queue is None:
            queue = _Queue()
            self._queues.add(key, queue, QUEUE_BYTES + sys.getsizeof(key[0]) + sys.getsizeof(key[1]))
        if response.code == ResponseCode.SUCCESS:
            if response.version is None:
                queue.archive_pulls += 1
            else:
                queue.broker_pulls += 1
        end, offset = response.ext.get("maxOffset", ""), response.ext["nextBeginOffset"]
        if end.isdecimal() and offset.isdecimal():
            queue.behind = max(0, int(end) - int(offset))

    def readings(self, members: Iterable[tuple[str, int]]) -> tuple[GroupReading, ...]:
        """The reads of ``members``: (group, number of members)."""
        queues = list(self._queues)
        found = []
        for name, count in members:
            own = [queue for (group, _, _), queue in queues if group == name]
            found.append(
                GroupReading(
                    name,
                    count,
                    sum(queue.archive_pulls for queue in own),
                    sum(queue.broker_pulls for queue in own),
                    sum(queue.behind for queue in own),
                )
            )
        return tuple(found)
