"""Is the commitlog still the log the archive was made from? Checked before any write (3a, The log may be replaced).

A commit carries a CRC of the last log bytes below its end. If the broker's log now differs there, or ends below it
(power loss, fail-over to a lagging slave, a wiped disk), the writer goes back to the newest commit whose check still
holds and starts a new log line there; what was archived above it is superseded. Only beside a running broker, or if
told, where it may be another broker's directory or an older copy (decision 0034). Never waits, but for files to be
there at all: a commitlog on a disk that is not mounted is no other log.

A broker that cuts its log leaves the bytes behind the cut in the files until it writes over them: where it can be
asked, its word says where the log ends.

Pure but for reading the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import fastcrc

from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.damage import record_size
from tiered.catalog.state import LogCheck
from tiered.errors import UsageError

WRITTEN_BYTES = 64
"""So many zeros are no place in the middle of records, but for a body of zeros."""
WALKED_BYTES_MAX = 2 << 30
"""Records are followed at most so far: a minute or two."""


class CheckResult(Enum):
    """How a commit's check compares with the log on disk."""

    SAME = "same"
    DIFFERENT = "different"
    DELETED = "deleted"
    """The broker has removed those bytes: nothing to compare with."""


@dataclass(frozen=True)
class Divergence:
    """Start a new line at ``phys``, right after commit ``version`` (0: nothing of the archive is in this log)."""

    version: int
    phys: int


def compare(log: CommitLog, check: LogCheck, reported_end_phys: int | None = None) -> CheckResult:
    """Read the checked bytes again. ``reported_end_phys``: where the broker says its log ends, None if it does not.

    Raises UnavailableError when it may be that the log is only not mounted.
    """
    if check.end_phys <= check.begin_phys:
        return CheckResult.SAME
    log.refuse_unmounted()
    end_phys = _end_phys(log, reported_end_phys)
    if check.begin_phys < log.min_phys:
        return CheckResult.DELETED if check.end_phys <= end_phys else CheckResult.DIFFERENT
    if check.end_phys > end_phys and reported_end_phys is not None:
        return CheckResult.DIFFERENT
    data = bytearray(check.end_phys - check.begin_phys)
    filled = 0
    while filled < len(data):
        phys = check.begin_phys + filled
        if log.file_at(phys) is None:
            log.refuse_unmounted(is_short=True)
            return CheckResult.DIFFERENT
        got = log.read_into(memoryview(data)[filled:], phys)
        if got == 0:
            return CheckResult.DIFFERENT
        filled += got
    return CheckResult.SAME if fastcrc.crc32.iscsi(bytes(data)) == check.crc32c else CheckResult.DIFFERENT


Check = tuple[int, LogCheck, int]
"""(version, check, to_phys) of a commit that moved the cursor."""


def find_divergence(
    log: CommitLog,
    spans: Iterable[tuple[int, int]],
    newest: Callable[[int, int], Check | None],
    reported_end_phys: int | None = None,
) -> Divergence:
    """The newest commit whose check the log still holds. ``spans`` of versions, newest first, are looked through by
    doubling and halving: a log that holds one commit holds those before it in the log, and history is long. ``newest``
    gives the newest check in a span.

    A version whose bytes the broker has deleted cannot differ from what it has: it counts as held, so that history
    which nobody can check stays visible, and what lies between is a recorded gap. But not behind one whose bytes are
    there and are others: a log that contradicts all it can be asked about is another's, or of a disk that was lost, and
    taking out what lies above would destroy the only copy.
    """
    search = _Search(log, newest, reported_end_phys)
    for first, last in spans:
        found = search.newest_held(first, last)
        if found is not None:
            version, check, to_phys = found
            is_deleted = compare(log, check, reported_end_phys) == CheckResult.DELETED
            if is_deleted and search.is_contradicted:
                break
            return Divergence(version, to_phys)
    return Divergence(0, log.min_phys)


class _Search:
    def __init__(
        self, log: CommitLog, newest: Callable[[int, int], Check | None], reported_end_phys: int | None
    ) -> None:
        self._log = log
        self._newest = newest
        self._said_end_phys = reported_end_phys
        self.is_contradicted = False
        """Whether bytes that are there were seen to be others."""

    def newest_held(self, first: int, last: int) -> Check | None:
        """Of the versions [first, last]."""
        held: Check | None = None
        # Up to ``low`` all is held, or nothing lies above what is; from ``high`` on nothing is.
        low, high, step = first - 1, last + 1, 1
        while held is None and high > first:
            entry = self._newest(first, max(first, high - step))
            if entry is None:
                low = max(first, high - step)
                break
            if self._is_held(entry):
                held, low = entry, max(first, high - step)
            else:
                high, step = entry[0], 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            entry = self._newest(low + 1, middle)
            if entry is None or self._is_held(entry):
                held, low = entry or held, middle
            else:
                high = entry[0]
        return held

    def _is_held(self, entry: Check) -> bool:
        """Not: what ends above the log; what has no bytes to compare, as a line may begin, which proves nothing."""
        _, check, to_phys = entry
        end_phys = _end_phys(self._log, self._said_end_phys)
        result = compare(self._log, check, self._said_end_phys)
        self.is_contradicted |= result == CheckResult.DIFFERENT and check.end_phys <= end_phys
        return result != CheckResult.DIFFERENT and check.begin_phys < check.end_phys and to_phys <= end_phys


def require_shared(line: Divergence, *, is_older_copy: bool, may_replace: bool) -> Divergence:
    """``line``, unless it takes out what nothing replaces and nobody said that it may. Raises UsageError.

    A running broker that lost its disk, or the end of its log, goes on under its name; a directory may be another
    broker's by mistake, or an older copy.
    """
    if may_replace or (line.version and not is_older_copy):
        return line
    if line.version == 0:
        raise UsageError(
            "the store's log has nothing of what is archived under its name: another broker's, or its disk was lost",
            hint="name another archive with --broker; or --replace-log: what is archived stays, and is shown no more",
        )
    raise UsageError(
        f"the store's log ends before what is archived of it, of which it has no more than up to {line.phys}: an older "
        "copy, or the end of the log was lost",
        hint="a copy has nothing to add; --replace-log takes out of the archive what is not in this log",
    )


def ends_before(log: CommitLog, check: LogCheck, shared_phys: int) -> bool:
    """Whether nothing is written in the log where the bytes of ``check`` end. A log that goes on in another way has
    something there: bytes, or, near the end of a file, the padding behind its last record. ``shared_phys``: up to where
    log and archive are the same."""
    begin_phys = max(check.begin_phys, check.end_phys - WRITTEN_BYTES)
    if begin_phys < log.min_phys:
        return False
    if any(log.read(begin_phys, check.end_phys - begin_phys)):
        return False
    return not _is_written_through(log, shared_phys, check.end_phys)


def _is_written_through(log: CommitLog, phys: int, end_phys: int) -> bool:
    """Whether whole records and ends of files lead from ``phys`` to ``end_phys`` or beyond: so zeros there are padding.
    Not where that is far: it is read byte by byte. A copy that was made while its broker wrote breaks the chain."""
    if end_phys - phys > WALKED_BYTES_MAX:
        return False
    while phys < end_phys:
        size = record_size(log, phys)
        file = log.file_at(phys)
        if size is None and file is not None and log.is_end_marker(phys):
            size = file.end_phys - phys
        if not size:
            return False
        phys += size
    return True


def _end_phys(log: CommitLog, reported_end_phys: int | None) -> int:
    return log.max_file_end if reported_end_phys is None else min(log.max_file_end, reported_end_phys)
