"""What becomes of entries of timers, one by one: the oracle of ``sort_out`` and of counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiered.archive.timers import TimerFiles
from tiered.catalog.timer_refs import TimerRef
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
    is_alike = cancel[:2] == timer[:2] and cancel[3] == timer[3] and timer[2] < cancel[2]
    is_there = cancel[6] == EntryKind.CANCEL or cancel[4:6] == timer[4:6]
    return cancel[6] in CANCELS and timer[6] in TIMERS and is_alike and is_there


def entries_of(files: TimerFiles, ref: TimerRef) -> Table:
    """All of an object."""
    return np.concatenate([files.page(ref, number) for number in range(len(files.footer(ref).pages))])
