"""What stands behind the places of a commitlog file that the disk does not give. For a file that nobody else has.

Each place is asked for a few times only: a disk may take seconds to say that it does not give one. So the end of a
place is found by doubling and halving, and of several close together what lies between them may be passed over.

Finds records; decides nothing about gaps. Which record can be believed is damage.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tiered.broker_store.commit_log import CommitLog, LogFile
from tiered.broker_store.residency import PAGE_BYTES
from tiered.errors import UnreadableError

READ_BYTES: Final = 4 * 1024 * 1024


def next_record_given(
    log: CommitLog,
    file: LogFile,
    bad_phys: int,
    limit_phys: int,
    next_record: Callable[[int, int], int | None],
) -> int | None:
    """Physical offset of a provable record of ``file`` behind ``bad_phys``, which is not given, below ``limit_phys``;
    None when there is none. ``next_record``: damage.find_next_record.

    Raises what reading the log raises, but not for this file.
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
            bad = first_not_given(log, given, limit_phys)  # up to there is none
    return None


def first_not_given(log: CommitLog, phys: int, limit_phys: int) -> int | None:
    """The first physical offset in [phys, limit_phys) of a file that its disk does not give; None: all is given."""
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
    """Where the first page begins that is given behind the one at ``bad_phys``."""
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
