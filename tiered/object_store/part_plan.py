"""Plans the parts of a composed object: which ranges the store copies, and which bytes are sent.

A part of a multipart upload has at least 5 MiB unless it is the last one. Smaller ranges are read and joined with their
neighbours; a range behind a small part gives it the bytes it lacks and is copied from there on.
"""

from collections.abc import Sequence

from tiered.object_store.body import buffer_bytes
from tiered.object_store.interface import FileRange, ObjectRange, Piece

MIB = 1024 * 1024
PART_BYTES_MIN = 5 * MIB
COPY_BYTES_MAX = 256 * MIB
"""Limit of one copied part: larger copies take so long that servers and proxies end them."""

Part = list[Piece]
"""One part. A single range of at least PART_BYTES_MIN is copied, all others are read and sent."""


def piece_bytes(piece: Piece) -> int:
    """Length of one piece."""
    return piece.length if isinstance(piece, ObjectRange | FileRange) else buffer_bytes(piece)


def sent_bytes(pieces: Sequence[Piece]) -> int:
    """Bytes that are sent to the store rather than copied inside it, roughly."""
    return sum(piece_bytes(piece) for piece in pieces if not _is_large(piece))


def copied_range(part: Part) -> ObjectRange | None:
    """The range that the store copies as ``part``; None when its bytes are sent."""
    only = part[0]
    return only if len(part) == 1 and isinstance(only, ObjectRange) and _is_large(only) else None


def plan_parts(pieces: Sequence[Piece], part_bytes: int) -> list[Part]:
    """The parts of a multipart upload that makes an object of ``pieces``, in order. A part is a large range that the
    store copies, or pieces whose bytes are sent, of at most ``part_bytes`` + PART_BYTES_MIN."""
    planned: list[Part] = []
    pending: Part = []
    pending_bytes = 0

    def flush() -> None:
        nonlocal pending, pending_bytes
        if pending:
            planned.append(pending)
        pending, pending_bytes = [], 0

    for whole in joined_pieces(pieces):
        rest = whole
        while (left := piece_bytes(rest)) > 0:
            if pending_bytes >= part_bytes or (_is_large(rest) and pending_bytes >= PART_BYTES_MIN):
                flush()
            if isinstance(rest, ObjectRange):
                # The bytes that make the pending part large enough to be one are sent, the rest is copied.
                lacking = max(0, PART_BYTES_MIN - pending_bytes) if pending else 0
                if left - lacking >= PART_BYTES_MIN:
                    head, rest = _split(rest, lacking)
                    if lacking:
                        pending.append(head)
                    flush()
                    planned += [[part] for part in _copies(rest)]
                    break
            head, rest = _split(rest, min(left, part_bytes - pending_bytes))
            pending.append(head)
            pending_bytes += piece_bytes(head)
    flush()
    return planned


def joined_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """``pieces`` without empty ones, and with ranges of the same object or file that follow each other as one range."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if (
            isinstance(piece, ObjectRange | FileRange)
            and isinstance(last, ObjectRange | FileRange)
            and type(last) is type(piece)
            and last[0] == piece[0]
            and last.offset + last.length == piece.offset
        ):
            found[-1] = last._replace(length=last.length + piece.length)
        elif piece_bytes(piece):
            found.append(piece)
    return found


def _is_large(piece: Piece) -> bool:
    return isinstance(piece, ObjectRange) and piece.length >= PART_BYTES_MIN


def _split(piece: Piece, length: int) -> tuple[Piece, Piece]:
    """The first ``length`` bytes of a piece, and the rest of it, without copying bytes."""
    if isinstance(piece, ObjectRange | FileRange):
        behind = piece._replace(offset=piece.offset + length, length=piece.length - length)
        return piece._replace(length=length), behind
    view = memoryview(piece).cast("B")
    return view[:length], view[length:]


def _copies(piece: Piece) -> list[Piece]:
    """Divide a range into as few parts of at most COPY_BYTES_MAX as possible, of about the same size."""
    count = -(-piece_bytes(piece) // COPY_BYTES_MAX)
    parts = []
    for left in range(count, 0, -1):
        head, piece = _split(piece, -(-piece_bytes(piece) // left))
        parts.append(head)
    return parts
