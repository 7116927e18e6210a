"""Column pages of a segment: consume-queue rows as differences in variable-length integers.

A page holds seven streams, one behind the other, after their lengths (u32 each):

    0 size                 zigzag of the difference to the row before
    1 tags code            zigzag of the value
    2 store timestamp      zigzag of the difference to the row before
    3 physical offset      zigzag of the difference to the end of the record before
    4 inner count          BATCH and SPARSE runs only: the value; of SPARSE runs, 1 and the hole before the row
    5 parent               LMQ runs only: the value
    6 parent queue offset  LMQ runs only: zigzag of the difference to the row before

Every run and every page starts from size and parent queue offset 0, the run's minimum timestamp and its first physical
offset. Integers are 7 bits a byte, lowest first, at most ten bytes; sums wrap at 64 bits. The queue offset is not
stored: it is the sum of what the rows before span.

``encode_page`` and ``decode_page`` of ``tiered.kernels.columns`` write and read them. Those here do so without compiled
kernels, at six times the cost: for processes that handle few pages, or have no memory for numba, which takes 100 MiB.
``tiered.formats.page_decoder`` chooses for readers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.columns import LENGTHS_BYTES, STREAMS, VARINT_BYTES_MAX

_BATCH, _LMQ, _SPARSE = 1, 2, 3  # RunKind
_I32_MAX = 0x7FFFFFFF
_WORD_BYTES = 8
_FIRST = np.zeros(1, np.int64)
_ONE, _TWO, _FOUR = np.uint64(1), np.uint64(2), np.uint64(4)
_LENGTH_MASKS = np.array([0, *((1 << 8 * length) - 1 for length in range(1, 9)), 0, 0], np.uint64)
"""By length, a mask of the integer's own bytes among the eight read; longer integers are decoded apart."""
_LOW = np.uint64(0x7F)
_EVEN_1, _ODD_1 = np.uint64(0x007F007F007F007F), np.uint64(0x7F007F007F007F00)
_EVEN_2, _ODD_2 = np.uint64(0x00003FFF00003FFF), np.uint64(0x3FFF00003FFF0000)
_EVEN_4, _ODD_4 = np.uint64(0x000000000FFFFFFF), np.uint64(0x0FFFFFFF00000000)


def encode_page(
    first_row: NDArray[np.int64],
    kind: NDArray[np.int32],
    min_store_timestamp: NDArray[np.int64],
    min_phys: NDArray[np.int64],
    *columns: NDArray[Any],
) -> bytes:
    """The bytes of a page with all rows of ``columns``, the consume-queue columns of several runs of rows: run i has
    rows [first_row[i], first_row[i + 1]), at least one. The other arguments have a value for each run. Each column
    becomes a stream of small integers: where values rise with the rows, these are differences to the row before."""
    size, tags_code, store_timestamp, phys, inner_num, parent, parent_offset = columns
    begins, rows_of_run = first_row[:-1], np.diff(first_row)
    sizes = size.astype(np.int64)
    size_steps = _steps(sizes, sizes, begins, 0)
    time_steps = _steps(store_timestamp, store_timestamp, begins, min_store_timestamp)
    phys_steps = _steps(phys, phys + sizes, begins, min_phys)
    signed = [_zigzag(steps) for steps in (size_steps, tags_code, time_steps, phys_steps)]
    # Only rows of batches and of sparse runs stand for more than one offset each.
    counted_rows = np.flatnonzero(np.repeat((kind == _BATCH) | (kind == _SPARSE), rows_of_run))
    lmq_rows = np.flatnonzero(np.repeat(kind == _LMQ, rows_of_run))
    lmq_begins = np.searchsorted(lmq_rows, begins[kind == _LMQ])
    offsets = parent_offset[lmq_rows]
    streams = [
        *map(_stream, signed),
        _stream(inner_num[counted_rows].astype(np.uint64)),
        _stream(parent[lmq_rows].astype(np.uint64)),
        _stream(_zigzag(_steps(offsets, offsets, lmq_begins, 0))),
    ]
    return b"".join([np.array([len(stream) for stream in streams], "<u4").tobytes(), *streams])


def decode_page(
    data: NDArray[np.uint8],
    first: int,
    end: int,
    run: int,
    first_row: NDArray[np.int64],
    kind: NDArray[np.int32],
    min_store_timestamp: NDArray[np.int64],
    min_phys: NDArray[np.int64],
    *columns: NDArray[Any],
) -> bool:
    """Fill ``columns`` with the rows of a page, ``data``, which are rows [first, end) of the object; the first of them
    is in the run number ``run``. ``first_row`` tells where each run of the object begins; the next arguments have a
    value for each run. Returns False if the page is malformed.

    Rows that do not refer to another queue's record (a parent) get -1 there.
    """
    size, tags_code, store_timestamp, phys, inner_num, parent, parent_offset = columns
    last_run = int(np.searchsorted(first_row, end, side="left"))
    bounds = np.clip(first_row[run : last_run + 1], first, end) - first
    rows_of_run = np.diff(bounds)
    kinds = np.repeat(kind[run:last_run], rows_of_run)
    is_batch, is_lmq = (kinds == _BATCH) | (kinds == _SPARSE), kinds == _LMQ
    batches, lmqs = int(is_batch.sum()), int(is_lmq.sum())
    streams = _streams(data, (*(end - first,) * 4, batches, lmqs, lmqs))
    if streams is None:
        return False
    sizes = _sums(_signed(streams[0]), bounds)
    counts, parents = streams[4], streams[5]
    bad_size = (sizes < 1) | (sizes > _I32_MAX)
    if bool(bad_size.any() or ((counts < _ONE) | (counts > _I32_MAX)).any() or (parents > _I32_MAX).any()):
        return False
    size[:], tags_code[:] = sizes, _signed(streams[1])
    store_timestamp[:] = np.repeat(min_store_timestamp[run:last_run], rows_of_run)
    store_timestamp += _sums(_signed(streams[2]), bounds)
    phys[:] = np.repeat(min_phys[run:last_run], rows_of_run) - sizes
    phys += _sums(_signed(streams[3]) + sizes, bounds)
    inner_num[:], parent[:], parent_offset[:] = 1, -1, -1
    inner_num[is_batch], parent[is_lmq] = counts, parents
    if lmqs:
        lmq_bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_lmq)])[bounds]
        # Not np.unique: its first call imports masked arrays, which takes 30 ms.
        is_first = np.concatenate([np.ones(1, np.bool_), lmq_bounds[1:] > lmq_bounds[:-1]])
        parent_offset[is_lmq] = _sums(_signed(streams[6]), lmq_bounds[is_first])
    return True


def _steps(
    values: NDArray[Any], ends: NDArray[Any], begins: NDArray[Any], at_begins: NDArray[Any] | int
) -> NDArray[np.int64]:
    """The differences of ``values`` to the ``ends`` of the rows before them; for rows at ``begins``, to ``at_begins``.
    They wrap around at 64 bits."""
    before = np.empty(len(values), np.int64)
    before[1:] = ends[:-1]
    before[begins] = at_begins
    steps: NDArray[np.int64] = values - before
    return steps


def _zigzag(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    encoded: NDArray[np.uint64] = ((values << 1) ^ (values >> 63)).view(np.uint64)
    return encoded


def _stream(words: NDArray[np.uint64]) -> bytes:
    """``words`` as varints: each integer in groups of 7 bits, one a byte, the lowest first; the highest bit of a byte
    says that more follow."""
    longest = max(1, -(-int(words.max(initial=0)).bit_length() // 7))
    if longest == 1:
        return words.astype(np.uint8).tobytes()
    is_more = np.zeros((len(words), longest), np.bool_)
    for place in range(longest - 1):
        np.greater_equal(words, _ONE << np.uint64(7 * (place + 1)), out=is_more[:, place])
    is_used = np.ones(is_more.shape, np.bool_)  # a byte is used if the one before says that more follow
    is_used[:, 1:] = is_more[:, :-1]
    if longest > _WORD_BYTES:
        groups = (words[:, None] >> (np.arange(longest, dtype=np.uint64) * np.uint64(7)) & _LOW).astype(
            np.uint8
        )
    else:
        # Move the groups of 7 bits apart to one a byte: fours from fours, then pairs from pairs, then single ones.
        if longest > _WORD_BYTES // 2:
            words = ((words << _FOUR) & _ODD_4) | (words & _EVEN_4)
        words = ((words << _TWO) & _ODD_2) | (words & _EVEN_2)
        words = ((words << _ONE) & _ODD_1) | (words & _EVEN_1)
        groups = words.astype("<u8").view(np.uint8).reshape(-1, _WORD_BYTES)[:, :longest]
    return (groups | (is_more.view(np.uint8) << 7))[is_used].tobytes()


def _streams(data: NDArray[np.uint8], counts: tuple[int, ...]) -> list[NDArray[np.uint64]] | None:
    """The integers of each stream of the page ``data``, which begins with their lengths; None unless the streams fill
    it and have exactly ``counts`` integers."""
    if len(data) < LENGTHS_BYTES:
        return None
    lengths = data[:LENGTHS_BYTES].view("<u4").astype(np.int64)
    ends = LENGTHS_BYTES + np.cumsum(lengths)
    if int(ends[STREAMS - 1]) != len(data):
        return None
    streams = []
    for length, end, count in zip(lengths.tolist(), ends.tolist(), counts, strict=True):
        values = _integers(data[end - length : end], count)
        if values is None:
            return None
        streams.append(values)
    return streams


def _integers(stream: NDArray[np.uint8], count: int) -> NDArray[np.uint64] | None:
    """The ``count`` varints (7 bits in each byte, the lowest first) that fill ``stream``; None if it has another number
    of them, or one is too long."""
    last = np.flatnonzero(stream < 0x80)
    if len(last) != count or (int(last[-1]) + 1 if count else 0) != len(stream):
        return None
    if len(stream) == count:
        return stream.astype(np.uint64)
    first = np.concatenate([_FIRST, last[:-1] + 1])
    length = last - first + 1
    longest = int(length.max())
    if longest > VARINT_BYTES_MAX:
        return None
    padded = np.concatenate([stream, np.zeros(_WORD_BYTES, np.uint8)])
    words: NDArray[np.uint64] = np.ndarray((len(stream),), "<u8", padded, strides=(1,)).take(first)
    words &= _LENGTH_MASKS[length]
    # Move the groups of 7 bits, one a byte, together: single ones to pairs, pairs to fours, fours to eights.
    words = ((words & _ODD_1) >> _ONE) | (words & _EVEN_1)
    words = ((words & _ODD_2) >> _TWO) | (words & _EVEN_2)
    if longest > _WORD_BYTES // 2:
        words = ((words & _ODD_4) >> _FOUR) | (words & _EVEN_4)
    if longest > _WORD_BYTES:
        # Integers of nine or ten bytes do not fit in a word, and are 0 so far: add their groups one by one.
        long = np.flatnonzero(length > _WORD_BYTES)
        for place in range(longest):
            reaching = long[length[long] > place]
            words[reaching] |= (stream[first[reaching] + place] & _LOW).astype(np.uint64) << np.uint64(
                7 * place
            )
    return words


def _signed(zigzag: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (zigzag >> _ONE).view(np.int64) ^ -(zigzag & _ONE).view(np.int64)


def _sums(values: NDArray[np.int64], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Running sums of ``values`` that restart at each of ``bounds``. They wrap around at 64 bits."""
    sums: NDArray[np.int64] = np.cumsum(values)
    if len(bounds) > 2:
        before = np.concatenate([_FIRST, sums])[bounds[:-1]]
        sums -= np.repeat(before, np.diff(bounds))
    return sums
