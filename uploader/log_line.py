"""Is the commitlog still the log the archive was made from? Checked before any write (3a, The log may be replaced).

A commit carries a CRC of the last log bytes below its end. If the broker's log now differs there, or ends below it
(power loss, fail-over to a lagging slave, a wiped disk), the writer walks back to the newest commit whose check still
holds and starts a new log line there; what was archived above it is superseded, not deleted. Never waits, but for files
to be there at all: a commitlog on a disk that is not mounted is no other log.

A broker that cuts its log leaves the bytes behind the cut in the files until it writes over them: where it can be
asked, its word says where the log ends.

Pure but for reading the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import fastcrc

from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.state import LogCheck
from tiered.errors import UsageError


class CheckResult(Enum):
    """How a commit's check compares with the log on disk."""

    SAME = "same"
    DIFFERENT = "different"
    DELETED = "deleted"
    """The broker has removed those bytes: nothing to compare with."""


@dataclass(frozen=True)
class NewLine:
    """Start a new line at ``phys``, right after commit ``version`` (0: nothing of the archive is in this log)."""

    version: int
    phys: int


def compare(log: CommitLog, check: LogCheck, said_end_phys: int | None = None) -> CheckResult:
    """Read the checked bytes again. ``said_end_phys``: where the broker says its log ends, None if it does not.

    Raises UnavailableError when it may be that the log is only not mounted.
    """
    if check.end_phys <= check.begin_phys:
        return CheckResult.SAME
    log.refuse_unmounted()
    end_phys = _end_phys(log, said_end_phys)
    if check.begin_phys < log.min_phys:
        return CheckResult.DELETED if check.end_phys <= end_phys else CheckResult.DIFFERENT
    if check.end_phys > end_phys and said_end_phys is not None:
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


def find_new_line(
    log: CommitLog, checks: Iterable[tuple[int, LogCheck, int]], said_end_phys: int | None = None
) -> NewLine:
    """Walk ``checks`` (version, check, to_phys; newest first) back to the last one the log still holds.

    A version whose bytes the broker has deleted cannot differ from what it has: the walk ends there, so that history
    which nobody can check stays visible, and what lies between is a recorded gap. But not behind one whose bytes are
    there and are others: a log that contradicts all it can be asked about is another's, or of a disk that was lost, and
    taking out what lies above would destroy the only copy.
    """
    end_phys = _end_phys(log, said_end_phys)
    is_contradicted = False
    for version, check, to_phys in checks:
        result = compare(log, check, said_end_phys)
        if result == CheckResult.SAME and log.min_phys <= to_phys <= end_phys:
            return NewLine(version, to_phys)
        if result == CheckResult.DELETED:
            return NewLine(0, log.min_phys) if is_contradicted else NewLine(version, to_phys)
        is_contradicted |= result == CheckResult.DIFFERENT and check.end_phys <= end_phys
    return NewLine(0, log.min_phys)


def require_shared(line: NewLine, *, may_replace: bool) -> NewLine:
    """``line``, unless it shares nothing with the archive and nobody said that it may. Raises UsageError.

    A running broker that lost its disk goes on under its name; a directory may be another broker's by mistake.
    """
    if line.version == 0 and not may_replace:
        raise UsageError(
            "the store's log has nothing of what is archived under its name: another broker's, or its disk was lost",
            hint="name another archive with --broker; or --replace-log: what is archived stays, and is shown no more",
        )
    return line


def _end_phys(log: CommitLog, said_end_phys: int | None) -> int:
    return log.max_file_end if said_end_phys is None else min(log.max_file_end, said_end_phys)
