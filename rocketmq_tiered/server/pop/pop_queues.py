"""The queues that groups pop from: unacknowledged messages and the group's offset, within a memory limit.

A popped message is invisible until it is acknowledged; after its invisible time it is delivered again. In memory only:
after a restart, messages from the first unacknowledged one on are delivered again. A group's offset follows the
acknowledged messages up to the first gap. A new group starts at the first archived message: a proxy always asks for the
end (initMode), where an archive has no messages. A reset group starts at its new offset. At the memory limit no message
is popped, and unused queues are removed first.

Source: org.apache.rocketmq.broker.processor.PopMessageProcessor, PopBufferMergeService.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field

from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.wire.request import BadRequestError


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
