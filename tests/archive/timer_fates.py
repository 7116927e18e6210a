"""What becomes of entries of timers, one by one: the oracle of ``sort_out`` and of counts."""

from collections.abc import Sequence

from tiered.archive.timers import TimerFiles
from tiered.catalog.timer_refs import TimerRef
from tiered.formats.timer_object import united
from tiered.model.tables import Table
from tiered.model.timer import CANCELS, EntryKind

TIMERS = (EntryKind.TIMER, EntryKind.POSTPONED)


def fate_of(row: tuple[int, ...], every: Sequence[tuple[int, ...]]) -> str:
    """What becomes of an entry among others; values are in the order of ENTRY_DTYPE."""
    if row[6] == EntryKind.REFUSED:
        return "refused"
    if row[6] in CANCELS:
        return "cancels"
    return "cancelled" if any(_ends(one, row) for one in every) else "timers"


def _ends(cancel: tuple[int, ...], timer: tuple[int, ...]) -> bool:
    is_earlier = (timer[2], timer[8]) < (cancel[2], cancel[8])
    is_alike = cancel[:2] == timer[:2] and cancel[5] == timer[5] and is_earlier
    is_there = cancel[6] == EntryKind.CANCEL or cancel[3:5] == timer[3:5]
    return cancel[6] in CANCELS and timer[6] in TIMERS and is_alike and is_there


def entries_of(files: TimerFiles, refs: Sequence[TimerRef]) -> Table:
    """All of ``refs`` that is not claimed."""
    every = [
        united([files.page(ref, number) for number in range(len(files.footer(ref).pages))]) for ref in refs
    ]
    left = [(rows[ref.claimed :], *names) for ref, (rows, *names) in zip(refs, every, strict=True)]
    return united(left)[0]  # type: ignore[arg-type]
