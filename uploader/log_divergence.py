"""Compares the commitlog with the archive before any write, and finds where they diverged.

A commit has a CRC of the last log bytes below its end. If the broker's log differs there, or ends below it (power loss,
failover to a lagging slave, a wiped disk), the newest commit whose check still holds is searched. What follows from
it is decided in log_rule.py. An unmounted disk is not another log: the writer waits.

A broker that cuts its log leaves the bytes after the cut in the files until it overwrites them: if it answers, the end
it reports counts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import fastcrc

from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.damage import record_size
from tiered.broker_store.store import BrokerStore
from tiered.catalog.restored_check import restored_check
from tiered.catalog.state import CatalogState, LogCheck
from tiered.object_store.interface import ObjectStore

WRITTEN_BYTES = 64
"""So many zeros in a row are no part of a record, unless its body is zeros."""
WALKED_BYTES_MAX = 2 << 30
"""Records are walked at most this far, which takes a minute or two."""


class CheckResult(Enum):
    """Result of comparing a commit's check with the log on disk."""

    SAME = "same"
    DIFFERENT = "different"
    DELETED = "deleted"
    """The broker deleted those bytes."""


@dataclass(frozen=True)
class CommonEnd:
    """Log and archive share everything up to ``phys``: the end of commit ``version`` (0: nothing), or, with
    ``check`` of the log below, of the first ``records`` of the next commit. ``is_compared``: by bytes; otherwise the
    broker deleted those. ``above``: version and end of the first commit that the log lacks; None: unknown."""

    version: int
    phys: int
    is_compared: bool = True
    above: tuple[int, int] | None = None
    check: LogCheck | None = None
    records: int = 0


def compare_log(
    log: CommitLog, check: LogCheck, reported_end_phys: int | None = None, *, to_phys: int = 0
) -> CheckResult:
    """Compare ``log`` with the checksum ``check`` of the last bytes below the end of a commit, or below the position up
    to which the log was read: the bytes are read again.

    ``reported_end_phys``: the end of its log that the broker reports, None if it does not run. ``to_phys``: the end of
    the commit; a record where the commit had the padding at the end of a file is of another log. Raises
    UnavailableError if the log may not be mounted.
    """
    if check.end_phys <= check.begin_phys:
        return CheckResult.SAME  # there is nothing to compare
    log.refuse_unmounted()
    end_phys = log_end(log, reported_end_phys)
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
    file = log.file_at(check.end_phys)
    was_padding = file is not None and file.end_phys == to_phys
    is_record_now = was_padding and record_size(log, check.end_phys) is not None
    is_same = fastcrc.crc32.iscsi(bytes(data)) == check.crc32c and not is_record_now
    return CheckResult.SAME if is_same else CheckResult.DIFFERENT


def matches_archive(store: BrokerStore, archive: ObjectStore, state: CatalogState) -> CheckResult:
    """Whether the log of ``store`` has the bytes below the end of ``archive``, whose state is ``state``. A writer stops
    or begins a log history where they differ. Raises UnavailableError if the log may not be mounted."""
    check = restored_check(store.path, archive).of(state.cursor.check)
    return compare_log(store.commit_log, check, to_phys=state.cursor.phys)


Check = tuple[int, LogCheck, int]
"""(version, check, to_phys) of a commit that moved the cursor."""


def find_divergence(
    log: CommitLog,
    spans: Iterable[tuple[int, int]],
    newest: Callable[[int, int], Check | None],
    reported_end_phys: int | None = None,
) -> CommonEnd:
    """Up to where ``log`` agrees with an archive: the end of the newest commit whose checksum the log still has.

    ``spans`` of catalog versions (first, last), newest first, are searched by doubling and halving: a log that has one
    commit has all earlier ones. ``newest`` returns the newest checksum in a span. A commit whose bytes the broker has
    deleted counts, if nothing newer contradicts it: a log that contradicts everything that can be compared is another
    broker's, or of a replaced disk.
    """
    search = _Search(log, newest, reported_end_phys)
    for first, last in spans:
        newest_held = search.newest_held(first, last)
        if newest_held is not None:
            version, check, to_phys = newest_held
            is_deleted = compare_log(log, check, reported_end_phys) == CheckResult.DELETED
            if is_deleted and search.is_contradicted:
                break
            return CommonEnd(version, to_phys, not is_deleted, search.above)
    return CommonEnd(0, log.min_phys, above=search.above)


class _Search:
    """Searches commits that a log has. It "holds" a commit if it has the last bytes that this archived."""

    def __init__(
        self, log: CommitLog, newest: Callable[[int, int], Check | None], reported_end_phys: int | None
    ) -> None:
        """``newest`` returns the newest commit of a range of versions that has a checksum; ``reported_end_phys``: the
        end of the log as the broker reports it."""
        self._log = log
        self._newest = newest
        self._reported_end_phys = reported_end_phys
        self.is_contradicted = False
        """Whether bytes that the log has differed from a commit's checksum."""
        self.above: tuple[int, int] | None = None
        """The lowest commit found that the log does not hold: its version, and its end in the log."""

    def newest_held(self, first: int, last: int) -> Check | None:
        """The newest commit of the versions ``first`` to ``last`` that the log has ("holds"), by its checksum; None if
        there is none."""
        held: Check | None = None
        # The newest held commit is above ``low`` or found already; none from ``high`` on is held. ``step`` doubles.
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
        """Whether the log has the commit ``entry``, by the checksum of its last bytes; not if the commit ends above the
        log, or has no bytes to compare, as at the start of a log history."""
        version, check, to_phys = entry
        end_phys = log_end(self._log, self._reported_end_phys)
        result = compare_log(self._log, check, self._reported_end_phys, to_phys=to_phys)
        self.is_contradicted |= result == CheckResult.DIFFERENT and check.end_phys <= end_phys
        is_held = (
            result != CheckResult.DIFFERENT and check.begin_phys < check.end_phys and to_phys <= end_phys
        )
        if not is_held:
            self.above = version, to_phys
        return is_held


def ends_before(log: CommitLog, check: LogCheck, shared_phys: int) -> bool:
    """Whether the log simply ends before the bytes of ``check``, which the archive has: it is an older copy, or was
    truncated. A log that diverged has something there: bytes, or, near the end of a file, padding. ``shared_phys``: up
    to where log and archive are the same."""
    begin_phys = max(check.begin_phys, check.end_phys - WRITTEN_BYTES)
    if begin_phys < log.min_phys:
        return False
    if any(log.read(begin_phys, check.end_phys - begin_phys)):
        return False
    return not _is_written_through(log, shared_phys, check.end_phys)


def _is_written_through(log: CommitLog, phys: int, end_phys: int) -> bool:
    """Whether the log is written from ``phys`` to ``end_phys``, record by record and file by file, so that zeros there
    are padding. False also if that is more than WALKED_BYTES_MAX, and in a copy made while its broker wrote."""
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


def log_end(log: CommitLog, reported_end_phys: int | None) -> int:
    """Where the log ends at most: its files, or what the broker reports."""
    return log.max_file_end if reported_end_phys is None else min(log.max_file_end, reported_end_phys)
