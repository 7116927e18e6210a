"""Checks archived records with the rules of the scan and returns the same columns, to verify archives.

Records of one queue do not lie together in the commitlog, so each has its own physical offset.
"""

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.jit import Int, kernel
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.record_checks import END_OF_FILE_BYTES, VALID, check_record
from tiered.kernels.record_columns import GROW_ROWS, InvalidReason, RecordColumns
from tiered.kernels.record_fields import require_inside
from tiered.kernels.record_rows import emit_record
from tiered.kernels.scan import make_room

_PHYS_AT = 28


def own_phys(data: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """PHYSICALOFFSET of the records at ``starts``."""
    stored = data[starts[:, None] + np.arange(_PHYS_AT, _PHYS_AT + 8)]
    found: NDArray[np.int64] = np.ascontiguousarray(stored).view(">i8").ravel().astype(np.int64)
    return found


def rescan(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int32],
    phys: NDArray[np.int64],
    table: QueueTable,
    out: RecordColumns,
) -> tuple[int, str]:
    """Check archived records, ``data[starts[i] : starts[i] + sizes[i]]``, with the rules of the commitlog scan, and
    append a row of columns to ``out`` for each. ``phys``: their commitlog offsets; ``table`` numbers their queues.

    Returns how many are valid, from the first on, and the name of the test that the next one fails ("" when all are
    valid). Raises ValueError for a record outside ``data``.
    """
    require_inside(data, starts, sizes)
    if not data.flags.c_contiguous or data.dtype != np.uint8:
        raise ValueError(f"records must be in contiguous bytes, not in items of {data.dtype}")
    # Copies: read-only arrays would need a second compilation.
    starts, sizes, phys = np.array(starts, np.int64), np.array(sizes, np.int32), np.array(phys, np.int64)
    done = no_levels = 0
    while done < len(starts):
        done, outcome = _rescan(
            data.ctypes.data, starts, sizes, phys, done, table.address, out.address, no_levels
        )
        if outcome == VALID:
            break
        if outcome < GROW_ROWS:
            # The record is invalid. If no test failed (NONE), its size field reaches beyond the bytes given for it.
            detail = out.stop_detail
            return done, detail.name if detail != InvalidReason.NONE else "SIZE"
        make_room(outcome, table, out)
    return done, ""


@kernel
def _rescan(
    data: Int,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int32],
    phys: NDArray[np.int64],
    row: Int,
    table: Int,
    out: Int,
    no_levels: Int,
) -> tuple[Int, Int]:
    """Check the records from number ``row`` on, and append a row to ``out`` for each. Returns the number of the record
    at which this stopped, and why: VALID behind the last one, a reason that it is invalid, or a full array.

    ``no_levels`` is 0, as there are no delay levels: only the commitlog scan needs them. A literal 0 in its place would
    compile emit_record a second time."""
    while row < len(starts):
        begin = starts[row]
        end = begin + sizes[row]
        file_end_phys = phys[row] + sizes[row] + END_OF_FILE_BYTES
        outcome = check_record(data, begin, end, phys[row], file_end_phys, out)
        if outcome == VALID:
            outcome = emit_record(data, begin, phys[row], table, out, no_levels, no_levels)
        if outcome != VALID:
            return row, outcome
        row += 1
    return row, VALID
