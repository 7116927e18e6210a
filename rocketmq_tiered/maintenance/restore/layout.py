"""Where the records of a restored log are, and what its consume queues have where nothing was kept. Pure.

A broker takes the first unit at or above the log's begin for a queue's minimum. So what stands for deleted messages
must be below that begin, and a log that begins at 0 has nothing below it.
"""

from __future__ import annotations

from typing import NamedTuple

from tiered.errors import UsageError

FILLER_ROOM_BYTES = 1024
COMPACT = "use --layout compact: messages get other physical offsets, and so other offsetMsgIds"


class LogLayout(NamedTuple):
    """The log is [``begin_phys``, ``end_phys``) in files of ``file_bytes``; ``begin_phys`` begins a file.

    ``gap_phys``: the position in the units of missing offsets. It is the end of a file without messages before the
    log, where a pull continues with the next file.
    """

    begin_phys: int
    end_phys: int
    file_bytes: int

    @property
    def gap_phys(self) -> int:
        return self.begin_phys - 1

    @property
    def lead_phys(self) -> int:
        """Where the file without messages begins."""
        return self.begin_phys - self.file_bytes


class Needs(NamedTuple):
    """What consume queues must represent. ``deleted``: offsets below a queue's first message. ``gaps``: offsets between
    messages."""

    deleted: bool
    gaps: bool


def same_layout(oldest_phys: int | None, end_phys: int, file_bytes: int, needs: Needs) -> LogLayout:
    """The layout in which each record keeps its physical offset. ``oldest_phys``: of the first record, None without
    any. Raises UsageError if ``needs`` cannot be met."""
    begin = (max(0, end_phys - 1) if oldest_phys is None else oldest_phys) // file_bytes * file_bytes
    layout = LogLayout(begin, max(end_phys, begin + 1), file_bytes)
    if needs.gaps and begin == 0:
        raise UsageError("offsets are missing inside queues, and the log begins at 0", hint=COMPACT)
    if needs.deleted and (layout.lead_phys if needs.gaps else begin) == 0:
        raise UsageError("queues begin above offset 0, but the log at physical offset 0", hint=COMPACT)
    return layout


def compact_layout(packed_bytes: int, end_phys: int, file_bytes: int, needs: Needs) -> LogLayout:
    """The layout of ``packed_bytes`` of records without anything between them: it ends where the archive does, at
    ``end_phys``, so that the next message lands there, or above it if there is no room for that."""
    files, filled = divmod(packed_bytes, file_bytes)
    least = 2 if needs.gaps else 1
    # Room for a filler between the last record and the end, wherever that is in its file.
    last = (end_phys - filled - FILLER_ROOM_BYTES) // file_bytes
    begin = max(last - files, least) * file_bytes
    return LogLayout(begin, max(end_phys, begin + packed_bytes), file_bytes)
