"""One line of offsets from archive and broker, as a client of the proxy sees it. Pure.

What a pull is answered is decided by read_policy.py and read_router.py, the same as for the broker's own files. Here is
what the wire adds: what a broker's answer means (``judged``), which code a client is told (``reply_code``), how far
from its minimum the broker may have deleted meanwhile (``next_margin``), and offsets by time on the joined line.

    archive | relay to the broker | hold | moved

Held offsets are answered with PULL_RETRY_IMMEDIATELY at the same offset. PULL_OFFSET_MOVED is told only of offsets that
neither side has nor will have. A broker that deletes while it reads answers later messages as if nothing was before
them (MESSAGE_WAS_REMOVING, OFFSET_FOUND_NULL, a hole in what was found): such an answer counts as "too small".

Sources: DefaultMessageStore.getMessage, PullMessageProcessor, DefaultPullMessageResultHandler.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from fetcher.policy.read_policy import OffsetRange
from fetcher.rows.batch import GetStatus
from server.backend.backend import PullStatus
from server.backend.pull_handlers import answer_of
from server.wire.codes import ResponseCode
from tiered.errors import CorruptionError
from tiered.formats.record import MAGIC_V1, MAGIC_V2, decode_record

INNER_BATCH_FLAG: Final = 0x80
OFFSET_RESET: Final = "OFFSET_RESET"
"""Remark of a broker that moves a group because an operator said so (5.x, useServerSideResetOffset)."""
_HEAD = struct.Struct(">iI12xqqi")
PULL_CODES: Final = frozenset({
    ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
})  # fmt: skip
"""Answers that say where to go on; all others are errors to a client and move nothing."""


@dataclass(frozen=True)
class Said:
    """A broker's answer to a pull. ``offset_delta``: what clients add to the offsets in ``body`` (static topics)."""

    code: int
    remark: str
    next_offset: int
    min_offset: int
    max_offset: int
    body: memoryview
    offset_delta: int = 0


@dataclass(frozen=True)
class Judged:
    """What it means. FOUND with a body cut short ends at the first message that the broker no longer had."""

    status: GetStatus
    next_offset: int
    body: memoryview


def judged(said: Said, offset: int, *, has_all: bool) -> Judged:
    """What a broker's answer to a pull at ``offset`` means. ``has_all``: the pull has no filter and the bodies' offsets
    are the queue's, so that each message must follow the one before it."""
    nothing = said.body[:0]
    if said.code == ResponseCode.SUCCESS:
        if not has_all:
            return Judged(GetStatus.FOUND, said.next_offset, said.body)
        return _without_holes(said, offset)
    if said.code == ResponseCode.PULL_OFFSET_MOVED:
        if said.remark == OFFSET_RESET:
            return Judged(GetStatus.NO_MATCHED_MESSAGE, said.next_offset, nothing)
        if said.next_offset > offset:
            return Judged(GetStatus.OFFSET_TOO_SMALL, said.next_offset, nothing)
        status = GetStatus.OFFSET_OVERFLOW_BADLY if said.max_offset > 0 else GetStatus.NO_MATCHED_LOGIC_QUEUE
        return Judged(status, said.next_offset, nothing)
    moves_on = said.next_offset > offset
    if moves_on and (has_all or said.code == ResponseCode.PULL_NOT_FOUND):
        return Judged(GetStatus.OFFSET_TOO_SMALL, said.next_offset, nothing)
    if said.code == ResponseCode.PULL_NOT_FOUND:
        status = GetStatus.OFFSET_OVERFLOW_ONE if said.max_offset > 0 else GetStatus.NO_MESSAGE_IN_QUEUE
        return Judged(status, said.next_offset, nothing)
    return Judged(GetStatus.NO_MATCHED_MESSAGE, said.next_offset, nothing)


def _without_holes(said: Said, offset: int) -> Judged:
    at, expected = 0, offset - said.offset_delta
    body = said.body
    while at < len(body):
        row = _row_at(body, at)
        if row is None:
            return Judged(
                GetStatus.FOUND, said.next_offset, body
            )  # its client will say what it thinks of that
        size, queue_offset, end_offset = row
        if queue_offset > expected:
            if at == 0:
                return Judged(GetStatus.OFFSET_TOO_SMALL, queue_offset + said.offset_delta, body[:0])
            return Judged(GetStatus.FOUND, expected + said.offset_delta, body[:at])
        expected = end_offset
        at += size
    # Where it lost the last of what it looked at, its next offset is behind that all the same.
    is_short = offset < expected + said.offset_delta < said.next_offset
    return Judged(GetStatus.FOUND, expected + said.offset_delta if is_short else said.next_offset, body)


def _row_at(body: memoryview, at: int) -> tuple[int, int, int] | None:
    """Size in bytes of the record at ``at``, the first queue offset it spans and the one behind; None for no record."""
    if at + _HEAD.size > len(body):
        return None
    size, magic, queue_offset, _, sys_flag = _HEAD.unpack_from(body, at)
    if magic not in (MAGIC_V1, MAGIC_V2) or not _HEAD.size <= size <= len(body) - at:
        return None
    if not sys_flag & INNER_BATCH_FLAG:
        return size, queue_offset, queue_offset + 1
    try:
        count = decode_record(body[at : at + size]).properties.get("INNER_NUM", "1")
    except CorruptionError:
        return None
    return size, queue_offset, queue_offset + (int(count) if count.isdecimal() else 1)


def reply_code(
    status: GetStatus, *, is_pull_api: bool, said: int | None = None, meant: GetStatus | None = None
) -> int | None:
    """The code for ``status`` on the joined line; None: nothing to tell now, hold.

    ``said``: the broker's own code, ``meant``: what it meant. It stands where the archive changed nothing, and messages
    are what they were given for.
    """
    is_passed_on = said != ResponseCode.SUCCESS or meant is GetStatus.FOUND
    if said is not None and status is meant and is_passed_on:
        return said
    if status is GetStatus.OFFSET_FOUND_NULL:
        return None
    return answer_of(PullStatus[status.name], is_pull_api=is_pull_api)


def next_margin(margin: int, step: int) -> int:
    """How many offsets above its minimum a broker may delete before it is asked, after the minimum moved by ``step``.

    A broker deletes whole files, so the next step is about as large as the last one; old ones count less and less.
    """
    return max(step, margin // 2) if step > 0 else margin


def is_leaving(offset: int, queue: OffsetRange, margin: int) -> bool:
    """Whether the record at ``offset`` may go with the next files."""
    return offset in queue and offset < queue.min_offset + margin


def lower_by_time(found: int, archived: OffsetRange, broker_found: int, local: OffsetRange | None) -> int:
    """The first offset stored at a time or later, when the archive says ``found`` and the broker ``broker_found``.

    Where messages between the two are still on their way, the archive's end: they may be it.
    """
    if found < archived.max_offset or local is None or local.min_offset > archived.max_offset:
        return found
    return max(archived.max_offset, broker_found)


def joined_min(archived: OffsetRange | None, local_min: int) -> int:
    """The smaller minimum; an archive without messages does not count. ``local_min`` -1: the broker has no queue."""
    if archived is None or archived.max_offset <= archived.min_offset:
        return local_min
    return archived.min_offset if local_min < 0 else min(archived.min_offset, local_min)
