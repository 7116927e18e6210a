"""Kernels of segments being written: check rows against runs, cut blocks, gather records.

Oracles: ``tests.kernels.segment_oracle``.
"""

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import copy_bytes

_BATCH, _LMQ = 1, 2  # RunKind


@kernel
def check_rows(
    first_row: NDArray[np.int64],
    kind: NDArray[np.int32],
    base_queue_offset: NDArray[np.int64],
    end_queue_offset: NDArray[np.int64],
    byte_count: NDArray[np.int64],
    queues: Int,
    position: NDArray[np.int64],
    size: NDArray[np.int32],
    queue_offset: NDArray[np.int64],
    inner_num: NDArray[np.int32],
    parent: NDArray[np.int32],
) -> Int:
    """Check rows that are about to be written against their runs (rows of one queue with contiguous offsets; those of
    run i begin at ``first_row[i]``). Returns the first row that contradicts its run, one past the run's end if all of
    it together does, or -1 if none does.

    Offsets must be contiguous from base to end, and sizes add up to the run's bytes. Only rows of a BatchCQ span
    several offsets; only rows of an LMQ have no position, but a parent queue below ``queues``.
    """
    for run in range(len(kind)):
        expected = base_queue_offset[run]
        total = np.int64(0)
        is_lmq = kind[run] == _LMQ
        for row in range(first_row[run], first_row[run + 1]):
            if queue_offset[row] != expected or size[row] <= 0 or inner_num[row] < 1:
                return row
            if (inner_num[row] != 1 and kind[run] != _BATCH) or (position[row] < 0) != is_lmq:
                return row
            if is_lmq and (parent[row] < 0 or parent[row] >= queues):
                return row
            expected += inner_num[row]
            total += size[row]
        if is_lmq:
            total = np.int64(0)
        if expected != end_queue_offset[run] or total != byte_count[run]:
            return first_row[run + 1]
    return -1


@kernel
def cut_blocks(
    first_row: NDArray[np.int64],
    is_lmq: NDArray[np.uint8],
    size: NDArray[np.int32],
    block_bytes: Int,
    shared_bytes: Int,
    block_rows: NDArray[np.uint32],
    block_raw: NDArray[np.int64],
    blocks_of_run: NDArray[np.uint32],
) -> Int:
    """Divide the records of a segment's runs into blocks, which are compressed together. Writes the rows and bytes of
    each block to ``block_rows`` and ``block_raw``, and how many begin in each run to ``blocks_of_run``. Returns their
    number.

    A block ends before the record that would take it above ``block_bytes``, or above ``shared_bytes`` once it
    holds records of two runs, and at the end of a run when half of ``shared_bytes`` is reached. A larger
    record has its own block. LMQ runs have no bytes, so no block.
    """
    count = 0
    rows = 0
    raw = np.int64(0)
    begun_in = -1  # the run in which the present block begins
    for run in range(len(is_lmq)):
        if is_lmq[run]:
            continue
        for row in range(first_row[run], first_row[run + 1]):
            limit = block_bytes if begun_in == run else min(block_bytes, shared_bytes)
            if rows and raw + size[row] > limit:
                block_rows[count], block_raw[count] = rows, raw
                count += 1
                rows, raw = 0, np.int64(0)
            if rows == 0:
                begun_in = run
                blocks_of_run[run] += 1
            rows += 1
            raw += size[row]
        if 2 * raw >= shared_bytes:
            block_rows[count], block_raw[count] = rows, raw
            count += 1
            rows, raw = 0, np.int64(0)
    if rows:
        block_rows[count], block_raw[count] = rows, raw
        count += 1
    return count


@kernel
def gather_records(
    arena: NDArray[np.uint8],
    position: NDArray[np.int64],
    size: NDArray[np.int32],
    row: Int,
    length: Int,
    out: NDArray[np.uint8],
) -> Int:
    """Copy the records of a block to ``out``, one behind the other: from number ``row`` on, until ``out`` has
    ``length`` bytes. Rows at negative positions, of an LMQ, have none.

    Returns the number after the last one copied, or -1 - number of a record that is outside the arena or does not fit
    into ``out``. Records that are adjacent in the arena are copied together.
    """
    source, target = arena.ctypes.data, out.ctypes.data
    filled = np.int64(0)
    while filled < length:
        if row >= len(position):
            return -1 - row
        if position[row] < 0:
            row += 1
            continue
        begin = position[row]
        if size[row] < 0 or begin > len(arena) - size[row] or filled + size[row] > min(length, len(out)):
            return -1 - row
        end: Int = begin + size[row]
        row += 1
        while (
            row < len(position)
            and position[row] == end
            and size[row] >= 0
            and end + size[row] <= len(arena)
            and filled + (end + size[row] - begin) <= min(length, len(out))
        ):
            end += size[row]
            row += 1
        copy_bytes(source, begin, target, filled, end - begin)
        filled += end - begin
    return row
