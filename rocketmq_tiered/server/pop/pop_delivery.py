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

import asyncio
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
from tiered.model.queue import LMQ_PREFIX


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
        """Note that the message at ``offset`` is delivered and invisible for ``invisible_ms``: a new one, or one that
        was not acknowledged in time and is delivered again. Returns its entry."""
        unacked = self.unacked.get(offset)
        if unacked is None:
            if offset < self.next_offset:
                raise ValueError(f"the message at offset {offset} was popped and acknowledged before")
            unacked = self.unacked[offset] = Unacked(now_ms, now_ms + invisible_ms)
            self.next_offset = offset + 1
        else:
            unacked.popped_ms, unacked.visible_ms = now_ms, now_ms + invisible_ms
            unacked.times += 1
        return unacked

    def skip_to(self, offset: int) -> None:
        """Messages before ``offset`` that were not popped are filtered out."""
        self.next_offset = max(self.next_offset, offset)

    def acknowledge(self, offset: int) -> bool:
        """Returns whether it was unacknowledged, whichever client popped it."""
        return self.unacked.pop(offset, None) is not None

    def hide(self, offset: int, popped_ms: int, now_ms: int, invisible_ms: int) -> bool:
        """Make a popped message invisible for ``invisible_ms`` from now on. Returns False, and changes nothing, if
        ``popped_ms`` is not when the message was popped last, or if it is visible again already."""
        unacked = self.unacked.get(offset)
        if unacked is None or unacked.popped_ms != popped_ms or unacked.visible_ms <= now_ms:
            return False
        unacked.popped_ms, unacked.visible_ms = now_ms, now_ms + invisible_ms
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
        """Return the queue that a group pops from; one that is not known yet begins at the group's offset, or at the
        first message. ``key``: group, topic and queue id. Raises BadRequestError if there is no memory for it."""
        offset = self._offsets.find(*key)
        if offset is None:
            offset = self._archive.archived_offset(*key)
        entry = self._queues.get(key)
        if not self._offsets.has_room(*key):  # its offset would be lost
            raise BadRequestError(
                "no message is popped: the memory for group offsets is used up: raise serve.memory_bytes"
            )
        # New, or the group's offset was reset, or the topic was deleted and created again.
        if entry is None or offset != entry.noted:
            if offset is None:
                bounds = self._archive.bounds(key[1], key[2])
                offset = 0 if bounds is None else bounds.minimum
            if entry is None and not self._has_room(_bytes_of(key, 0)):
                raise BadRequestError(
                    "no message is popped: the memory for messages not acknowledged yet is used up: raise "
                    "serve.memory_bytes"
                )
            counted_bytes = 0 if entry is None else entry.counted_bytes
            entry = self._queues[key] = GroupQueue(PopQueue(offset), offset, counted_bytes=counted_bytes)
            self._offsets.note(*key, offset)
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


_QUEUE_OFFSET_AT, _SYS_FLAG_AT, _BORN_HOST_AT = 20, 36, 48


@dataclass(frozen=True)
class Popped:
    """A record and its offset in the popped queue."""

    offset: int
    data: bytes


def popped_ms_of(receipt: str) -> int:
    """Return when a message was popped, in ms, from the receipt that its client got: ``startOffset popTime
    invisibleTime reviveQueue retry broker queue offset``. Raises UsageError if the text is no receipt."""
    fields = receipt.split(" ")
    try:
        popped_ms, _queue_id, _offset = (int(fields[index]) for index in (1, 6, 7))
    except (IndexError, ValueError) as error:
        raise UsageError(f"extraInfo {receipt[:80]} is not the receipt of a popped message") from error
    return popped_ms


def records(body: Sequence[bytes | bytearray | memoryview], topic: str) -> Iterator[Popped]:
    """Yield each record that a pull of ``topic`` returned, with its offset in the queue. Raises CorruptionError for a
    damaged record, and UsageError for one that holds a batch of messages."""
    data, begin = b"".join(body), 0
    while begin < len(data):
        size = int.from_bytes(data[begin : begin + 4], "big")
        if size <= _BORN_HOST_AT or begin + size > len(data):
            raise CorruptionError(f"topic {topic}: a record that begins with the size {size} is damaged")
        record = data[begin : begin + size]
        (offset,) = struct.unpack_from(">q", record, _QUEUE_OFFSET_AT)
        (sys_flag,) = struct.unpack_from(">i", record, _SYS_FLAG_AT)
        if sys_flag & (SYS_INNER_BATCH | SYS_NEED_UNWRAP):
            raise UsageError(
                f"topic {topic} has records that hold batches of messages, which cannot be popped",
                hint="consume the topic with a DefaultMQPushConsumer in message request mode PULL",
            )
        if topic.startswith(LMQ_PREFIX):
            offset = _lmq_offset(record, topic, offset)
        yield Popped(offset, record)
        begin += size


def _lmq_offset(record: bytes, lmq: str, otherwise: int) -> int:
    """Return the offset of a record in the queue ``lmq``: the record names all its LMQs and its offset in each. If it
    does not name this one, return ``otherwise``."""
    properties = decode_record(record).properties
    names = properties.get("INNER_MULTI_DISPATCH", "").split(",")
    offsets = properties.get("INNER_MULTI_QUEUE_OFFSET", "").split(",")
    offset = dict(zip(names, offsets, strict=False)).get(lmq, "")
    return int(offset) if offset.isdecimal() else otherwise


def redelivered(data: bytes, times: int) -> bytes:
    """Return a record with ``times`` added to its count of consumptions, as a message delivered again has it."""
    (sys_flag,) = struct.unpack_from(">i", data, _SYS_FLAG_AT)
    # Born host, store time and store host come before the count.
    count_at = (
        _BORN_HOST_AT
        + (20 if sys_flag & SYS_BORN_HOST_V6 else 8)
        + 8
        + (20 if sys_flag & SYS_STORE_HOST_V6 else 8)
    )
    record = bytearray(data)
    (before,) = struct.unpack_from(">i", record, count_at)
    struct.pack_into(">i", record, count_at, before + times)
    return bytes(record)


def offset_fields(offsets_of: Mapping[int, Sequence[int]]) -> dict[str, str]:
    """Return the fields of a pop's reply from which clients make receipts. ``offsets_of``: queue id -> offsets of its
    messages, in the order of the records. The 0 in front says that no message comes from a retry topic."""
    return {
        "startOffsetInfo": ";".join(
            f"0 {queue_id} {min(offsets)}" for queue_id, offsets in offsets_of.items()
        ),
        "msgOffsetInfo": ";".join(
            f"0 {queue_id} {','.join(map(str, offsets))}" for queue_id, offsets in offsets_of.items()
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
        """Return the messages of ``queues`` to deliver for a pop now: queue by queue, first those that were not
        acknowledged in time, then new ones. Raises UsageError for a filter that does not parse or for messages that
        cannot be popped, and the errors of reading."""
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
        """Add to ``answer`` the messages of a queue that were popped and not acknowledged in time."""
        visible = entry.state.visible(self._clock.wall_ms())
        # In order, nothing of a queue is delivered while a client still works on one of its messages.
        if wanted.in_order and len(visible) < len(entry.state.unacked):
            return
        for offset in visible:
            if len(answer.body) >= wanted.count or answer.size >= self._bytes_max:
                return
            result = await self._archive.pull(self._pull(wanted, queue_id, offset, 1, "*", TAG))
            is_found = result.status is PullStatus.FOUND
            popped = next(records(result.body, wanted.topic), None) if is_found else None
            if popped is None or popped.offset != offset:
                entry.state.acknowledge(offset)  # the message no longer exists
                continue
            unacked = entry.state.deliver(offset, self._clock.wall_ms(), wanted.invisible_ms)
            answer.add(queue_id, offset, redelivered(popped.data, unacked.times))

    async def _deliver(
        self, wanted: PopRequest, key: GroupQueueKey, entry: GroupQueue, answer: PopBatch
    ) -> None:
        """Add to ``answer`` messages of a queue that were never popped, as many as the request and the limits allow.
        ``key``: group, topic and queue id."""
        state, queue_id = entry.state, key[2]
        for _ in range(EMPTY_STEPS_MAX):
            room = min(UNACKED_MAX - len(state.unacked), self._queues.room())
            count = min(wanted.count - len(answer.body), room)
            if count <= 0 or answer.size >= self._bytes_max or (wanted.in_order and state.unacked):
                return
            pull = self._pull(
                wanted, queue_id, state.next_offset, count, wanted.expression, wanted.expression_type
            )
            result = await self._archive.pull(pull)
            if result.status is PullStatus.FOUND:
                for popped in records(result.body, wanted.topic):
                    if not self._queues.room():
                        return  # other requests popped during the read
                    state.deliver(popped.offset, self._clock.wall_ms(), wanted.invisible_ms)
                    answer.add(queue_id, popped.offset, popped.data)
                    self._queues.count(key, entry)
                state.skip_to(result.next_offset)
                return
            if result.status not in (PullStatus.NO_MATCHED_MESSAGE, PullStatus.OFFSET_TOO_SMALL):
                return
            if result.next_offset <= state.next_offset:
                return
            state.skip_to(result.next_offset)

    def _pull(
        self, wanted: PopRequest, queue_id: int, offset: int, count: int, expression: str, kind: str
    ) -> PullRequest:
        """Return the pull that reads up to ``count`` messages of a queue for a pop, from ``offset`` on. ``expression``
        and ``kind`` (TAG or SQL92): its filter."""
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
