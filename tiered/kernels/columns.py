"""Writes and reads column pages of a segment, which ``tiered.formats.column_pages`` describes, and byte planes.

Oracle: ``tests.kernels.segment_oracle``.
"""

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import (
    get_i32,
    get_i64,
    load_le32,
    load_u8,
    put_i32,
    put_i64,
    put_u8,
    put_u16,
)

STREAMS = 7
LENGTHS_BYTES = 4 * STREAMS
VARINT_BYTES_MAX = 10
_BATCH, _LMQ, _SPARSE = 1, 2, 3  # RunKind
_I32_MAX = 0x7FFFFFFF
_COUNT_MAX = np.uint64(_I32_MAX)
_ONE, _SEVEN = np.uint64(1), np.uint64(7)
_LOW, _MORE = np.uint64(0x7F), np.uint64(0x80)
_LAST_SHIFT = 63
_PLANES = 8


@kernel
def _put(out: NDArray[np.uint8], position: Int, value: Int) -> Int:
    """Write a number to ``out`` at ``position``, seven bits a byte, the lowest first, all bytes but the last with the
    top bit. Returns the position after it."""
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
    """Encode the columns of rows ``first`` to ``end``, the first of which is in ``run``, as one page in ``out``: a
    stream for each column, most values as their difference to the row before. Returns the length of the page.

    ``streams`` is memory for the work, of 70 bytes a row; ``out`` needs 28 bytes more.
    """
    stride = (end - first) * VARINT_BYTES_MAX
    at = np.empty(STREAMS, np.int64)  # where each stream ends
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
            if kind[run] == _BATCH or kind[run] == _SPARSE:
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
def _take_all(address: Int, position: Int, end: Int, words: NDArray[np.uint64]) -> Int:
    """Decode the numbers of one stream, from ``position`` to ``end``, into ``words``. Returns whether the stream has
    exactly so many."""
    for i in range(len(words)):
        word, shift = np.uint64(0), np.uint64(0)
        while True:
            if position >= end or shift > _LAST_SHIFT:
                return False
            byte = np.uint64(load_u8(address, position))
            position += 1
            word |= (byte & _LOW) << shift
            if byte < _MORE:
                break
            shift += _SEVEN
        words[i] = word
    return position == end


@kernel
def _unzigzag(word: Int) -> Int:
    return np.int64(word >> _ONE) ^ -np.int64(word & _ONE)


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
    """Decode the page ``data``, which has the columns of rows ``first`` to ``end``, the first of which is in ``run``,
    into the arrays ``size`` to ``parent_queue_offset``. Returns False if the page is damaged: other lengths, or values
    that no row has. Never reads outside ``data``. The reverse of ``encode_page``."""
    if len(data) < LENGTHS_BYTES:
        return False
    # Numbers in each stream: three of the columns exist only for some kinds of runs.
    counts = np.array([end - first] * 4 + [0] * 3)
    row, last_run = first, run
    while row < end:
        last = min(end, first_row[last_run + 1])
        if kind[last_run] == _BATCH or kind[last_run] == _SPARSE:
            counts[4] += last - row
        elif kind[last_run] == _LMQ:
            counts[5] += last - row
            counts[6] += last - row
        row = last
        last_run += 1
    words = np.empty((STREAMS, end - first), np.uint64)
    # By address: numba would count references to the array for each byte.
    address, position = data.ctypes.data, np.int64(LENGTHS_BYTES)
    for stream in range(STREAMS):
        length = np.int64(0)
        for byte in range(4):
            length |= np.int64(data[stream * 4 + byte]) << (8 * byte)
        if length > len(data) - position:
            return False
        if not _take_all(address, position, position + length, words[stream, : counts[stream]]):
            return False
        position += length
    if position != len(data):
        return False
    row, batches, lmqs = first, 0, 0
    while row < end:
        last = min(end, first_row[run + 1])
        size_before = np.int64(0)
        time_before = min_store_timestamp[run]
        phys_before = min_phys[run]
        parent_before = np.int64(0)
        for i in range(row - first, last - first):
            size_before += _unzigzag(words[0, i])
            time_before += _unzigzag(words[2, i])
            phys_before += _unzigzag(words[3, i])
            if size_before < 1 or size_before > _I32_MAX:
                return False
            size[i], tags_code[i] = size_before, _unzigzag(words[1, i])
            store_timestamp[i], phys[i] = time_before, phys_before
            phys_before += size_before
            inner_num[i], parent[i], parent_queue_offset[i] = 1, -1, -1
            if kind[run] == _BATCH or kind[run] == _SPARSE:
                if words[4, batches] - _ONE >= _COUNT_MAX:
                    return False
                inner_num[i] = words[4, batches]
                batches += 1
            elif kind[run] == _LMQ:
                if words[5, lmqs] > _COUNT_MAX:
                    return False
                parent[i] = words[5, lmqs]
                parent_before += _unzigzag(words[6, lmqs])
                parent_queue_offset[i] = parent_before
                lmqs += 1
        row = last
        run += 1
    return True


@kernel
def encode_planes(table: Int, rows: Int, row_bytes: Int, columns: NDArray[np.int64], planes: Int) -> None:
    """Encode ``rows`` rows at the address ``table``, each ``row_bytes`` after the one before, as byte planes of the
    differences between rows at the address ``planes``. ``columns``: of each its offset in a row, its bytes, 4 or 8, and
    whether it is signed."""
    stride = rows * len(columns)
    for column in range(len(columns)):
        before, source = np.int64(0), table + columns[column, 0]
        is_wide, is_signed = columns[column, 1] == 8, columns[column, 2]
        for at in range(column * rows, (column + 1) * rows):
            if is_wide:
                value = get_i64(source, 0)
            elif is_signed:
                value = get_i32(source, 0)
            else:
                value = np.int64(load_le32(source, 0))
            word = _zigzag(value - before)
            for plane in range(_PLANES):
                put_u8(planes, plane * stride + at, np.int64(word >> np.uint64(8 * plane)))
            before = value
            source += row_bytes


@kernel
def decode_planes(planes: Int, columns: NDArray[np.int64], rows: Int, row_bytes: Int, table: Int) -> None:
    """Decode the byte planes at the address ``planes`` into ``rows`` rows of ``row_bytes`` at the address ``table``:
    the reverse of ``encode_planes``, for columns of 1, 2, 4 or 8 bytes."""
    stride = rows * len(columns)
    for column in range(len(columns)):
        value, target, width = np.int64(0), table + columns[column, 0], columns[column, 1]
        for at in range(column * rows, (column + 1) * rows):
            word = np.uint64(0)
            for plane in range(_PLANES):
                word |= np.uint64(load_u8(planes, plane * stride + at)) << np.uint64(8 * plane)
            value += _unzigzag(word)
            if width == 8:
                put_i64(target, 0, value)
            elif width == 4:
                put_i32(target, 0, value)
            elif width == 2:
                put_u16(target, 0, value)
            else:
                put_u8(target, 0, value)
            target += row_bytes
