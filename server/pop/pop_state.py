"""POP consumption of one queue by one group: which messages are in somebody's hands, and how far the group is.

A popped message is invisible until its time is over or it is acknowledged; then it is given out again. The group's
offset never passes a message that is not acknowledged. Pure. In memory only: after a restart of the server what was
not acknowledged, or was acknowledged beyond one that was not, comes again.

Source: org.apache.rocketmq.broker.processor.PopMessageProcessor, PopBufferMergeService.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Unacked:
    """A message given out and not acknowledged. ``times``: how often it was given out before."""

    popped_ms: int
    visible_ms: int
    times: int = 0


@dataclass
class PopQueue:
    """``next_offset``: the first never given out. ``unacked`` is in order of offsets."""

    next_offset: int
    unacked: dict[int, Unacked] = field(default_factory=dict)

    @property
    def done_offset(self) -> int:
        """Every message before it is acknowledged or was not wanted."""
        return next(iter(self.unacked), self.next_offset)

    def give(self, offset: int, now_ms: int, invisible_ms: int) -> Unacked:
        """``offset`` goes into somebody's hands: a new one, or one whose time is over."""
        found = self.unacked.get(offset)
        if found is None:
            if offset < self.next_offset:
                raise ValueError(f"offset {offset} was given out before")
            found = self.unacked[offset] = Unacked(now_ms, now_ms + invisible_ms)
            self.next_offset = offset + 1
        else:
            found.popped_ms, found.visible_ms, found.times = now_ms, now_ms + invisible_ms, found.times + 1
        return found

    def skip_to(self, offset: int) -> None:
        """Nothing before ``offset`` is wanted that was not given out."""
        self.next_offset = max(self.next_offset, offset)

    def acknowledge(self, offset: int) -> bool:
        """Whether it was in somebody's hands. Whose does not matter: it was consumed."""
        return self.unacked.pop(offset, None) is not None

    def hide(self, offset: int, popped_ms: int, now_ms: int, invisible_ms: int) -> bool:
        """Keep it invisible for ``invisible_ms`` from now on; only for who popped it last, at ``popped_ms``."""
        found = self.unacked.get(offset)
        if found is None or found.popped_ms != popped_ms or found.visible_ms <= now_ms:
            return False
        found.popped_ms, found.visible_ms = now_ms, now_ms + invisible_ms
        return True

    def visible(self, now_ms: int) -> list[int]:
        """Offsets to be given out again, in order."""
        return [offset for offset, found in self.unacked.items() if found.visible_ms <= now_ms]

    def next_visible_ms(self) -> int | None:
        """When the next one is to be given out again."""
        return min((found.visible_ms for found in self.unacked.values()), default=None)
