"""Offsets of a queue over archive and broker, as the proxy's clients see them. Pure.

The read policy (read_policy.py, read_router.py) chooses between archive and broker. This module adds what the wire
needs: the meaning of a broker's reply (``interpret``), the response code (``reply_code``), how far above its minimum
the broker may have deleted since (``next_deletion_margin``), and offsets by time over both sides.

Offsets that neither side has yet get PULL_RETRY_IMMEDIATELY at the same offset. PULL_OFFSET_MOVED is returned only for
offsets that neither side has or will have. A broker that deletes while it reads replies with later messages as if
nothing preceded them (MESSAGE_WAS_REMOVING, OFFSET_FOUND_NULL, a hole between messages): such a reply counts as
OFFSET_TOO_SMALL. Sources: DefaultMessageStore.getMessage, PullMessageProcessor, DefaultPullMessageResultHandler.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from fetcher.policy.read_policy import HeldOffsets
from fetcher.rows.pull import PullResult, PullStatus
from rocketmq_tiered.server.backend.pull_handlers import response_code
from tiered.errors import CorruptionError
from tiered.formats.record import MAGIC_V1, MAGIC_V2, decode_record
from tiered.remoting.command import RemotingCommand, ResponseCode

INNER_BATCH_FLAG: Final = 0x80
OFFSET_RESET: Final = "OFFSET_RESET"
"""Remark of a broker that resets a group's offset on an operator's request (5.x, useServerSideResetOffset)."""
_HEAD = struct.Struct(">iI12xqqi")
PULL_CODES: Final = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)
"""Replies with a next offset; all others are errors to a client and move nothing."""


@dataclass(frozen=True)
class BrokerReply:
    """A broker's reply to a pull. ``offset_delta``: clients add it to the offsets in ``body`` (static topics)."""

    code: int
    remark: str
    next_offset: int
    min_offset: int
    max_offset: int
    body: memoryview
    offset_delta: int = 0

    @classmethod
    def of(cls, command: RemotingCommand) -> BrokerReply | None:
        """Return what ``command`` says as a broker's reply to a pull; None if it is another reply, such as an error."""
        fields = command.ext_fields
        texts = [fields.get(name, "") for name in ("nextBeginOffset", "minOffset", "maxOffset")]
        if command.code not in PULL_CODES or not all(text.lstrip("-").isdecimal() for text in texts):
            return None
        delta = fields.get("offsetDelta", "0")
        offset_delta = int(delta) if delta.lstrip("-").isdecimal() else 0
        next_offset, minimum, maximum = map(int, texts)
        body = memoryview(command.body)
        return cls(command.code, command.remark or "", next_offset, minimum, maximum, body, offset_delta)


def interpret(reply: BrokerReply, offset: int, *, has_all: bool) -> PullResult:
    """The result of a pull at ``offset`` by a broker's reply. FOUND with a body cut short ends at the first message the
    broker no longer had. ``has_all``: the pull has no filter and the bodies' offsets are the queue's, so each message
    must follow the one before it."""
    status, next_offset, body = _status_of(reply, offset, has_all=has_all)
    return PullResult(status, next_offset, reply.min_offset, reply.max_offset, (body,) if len(body) else ())


def _status_of(reply: BrokerReply, offset: int, *, has_all: bool) -> tuple[PullStatus, int, memoryview]:
    """Return what a broker's reply to a pull at ``offset`` means: the status, the next offset, and the records.
    ``has_all``: the reply should have every message from ``offset`` on, so that a jump means messages that the broker
    has deleted."""
    next_offset, nothing = reply.next_offset, reply.body[:0]
    if reply.code == ResponseCode.SUCCESS:
        if not has_all:
            return PullStatus.FOUND, next_offset, reply.body
        return _without_holes(reply, offset)
    if reply.code == ResponseCode.PULL_OFFSET_MOVED:
        if reply.remark == OFFSET_RESET:
            return PullStatus.NO_MATCHED_MESSAGE, next_offset, nothing
        if next_offset > offset:
            return PullStatus.OFFSET_TOO_SMALL, next_offset, nothing
        has_messages = reply.max_offset > 0
        status = PullStatus.OFFSET_OVERFLOW_BADLY if has_messages else PullStatus.NO_MATCHED_LOGIC_QUEUE
        return status, next_offset, nothing
    if next_offset > offset and (has_all or reply.code == ResponseCode.PULL_NOT_FOUND):
        return PullStatus.OFFSET_TOO_SMALL, next_offset, nothing
    if reply.code == ResponseCode.PULL_NOT_FOUND:
        status = PullStatus.OFFSET_OVERFLOW_ONE if reply.max_offset > 0 else PullStatus.NO_MESSAGE_IN_QUEUE
        return status, next_offset, nothing
    return PullStatus.NO_MATCHED_MESSAGE, next_offset, nothing


def _without_holes(reply: BrokerReply, offset: int) -> tuple[PullStatus, int, memoryview]:
    """Return status, next offset and records of a broker's reply, cut off in front of the first message that the broker
    has deleted: its offset is the next one, so that it is read from the archive. If even the message at ``offset`` is
    deleted, the status tells that the broker begins later. ``reply.offset_delta`` is added to the broker's offsets."""
    begin, expected = 0, offset - reply.offset_delta
    body = reply.body
    while begin < len(body):
        record = _record_at(body, begin)
        if record is None:
            return PullStatus.FOUND, reply.next_offset, body  # what is no record is left to the client
        size, queue_offset, end_offset = record
        if queue_offset > expected:
            if begin == 0:
                return PullStatus.OFFSET_TOO_SMALL, queue_offset + reply.offset_delta, body[:0]
            return PullStatus.FOUND, expected + reply.offset_delta, body[:begin]
        expected = end_offset
        begin += size
    # The broker's next offset may lie behind messages that it deleted after the last one it sent.
    has_lost_tail = offset < expected + reply.offset_delta < reply.next_offset
    return PullStatus.FOUND, expected + reply.offset_delta if has_lost_tail else reply.next_offset, body


def _record_at(body: memoryview, begin: int) -> tuple[int, int, int] | None:
    """Return the size in bytes of the record at ``begin``, its first queue offset and the one behind it, as a record
    may be a batch of messages. None: there is no record."""
    if begin + _HEAD.size > len(body):
        return None
    size, magic, queue_offset, _, sys_flag = _HEAD.unpack_from(body, begin)
    if magic not in (MAGIC_V1, MAGIC_V2) or not _HEAD.size <= size <= len(body) - begin:
        return None
    if not sys_flag & INNER_BATCH_FLAG:
        return size, queue_offset, queue_offset + 1
    try:
        count = decode_record(body[begin : begin + size]).properties.get("INNER_NUM", "1")
    except CorruptionError:
        return None
    return size, queue_offset, queue_offset + (int(count) if count.isdecimal() else 1)


def reply_code(
    status: PullStatus,
    *,
    is_pull_api: bool,
    broker_code: int | None = None,
    broker_status: PullStatus | None = None,
) -> int | None:
    """Return the response code for ``status``, what archive and broker together say to a pull; None: hold the request.

    ``broker_code`` and ``broker_status``: what the broker replied; its code is kept if the archive has changed nothing.
    ``is_pull_api``: the client uses the pull API and handles PULL_OFFSET_MOVED.
    """
    is_kept = broker_code != ResponseCode.SUCCESS or broker_status is PullStatus.FOUND
    if broker_code is not None and status is broker_status and is_kept:
        return broker_code
    return response_code(status, is_pull_api=is_pull_api)


def next_deletion_margin(margin: int, step: int) -> int:
    """How many offsets above its minimum a broker may delete before the next check; the minimum moved by ``step``.

    A broker deletes whole files, so the next step is about as large as the last; older ones count less.
    """
    return max(step, margin // 2) if step > 0 else margin


def is_expiring(offset: int, queue: HeldOffsets, margin: int) -> bool:
    """Whether the record at ``offset`` may be deleted with the next files."""
    return offset in queue and offset < queue.min_offset + margin


def lower_by_time(found: int, archived: HeldOffsets, broker_found: int, local: HeldOffsets | None) -> int:
    """The first offset stored at a time or later, by the archive's ``found`` and the broker's ``broker_found``.

    If messages between the two are not archived yet, the archive's end: they may be the first.
    """
    if found < archived.max_offset or local is None or local.min_offset > archived.max_offset:
        return found
    return max(archived.max_offset, broker_found)


def joined_min(archived: HeldOffsets | None, local_min: int) -> int:
    """The smaller minimum; an archive without messages does not count. ``local_min`` -1: the broker has no queue."""
    if archived is None or archived.max_offset <= archived.min_offset:
        return local_min
    return archived.min_offset if local_min < 0 else min(archived.min_offset, local_min)
