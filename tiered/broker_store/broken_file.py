"""Finds the next record behind unreadable places of a pinned commitlog file.

Each place is read a few times only: a disk may take seconds to fail. So the end of an unreadable range is found by
bisection, and readable bytes between several close ranges may be skipped. Which record is valid is decided in
damage.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tiered.broker_store.commit_log import CommitLog, LogFile
from tiered.errors import UnreadableError
from tiered.residency import PAGE_BYTES

READ_BYTES: Final = 4 * 1024 * 1024


def next_record_given(
    log: CommitLog,
    file: LogFile,
    bad_phys: int,
    limit_phys: int,
    next_record: Callable[[int, int], int | None],
) -> int | None:
    """Physical offset of a provable record of ``file`` in (bad_phys, limit_phys), where ``bad_phys`` is unreadable;
    None when there is none. ``next_record``: damage.find_next_record.

    Raises what reading the log raises, except for this file.
    """
    limit_phys = min(limit_phys, file.end_phys)
    bad: int | None = bad_phys
    while bad is not None:
        given = _next_given(log, file, bad)
        if given is None or given >= limit_phys:
            return None
        try:
            return next_record(given - 1, limit_phys)
        except UnreadableError as error:
            if error.path != file.path:
                raise
            bad = first_not_given(log, given, limit_phys)  # none up to there
    return None


def first_not_given(log: CommitLog, phys: int, limit_phys: int) -> int | None:
    """The first unreadable physical offset in [phys, limit_phys) of a file; None when all is readable."""
    data = memoryview(bytearray(min(READ_BYTES, max(0, limit_phys - phys))))
    while phys < limit_phys:
        got, failure = log.read_as_far_as_given(data[: limit_phys - phys], phys)
        phys += got
        if failure is not None:
            return phys
        if got == 0:
            return None
    return None


def _next_given(log: CommitLog, file: LogFile, bad_phys: int) -> int | None:
    """Begin of the first readable page behind the one at ``bad_phys``."""
    last = (file.size_bytes - 1) // PAGE_BYTES
    bad = (bad_phys - file.begin_phys) // PAGE_BYTES
    step = 1
    while not _is_given(log, file, min(bad + step, last)):
        if bad + step >= last:
            return None
        bad, step = bad + step, 2 * step
    good = min(bad + step, last)
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if _is_given(log, file, middle) else (middle, good)
    return file.begin_phys + good * PAGE_BYTES if good > bad else None


def _is_given(log: CommitLog, file: LogFile, page: int) -> bool:
    try:
        log.read(file.begin_phys + page * PAGE_BYTES, PAGE_BYTES)
    except UnreadableError:
        return False
    return True
