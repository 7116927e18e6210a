"""How much of its budget maintenance may use: uploads and reads go first. Pure, but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

READING_S = 5.0
"""Clients read if one has read in so many seconds."""


class Level(Enum):
    """How much of its budget maintenance uses."""

    FULL = "full"
    REDUCED = "reduced"
    PAUSED = "paused"
    FORCED = "forced"
    """Would be paused, but is overdue: slow."""


SHARES = {Level.FULL: 1.0, Level.REDUCED: 0.25, Level.PAUSED: 0.0, Level.FORCED: 0.0625}


@dataclass(frozen=True)
class Load:
    """What else the process does: ``lag_bytes`` of the log to upload, ``batch_bytes`` at a time."""

    lag_bytes: int = 0
    batch_bytes: int = 1
    store_problem: str = ""
    reads: int = 0
    """Reads by clients so far."""


def level_of(load: Load, *, is_reading: bool, is_overdue: bool) -> Level:
    """Paused while uploads fall behind or the object store has a problem, and slow beside work."""
    if load.store_problem or load.lag_bytes > 4 * load.batch_bytes:
        return Level.FORCED if is_overdue and not load.store_problem else Level.PAUSED
    if is_reading or load.lag_bytes > load.batch_bytes // 4:
        return Level.REDUCED
    return Level.FULL


class Throttle:
    """One for all tasks of a process. ``load`` is called several times a second."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load
        self._reads, self._read_s = 0, -READING_S

    def level(self, *, is_overdue: bool = False) -> Level:
        """How much of its budget a task may use now; overdue work never stands still beside uploads."""
        load, now_s = self._load(), time.monotonic()
        if load.reads != self._reads:
            self._reads, self._read_s = load.reads, now_s
        is_reading = now_s - self._read_s < READING_S
        return level_of(load, is_reading=is_reading, is_overdue=is_overdue)
