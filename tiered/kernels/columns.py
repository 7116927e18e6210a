"""Column pages of a segment: consume-queue rows as differences in variable-length integers, and back.

A page holds seven streams, one behind the other, after their lengths (u32 each):

    0 size                 zigzag of the difference to the row before
    1 tags code            zigzag of the value
    2 store timestamp      zigzag of the difference to the row before
    3 physical offset      zigzag of the difference to the end of the record before
    4 inner count          BATCH runs only: the value
    5 parent               LMQ runs only: the value
    6 parent queue offset  LMQ runs only: zigzag of the difference to the row before

"Before" starts anew with every run and every page: size and parent queue offset at 0, the timestamp at the
run's minimum, the physical offset at the run's first. Integers are 7 bits a byte, lowest first, at most ten
bytes; sums wrap at 64 bits. The queue offset is not stored: rows of a run are contiguous.

Owns the coding. Oracles: ``tiered.kernels.segment_oracle``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import load_le64, load_u8, trailing_zeros

STREAMS = 7
LENGTHS_BYTES = 4 * STREAMS
VARINT_BYTES_MAX = 10
_BATCH = 1  # RunKind.BATCH
_LMQ = 2  # RunKind.LMQ
_ZERO, _ONE, _SEVEN = np.uint64(0), np.uint64(1), np.uint64(7)
_LOW, _MORE = np.uint64(0x7F), np.uint64(0x80)
_LAST_SHIFT = 63
_WORD_BYTES = 8
_TWO, _FOUR, _ONES = np.uint64(2), np.uint64(4), np.uint64(0xFFFFFFFFFFFFFFFF)
_STOPS = np.uint64(0x8080808080808080)
_EVEN_1, _ODD_1 = np.uint64(0x007F007F007F007F), np.uint64(0x7F007F007F007F00)
_EVEN_2, _ODD_2 = np.uint64(0x00003FFF00003FFF), np.uint64(0x3FFF00003FFF0000)
_EVEN_4, _ODD_4 = np.uint64(0x000000000FFFFFFF), np.uint64(0x0FFFFFFF00000000)


@kernel
def _put(out: NDArray[np.uint8], position: Int, value: Int) -> Int:
    word = np.uint64(value)
    while word >= _MORE:
        out[position] = np.uint8((word & _LOW) | _MORE)
        position += 1
        word >>= _SEVEN
    out[position] = np.uint8(word)
    return position + 1


@kernel
def _zigzag(value: Int) -> Int:
    return np.uint64((value << 1) ^ (value >> _LAST_SHIFT))


@kernel
def encode_page(
    first: Int,
    end: Int,
    run: Int,
    first_row: NDArray[np.int64],
    kind: NDArray[np.int32],
    min_store_timestamp: NDArray[np.int64],
    min_phys: NDArray[np.int64],
    size: NDArray[np.int32],
    tags_code: NDArray[np.int64],
    store_timestamp: NDArray[np.int64],
    phys: NDArray[np.int64],
    inner_num: NDArray[np.int32],
    parent: NDArray[np.int32],
    parent_queue_offset: NDArray[np.int64],
    streams: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> Int:
    """Write rows [first, end), the first of them in ``run``, to ``out``; returns the length.

    ``streams`` is scratch of 70 bytes a row, ``out`` needs 28 bytes more.
    """
    stride = (end - first) * VARINT_BYTES_MAX
    at = np.empty(STREAMS, np.int64)
    for stream in range(STREAMS):
        at[stream] = stream * stride
    row = first
    while row < end:
        last = min(end, first_row[run + 1])
        size_before = np.int64(0)
        time_before = min_store_timestamp[run]
        phys_before = min_phys[run]
        parent_before = np.int64(0)
        for i in range(row, last):
            at[0] = _put(streams, at[0], _zigzag(size[i] - size_before))
            at[1] = _put(streams, at[1], _zigzag(tags_code[i]))
            at[2] = _put(streams, at[2], _zigzag(store_timestamp[i] - time_before))
            at[3] = _put(streams, at[3], _zigzag(phys[i] - phys_before))
            size_before, time_before, phys_before = np.int64(size[i]), store_timestamp[i], phys[i] + size[i]
            if kind[run] == _BATCH:
                at[4] = _put(streams, at[4], np.int64(inner_num[i]))
            elif kind[run] == _LMQ:
                at[5] = _put(streams, at[5], np.int64(parent[i]))
                at[6] = _put(streams, at[6], _zigzag(parent_queue_offset[i] - parent_before))
                parent_before = parent_queue_offset[i]
        row = last
        run += 1
    position = np.int64(LENGTHS_BYTES)
    for stream in range(STREAMS):
        length = at[stream] - stream * stride
        for byte in range(4):
            out[stream * 4 + byte] = np.uint8((length >> (8 * byte)) & 0xFF)
        out[position : position + length] = streams[stream * stride : stream * stride + length]
        position += length
    return position


@kernel
def _take_by_bytes(address: Int, position: Int, end: Int) -> tuple[Int, Int]:
    """As ``_take``, of any length."""
    word, shift = np.uint64(0), np.uint64(0)
    for _ in range(VARINT_BYTES_MAX):
        if position >= end:
            break
        byte = np.uint64(load_u8(address, position))
        position += 1
        word |= (byte & _LOW) << shift
        if byte < _MORE:
            return word, position
        shift += _SEVEN
    return np.uint64(0), end + 1


@kernel
def _take(address: Int, position: Int, end: Int) -> tuple[Int, Int]:
    """The next integer of a stream as uint64, and where it ends: beyond ``end`` if it does not end before."""
    if position + _WORD_BYTES <= end:
        word = load_le64(address, position)
        last = ~word & _STOPS
        if last != _ZERO:
            # All bytes at once: those behind the first without a stop are cut off, the others moved together by twos.
            bits = trailing_zeros(last)
            word &= _ONES >> np.uint64(63 - bits)
            word = ((word & _ODD_1) >> _ONE) | (word & _EVEN_1)
            word = ((word & _ODD_2) >> _TWO) | (word & _EVEN_2)
            word = ((word & _ODD_4) >> _FOUR) | (word & _EVEN_4)
            return word, position + ((bits + 1) >> 3)
    return _take_by_bytes(address, position, end)


@kernel
def _unzigzag(word: Int) -> Int:
    return np.int64(word >> _ONE) ^ -np.int64(word & _ONE)


@kernel
def _take_sizes(address: Int, position: Int, end: Int, size: NDArray[np.int32]) -> Int:
    """Differences of sizes, all above 0. Returns where they end; beyond ``end`` when they are not well-formed."""
    before = np.int64(0)
    for i in range(len(size)):
        word, position = _take(address, position, end)
        before += _unzigzag(word)
        if before <= 0 or before > 0x7FFFFFFF:
            return end + 1
        size[i] = before
    return position


@kernel
def _take_words(address: Int, position: Int, end: Int, values: NDArray[np.int64]) -> Int:
    """Signed integers. Returns as ``_take_sizes``."""
    for i in range(len(values)):
        word, position = _take(address, position, end)
        values[i] = _unzigzag(word)
    return position


@kernel
def _take_times(address: Int, position: Int, end: Int, before: Int, values: NDArray[np.int64]) -> Int:
    """Differences to the value before, the first one to ``before``. Returns as ``_take_sizes``."""
    for i in range(len(values)):
        word, position = _take(address, position, end)
        before += _unzigzag(word)
        values[i] = before
    return position


@kernel
def _take_places(
    address: Int,
    position: Int,
    end: Int,
    expected: Int,
    size: NDArray[np.int32],
    phys: NDArray[np.int64],
) -> Int:
    """Differences to the end of the record before. Returns as ``_take_sizes``."""
    for i in range(len(phys)):
        word, position = _take(address, position, end)
        phys[i] = expected + _unzigzag(word)
        expected = phys[i] + size[i]
    return position


@kernel
def _take_counts(address: Int, position: Int, end: Int, least: Int, values: NDArray[np.int32]) -> Int:
    """Unsigned integers of ``least`` or more. Returns as ``_take_sizes``."""
    for i in range(len(values)):
        word, position = _take(address, position, end)
        if word < least or word > np.uint64(0x7FFFFFFF):
            return end + 1
        values[i] = np.int32(word)
    return position


@kernel
def decode_page(
    data: NDArray[np.uint8],
    first: Int,
    end: Int,
    run: Int,
    first_row: NDArray[np.int64],
    kind: NDArray[np.int32],
    min_store_timestamp: NDArray[np.int64],
    min_phys: NDArray[np.int64],
    size: NDArray[np.int32],
    tags_code: NDArray[np.int64],
    store_timestamp: NDArray[np.int64],
    phys: NDArray[np.int64],
    inner_num: NDArray[np.int32],
    parent: NDArray[np.int32],
    parent_queue_offset: NDArray[np.int64],
) -> bool:
    """Read the page of rows [first, end) into columns of that many rows; False when it is not well-formed.

    Never reads outside ``data``. Rows without a parent get -1 there.
    """
    ends = np.empty(STREAMS, np.int64)
    at = np.empty(STREAMS, np.int64)
    if len(data) < LENGTHS_BYTES:
        return False
    position = np.int64(LENGTHS_BYTES)
    for stream in range(STREAMS):
        length = np.int64(0)
        for byte in range(4):
            length |= np.int64(data[stream * 4 + byte]) << (8 * byte)
        at[stream] = position
        position += length
        ends[stream] = position
    if position != len(data):
        return False
    # By address: numba would count references to the array for each integer, which costs three times the integer.
    address = data.ctypes.data
    # One stream after another: each then has its place in a register, which is three times as fast as row by row.
    row = first
    while row < end:
        last = min(end, first_row[run + 1])
        begin, stop = row - first, last - first
        at[0] = _take_sizes(address, at[0], ends[0], size[begin:stop])
        if at[0] > ends[0]:
            return False
        at[1] = _take_words(address, at[1], ends[1], tags_code[begin:stop])
        at[2] = _take_times(address, at[2], ends[2], min_store_timestamp[run], store_timestamp[begin:stop])
        at[3] = _take_places(address, at[3], ends[3], min_phys[run], size[begin:stop], phys[begin:stop])
        inner_num[begin:stop], parent[begin:stop], parent_queue_offset[begin:stop] = 1, -1, -1
        if kind[run] == _BATCH:
            at[4] = _take_counts(address, at[4], ends[4], _ONE, inner_num[begin:stop])
        elif kind[run] == _LMQ:
            at[5] = _take_counts(address, at[5], ends[5], _ZERO, parent[begin:stop])
            at[6] = _take_times(address, at[6], ends[6], np.int64(0), parent_queue_offset[begin:stop])
        for stream in range(1, STREAMS):
            if at[stream] > ends[stream]:
                return False
        row = last
        run += 1
    left = 0
    for stream in range(STREAMS):
        left += at[stream] != ends[stream]
    return left == 0
