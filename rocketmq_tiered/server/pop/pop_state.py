"""POP state of one queue and group: unacknowledged messages, and the group's offset. Pure.

A popped message is invisible until it is acknowledged; after its invisible time it is delivered again. The group's
offset never passes an unacknowledged message. In memory only: after a restart, messages from the first unacknowledged
one on are delivered again.

Source: org.apache.rocketmq.broker.processor.PopMessageProcessor, PopBufferMergeService.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
