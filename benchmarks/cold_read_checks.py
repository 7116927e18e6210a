"""Checks that a read returned the requested records: every queue offset is right, and none is missing.

Compiled, as the peer's checks are: a benchmark must not measure its own checks.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.message import MessageBatch
from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import load_be32, load_be64

QUEUE_OFFSET_AT = 20
"""Where a record holds its queue offset, 8 bytes, big-endian; its own size, 4 bytes, is where it begins."""
_HEAD_BYTES = 28


class WrongAnswerError(RuntimeError):
    """The archive returned wrong records."""


def check_offsets(batch: MessageBatch, expected: int) -> None:
    """All of ``batch``, whose first offset is ``expected``."""
    offsets, count = batch.queue_offsets, len(batch)
    if count and (offsets[0] != expected or offsets[-1] != expected + count - 1):
        raise WrongAnswerError(f"from {expected} on came {offsets[:5]}…")
    cuts = [0, count]
    if len(batch.pieces) > 1:
        cuts = np.searchsorted(batch.piece, np.arange(len(batch.pieces) + 1)).tolist()
    for piece, (first, end) in zip(batch.pieces, pairwise(cuts), strict=True):
        at_byte = np.ndarray((len(piece) - 7,), ">i8", piece, strides=(1,))
        said = at_byte[batch.starts[first:end] + QUEUE_OFFSET_AT]
        if not np.array_equal(said, offsets[first:end]):
            raise WrongAnswerError(f"from {expected} on came {said[:5]}…")


def check_body(body: Sequence[memoryview], records: int, expected: int) -> None:
    """As ``check_offsets``, for ``records`` records back to back."""
    offset = expected
    for part in body:
        found = int(consecutive(np.frombuffer(part, np.uint8), offset))
        if found < 0:
            raise WrongAnswerError(f"from {expected} on came something else at {offset - found - 1}")
        offset += found
    if offset != expected + records:
        raise WrongAnswerError(f"from {expected} on came {offset - expected} records, not {records}")


@kernel
def consecutive(part: NDArray[np.uint8], expected: Int) -> Int:
    """How many whole records ``part`` is, with offsets from ``expected`` on; -1 - n when the n-th is not as it should
    be."""
    address, end = part.ctypes.data, np.int64(len(part))
    at, records = np.int64(0), np.int64(0)
    while at < end:
        if at + _HEAD_BYTES > end:
            return -1 - records
        size = load_be32(address, at)
        if size < _HEAD_BYTES or load_be64(address, at + QUEUE_OFFSET_AT) != expected + records:
            return -1 - records
        at += size
        records += 1
    return records if at == end else -1 - records
