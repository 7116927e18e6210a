"""Selects the messages of a POP request, first those not acknowledged in time, then new ones; the queues that groups
pop from; records of a pull's body, and the offset fields of a reply.

A popped message is invisible until it is acknowledged; after its invisible time it is delivered again. In memory only:
after a restart, messages from the first unacknowledged one on are delivered again. A group's offset follows the
acknowledged messages up to the first gap. A new group starts at the first archived message: a proxy always asks for the
end (initMode), where an archive has no messages. A reset group starts at its new offset. At the memory limit no message
is popped, and unused queues are removed first.

Sources: org.apache.rocketmq.broker.processor.PopMessageProcessor, PopBufferMergeService;
org.apache.rocketmq.remoting.protocol.header.ExtraInfoUtil, MQClientAPIImpl.processPopResponse.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fetcher.rows.pull import PullRequest, PullStatus
from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.groups.client_table import TAG
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.wire.request import BadRequestError
from tiered.clock import Clock
from tiered.errors import CorruptionError, UsageError
from tiered.formats.record import (
    SYS_BORN_HOST_V6,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    SYS_STORE_HOST_V6,
    decode_record,
)


@dataclass(slots=True)
class Unacked:
    """An unacknowledged message. ``times``: earlier deliveries."""

    popped_ms: int
    visible_ms: int
    times: int = 0


@dataclass
class PopQueue:
    """``next_offset``: the first never popped. ``unacked`` is in order of offsets."""

    next_offset: int
    unacked: dict[int, Unacked] = field(default_factory=dict)

    @property
    def done_offset(self) -> int:
        """All messages before it are acknowledged or filtered out."""
        return next(iter(self.unacked), self.next_offset)

    def deliver(self, offset: int, now_ms: int, invisible_ms: int) -> Unacked:
        """Pop ``offset``: a new message, or one whose invisible time is over."""
        found = self.unacked.get(offset)
        if found is None:
            if offset < self.next_offset:
                raise ValueError(f"offset {offset} was popped before")
            found = self.unacked[offset] = Unacked(now_ms, now_ms + invisible_ms)
            self.next_offset = offset + 1
        else:
            found.popped_ms, found.visible_ms, found.times = now_ms, now_ms + invisible_ms, found.times + 1
        return found

    def skip_to(self, offset: int) -> None:
        """Messages before ``offset`` that were not popped are filtered out."""
        self.next_offset = max(self.next_offset, offset)

    def acknowledge(self, offset: int) -> bool:
        """Returns whether it was unacknowledged, whichever client popped it."""
        return self.unacked.pop(offset, None) is not None

    def hide(self, offset: int, popped_ms: int, now_ms: int, invisible_ms: int) -> bool:
        """Extend the invisible time to ``invisible_ms`` from now; only for its last pop, at ``popped_ms``."""
        found = self.unacked.get(offset)
        if found is None or found.popped_ms != popped_ms or found.visible_ms <= now_ms:
            return False
        found.popped_ms, found.visible_ms = now_ms, now_ms + invisible_ms
        return True

    def visible(self, now_ms: int) -> list[int]:
        """Offsets to deliver again, in order."""
        return [offset for offset, found in self.unacked.items() if found.visible_ms <= now_ms]

    def next_visible_ms(self) -> int | None:
        """When the next message is to be delivered again."""
        return min((found.visible_ms for found in self.unacked.values()), default=None)


GroupQueueKey = tuple[str, str, int]
"""Group, topic, queue id."""
BYTES_MAX = 64 * 1024 * 1024
SWEEP_S = 1.0
"""At the memory limit, how often unused queues are removed."""
QUEUE_BYTES, UNACKED_BYTES = 1_200, 250
"""Measured memory of a queue without names, and of an unacknowledged message."""


@dataclass(slots=True)
class GroupQueue:
    """A queue of a group, used by one request at a time. ``noted``: the group offset last recorded. ``counted_bytes``:
    its part of the memory count."""

    state: PopQueue
    noted: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used_s: float = 0.0
    counted_bytes: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether it can be removed: no unacknowledged message, no request; the group continues at its offset."""
        return not self.state.unacked and not self.lock.locked()


class PopQueues:
    """All popped queues. Belongs to one event loop."""

    def __init__(self, archive: Backend, offsets: GroupOffsets, *, bytes_max: int = BYTES_MAX) -> None:
        self._archive, self._offsets = archive, offsets
        self._bytes_max = bytes_max
        self._queues: dict[GroupQueueKey, GroupQueue] = {}
        self.held_bytes = 0
        """Memory estimate."""
        self._swept_s = float("-inf")

    def find(self, key: GroupQueueKey) -> GroupQueue | None:
        """A popped queue, or None."""
        return self._queues.get(key)

    def acquire(self, key: GroupQueueKey) -> GroupQueue:
        """The queue to pop from, new ones at the group's offset. Raises BadRequestError at a memory limit."""
        known = self._offsets.find(*key)
        if known is None:
            known = self._archive.archived_offset(*key)
        entry = self._queues.get(key)
        if not self._offsets.has_room(*key):  # its offset would be lost
            raise BadRequestError("group offsets are at their memory limit (serve.memory_bytes)")
        if entry is None or known != entry.noted:  # new, or the group was reset, or the topic recreated
            if known is None:
                bounds = self._archive.bounds(key[1], key[2])
                known = 0 if bounds is None else bounds.minimum
            if entry is None and not self._has_room(_bytes_of(key, 0)):
                raise BadRequestError("popped messages are at their memory limit (serve.memory_bytes)")
            counted_bytes = 0 if entry is None else entry.counted_bytes
            entry = self._queues[key] = GroupQueue(PopQueue(known), known, counted_bytes=counted_bytes)
            self._offsets.note(*key, known)
        entry.used_s = time.monotonic()
        self.count(key, entry)
        return entry

    def room(self) -> int:
        """Number of messages that may be popped within the memory limit."""
        if not self._has_room(UNACKED_BYTES):
            return 0
        return (self._bytes_max - self.held_bytes) // UNACKED_BYTES

    def _has_room(self, more_bytes: int) -> bool:
        if self.held_bytes + more_bytes > self._bytes_max and time.monotonic() - self._swept_s >= SWEEP_S:
            self._swept_s = time.monotonic()
            self.expire(0.0)
        return self.held_bytes + more_bytes <= self._bytes_max

    def count(self, key: GroupQueueKey, entry: GroupQueue) -> None:
        """Update the memory count of a queue."""
        if self._queues.get(key) is entry:
            now_bytes = _bytes_of(key, len(entry.state.unacked))
            self.held_bytes += now_bytes - entry.counted_bytes
            entry.counted_bytes = now_bytes

    def note(self, key: GroupQueueKey, entry: GroupQueue) -> None:
        """Update the group's offset and the memory count."""
        self.count(key, entry)
        done = entry.state.done_offset
        if done > entry.noted and self._queues.get(key) is entry:
            entry.noted = done
            self._offsets.note(*key, done)

    def expire(self, idle_s: float = 600.0) -> None:
        """Remove idle queues without unacknowledged messages."""
        limit_s = time.monotonic() - idle_s
        self._queues = {
            key: entry for key, entry in self._queues.items() if entry.used_s > limit_s or not entry.is_idle
        }
        self.held_bytes = sum(entry.counted_bytes for entry in self._queues.values())


def _bytes_of(key: GroupQueueKey, unacked: int) -> int:
    return QUEUE_BYTES + sys.getsizeof(key[0]) + UNACKED_BYTES * unacked


LMQ_PREFIX: Final = "%LMQ%"
_QUEUE_OFFSET_AT, _SYS_FLAG_AT, _BORN_HOST_AT = 20, 36, 48


@dataclass(frozen=True)
class Popped:
    """A record and its offset in the popped queue."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class PopHandle:
    """A receipt: ``startOffset popTime invisible revive retry broker queue offset``."""

    popped_ms: int
    queue_id: int
    offset: int


def handle_of(text: str) -> PopHandle:
    """Parse a receipt. Raises UsageError if it is not one."""
    parts = text.split(" ")
    try:
        return PopHandle(int(parts[1]), int(parts[6]), int(parts[7]))
    except (IndexError, ValueError) as error:
        raise UsageError(f"extraInfo {text[:80]} is not a receipt") from error


def records(body: Sequence[bytes | bytearray | memoryview], topic: str) -> Iterator[Popped]:
    """The records of a pull of ``topic``. Raises CorruptionError, and UsageError for an inner batch."""
    data, at = b"".join(body), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size <= _BORN_HOST_AT or at + size > len(data):
            raise CorruptionError(f"{topic}: record size {size} is impossible")
        record = data[at : at + size]
        (offset,), (sys_flag,) = (
            struct.unpack_from(">q", record, _QUEUE_OFFSET_AT),
            struct.unpack_from(">i", record, _SYS_FLAG_AT),
        )
        if sys_flag & (SYS_INNER_BATCH | SYS_NEED_UNWRAP):
            raise UsageError(
                f"{topic} holds inner batches, which cannot be popped", hint="use a push consumer"
            )
        if topic.startswith(LMQ_PREFIX):
            offset = _lmq_offset(record, topic, offset)
        yield Popped(offset, record)
        at += size


def _lmq_offset(record: bytes, topic: str, otherwise: int) -> int:
    properties = decode_record(record).properties
    names = properties.get("INNER_MULTI_DISPATCH", "").split(",")
    offsets = properties.get("INNER_MULTI_QUEUE_OFFSET", "").split(",")
    found = dict(zip(names, offsets, strict=False)).get(topic)
    return int(found) if found is not None and found.isdecimal() else otherwise


def redelivered(data: bytes, times: int) -> bytes:
    """A record with ``times`` added to its reconsume count, as a redelivery from a retry topic has."""
    (sys_flag,) = struct.unpack_from(">i", data, _SYS_FLAG_AT)
    at = (
        _BORN_HOST_AT
        + (20 if sys_flag & SYS_BORN_HOST_V6 else 8)
        + 8
        + (20 if sys_flag & SYS_STORE_HOST_V6 else 8)
    )
    record = bytearray(data)
    (before,) = struct.unpack_from(">i", record, at)
    struct.pack_into(">i", record, at, before + times)
    return bytes(record)


def offset_fields(found: Mapping[int, Sequence[int]]) -> dict[str, str]:
    """``startOffsetInfo`` and ``msgOffsetInfo`` of a reply. ``found``: queue id -> offsets in the order of records."""
    return {
        "startOffsetInfo": ";".join(f"0 {queue_id} {min(offsets)}" for queue_id, offsets in found.items()),
        "msgOffsetInfo": ";".join(
            f"0 {queue_id} {','.join(map(str, offsets))}" for queue_id, offsets in found.items()
        ),
        "orderCountInfo": "",
    }


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
    """Reads ``archive`` for groups."""

    def __init__(self, archive: Backend, queues: PopQueues, bytes_max: int, clock: Clock) -> None:
        self._archive, self._queues = archive, queues
        self._bytes_max, self._clock = bytes_max, clock

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
        visible = entry.state.visible(self._clock.wall_ms())
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
            unacked = entry.state.deliver(offset, self._clock.wall_ms(), wanted.invisible_ms)
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
                    state.deliver(popped.offset, self._clock.wall_ms(), wanted.invisible_ms)
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
        """The pull that reads what a pop may deliver."""
        return PullRequest(
            wanted.topic,
            queue_id,
            offset,
            count,
            self._bytes_max,
            wanted.group,
            expression,
            kind,
            client=wanted.client,
        )
