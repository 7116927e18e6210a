"""Selects the messages of a POP request: first those not acknowledged in time, then new ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from fetcher.rows.pull import PullRequest, PullStatus
from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.groups.client_table import TAG
from rocketmq_tiered.server.pop.pop_messages import records, redelivered
from rocketmq_tiered.server.pop.pop_queues import GroupQueue, GroupQueueKey, PopQueues

UNACKED_MAX = 2_000
"""Unacknowledged messages of a group and queue; at the limit no new ones are popped."""
EMPTY_STEPS_MAX = 64
"""Reads without a matching message, per request and queue."""


@dataclass(frozen=True)
class PopRequest:
    """One request of ``client``. ``in_order``: no message of a queue with unacknowledged ones."""

    group: str
    topic: str
    count: int
    invisible_ms: int
    expression: str
    expression_type: str
    in_order: bool
    client: int


@dataclass
class PopBatch:
    """Records of a reply in order, and their offsets by queue."""

    body: list[bytes] = field(default_factory=list)
    offsets: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    rest: int = 0
    size: int = 0

    def add(self, queue_id: int, offset: int, data: bytes) -> None:
        """Add a record."""
        self.body.append(data)
        self.offsets[queue_id].append(offset)
        self.size += len(data)


class PopDelivery:
    """Reads ``archive`` for groups. ``clock_ms``: wall clock."""

    def __init__(
        self, archive: Backend, queues: PopQueues, bytes_max: int, clock_ms: Callable[[], int]
    ) -> None:
        self._archive, self._queues = archive, queues
        self._bytes_max, self._clock_ms = bytes_max, clock_ms

    async def batch(self, wanted: PopRequest, queues: list[int]) -> PopBatch:
        """The messages of ``queues``, in their order, to deliver now. Raises UsageError for a filter or messages that
        cannot be popped, and what reading raises."""
        answer = PopBatch()
        for queue_id in queues:
            bounds = self._archive.bounds(wanted.topic, queue_id)
            if bounds is None:
                continue
            key = wanted.group, wanted.topic, queue_id
            entry = self._queues.acquire(key)
            async with entry.lock:
                if len(answer.body) < wanted.count:
                    await self._redeliver(wanted, queue_id, entry, answer)
                    await self._deliver(wanted, key, entry, answer)
                self._queues.note(key, entry)
                answer.rest += max(0, bounds.maximum - entry.state.next_offset)
        return answer

    async def _redeliver(
        self, wanted: PopRequest, queue_id: int, entry: GroupQueue, answer: PopBatch
    ) -> None:
        """Messages not acknowledged in time."""
        visible = entry.state.visible(self._clock_ms())
        if wanted.in_order and len(visible) < len(entry.state.unacked):
            return
        for offset in visible:
            if len(answer.body) >= wanted.count or answer.size >= self._bytes_max:
                return
            found = await self._archive.pull(self._pull(wanted, queue_id, offset, 1, "*", TAG))
            popped = (
                next(iter(records(found.body, wanted.topic)), None)
                if found.status is PullStatus.FOUND
                else None
            )
            if popped is None or popped.offset != offset:
                entry.state.acknowledge(offset)  # the message no longer exists
                continue
            unacked = entry.state.deliver(offset, self._clock_ms(), wanted.invisible_ms)
            answer.add(queue_id, offset, redelivered(popped.data, unacked.times))

    async def _deliver(
        self, wanted: PopRequest, key: GroupQueueKey, entry: GroupQueue, answer: PopBatch
    ) -> None:
        """New messages."""
        state, queue_id = entry.state, key[2]
        for _ in range(EMPTY_STEPS_MAX):
            room = min(UNACKED_MAX - len(state.unacked), self._queues.room())
            count = min(wanted.count - len(answer.body), room)
            if count <= 0 or answer.size >= self._bytes_max or (wanted.in_order and state.unacked):
                return
            pull = self._pull(
                wanted, queue_id, state.next_offset, count, wanted.expression, wanted.expression_type
            )
            found = await self._archive.pull(pull)
            if found.status is PullStatus.FOUND:
                for popped in records(found.body, wanted.topic):
                    if not self._queues.room():
                        return  # other requests popped during the read
                    state.deliver(popped.offset, self._clock_ms(), wanted.invisible_ms)
                    answer.add(queue_id, popped.offset, popped.data)
                    self._queues.count(key, entry)
                state.skip_to(found.next_offset)
                return
            if found.status not in (PullStatus.NO_MATCHED_MESSAGE, PullStatus.OFFSET_TOO_SMALL):
                return
            if found.next_offset <= state.next_offset:
                return
            state.skip_to(found.next_offset)

    def _pull(
        self, wanted: PopRequest, queue_id: int, offset: int, count: int, expression: str, kind: str
    ) -> PullRequest:
        return PullRequest(
            wanted.topic, queue_id, offset, count, self._bytes_max, wanted.group, expression, kind,
            client=wanted.client,
        )  # fmt: skip
