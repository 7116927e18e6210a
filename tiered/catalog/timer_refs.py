"""Timer objects in the catalog: which exist, and how far each was delivered. Pure.

Entries of an object are handed over in their order, so its progress is two numbers of rows: [0, done) are over, [done,
claimed) may have been sent, the others are pending. A commit claims rows before they are sent. After a crash only the
claimed rows are in doubt, and their places are searched in the broker.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

from tiered.formats.keys import timer_key
from tiered.formats.timer_object import EncodedTimers
from tiered.model.tables import Table

TIMER_DTYPE = np.dtype([
    ("epoch", "<i8"), ("number", "<i8"),  # of its key
    ("begin_ms", "<i8"), ("end_ms", "<i8"),  # first and last time of delivery
    ("entries", "<i8"), ("done", "<i8"), ("claimed", "<i8"),
    ("size_bytes", "<i8"), ("tail_bytes", "<i8"),
])  # fmt: skip


class TimerRef(NamedTuple):
    """One object of timer entries."""

    epoch: int
    number: int
    begin_ms: int
    end_ms: int
    entries: int
    done: int
    claimed: int
    size_bytes: int
    tail_bytes: int

    @property
    def key(self) -> str:
        """The key of the object."""
        return timer_key(self.epoch, self.number)

    @classmethod
    def of(cls, encoded: EncodedTimers, epoch: int, number: int) -> TimerRef:
        """The catalog's entry for the object number ``number`` that the writer of ``epoch`` puts: none of its timers is
        delivered or about to be sent yet."""
        return cls(
            epoch,
            number,
            encoded.begin_ms,
            encoded.end_ms,
            encoded.entries,
            0,
            0,
            encoded.size_bytes,
            encoded.tail_bytes,
        )

    def moved(self, done: int, claimed: int) -> TimerRef:
        """The same file of timers with other progress: entries that are done, and entries that are claimed."""
        return self._replace(done=done, claimed=claimed)

    @property
    def over(self) -> TimerRef:
        """The same file of timers with all entries done; a commit of this removes it."""
        return self.moved(self.entries, self.entries)


def timer_table(refs: Sequence[TimerRef]) -> Table:
    """``refs`` as a table."""
    return np.array([tuple(ref) for ref in refs], TIMER_DTYPE)


def timer_refs(table: Table) -> tuple[TimerRef, ...]:
    """The timer objects that the rows of a stored ``table`` describe. Raises ValueError for impossible numbers."""
    refs = tuple(TimerRef(*row) for row in table.tolist())
    for ref in refs:
        if not 0 <= ref.done <= ref.claimed <= ref.entries or not 0 < ref.tail_bytes < ref.size_bytes:
            raise ValueError(f"the entry of timer object {ref.key} has impossible numbers: {ref}")
    return refs


def after_change(
    refs: Sequence[TimerRef],
    changed: Sequence[TimerRef],
    *,
    epoch: int,
    may_move: bool,
    pending_deletions: Container[str],
) -> tuple[TimerRef, ...]:
    """The timer objects ``refs`` of a state after a commit of ``epoch`` that names ``changed`` ones: new objects, and
    others whose timers were claimed for sending or are done. Those of which all timers are done leave.

    ``may_move``: whether a commit of this kind may change the progress of an object. Raises ValueError if a new object
    is not of the epoch, has progress or is a pending deletion, and if the progress of another goes back."""
    by_number = {(ref.epoch, ref.number): ref for ref in refs}
    for ref in changed:
        identity = ref.epoch, ref.number
        before = by_number.get(identity)
        if before is None:
            if ref.epoch != epoch or ref.claimed:
                raise ValueError(f"the timer object {ref.key} is not a new one of epoch {epoch}")
            if ref.key in pending_deletions:
                raise ValueError(f"the new timer object {ref.key} is a pending deletion")
        elif not may_move or before.moved(ref.done, ref.claimed) != ref:
            raise ValueError(f"the timer object {ref.key} exists and cannot be changed by this commit")
        elif ref.done < before.done or ref.claimed < before.claimed:
            raise ValueError(f"the progress of the timer object {ref.key} would go back")
        by_number[identity] = ref
    return tuple(ref for ref in by_number.values() if ref.done < ref.entries)
