"""The scan: commitlog bytes -> validated columns, one pass, no Python object per message.

The loop over records, and which of them are visible in a consume queue. record_checks has the tests of records,
record_rows the rules of the columns. The scan stops at the first invalid byte. Oracle:
``tests.kernels.oracle.scan_log``.
"""

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import get_i64, put_i64
from tiered.kernels.queue_table import QUEUES_FULL, TOPIC_BYTES_FULL, QueueTable
from tiered.kernels.record_checks import VALID, check_record
from tiered.kernels.record_columns import (
    DOUBT_PLAIN,
    DOUBT_SLASH,
    DOUBT_TOPIC,
    FLAG_BATCH,
    FLAG_COMPRESSED,
    FLAG_LMQ,
    GROW_QUEUES,
    GROW_ROWS,
    GROW_TOPIC_BYTES,
    SIZE,
    SKIPPED,
    STOP_DETAIL,
    STOP_POSITION,
    SYS_FLAG,
    InvalidReason,
    RecordColumns,
    ScanStop,
    StopReason,
)
from tiered.kernels.record_rows import emit_record

__all__ = [
    "DOUBT_PLAIN",
    "DOUBT_SLASH",
    "DOUBT_TOPIC",
    "FLAG_BATCH",
    "FLAG_COMPRESSED",
    "FLAG_LMQ",
    "InvalidReason",
    "RecordColumns",
    "ScanStop",
    "StopReason",
    "scan_log",
    "warm_up",
]

_NO_DELAY_LEVELS = np.zeros(0, np.int64)
_INVALID = int(StopReason.INVALID)
_NOT_VISIBLE = 0x4
"""Set in the system flag of prepared (0x4) and rolled back (0xC) transactions."""


def scan_log(
    arena: NDArray[np.uint8],
    begin: int,
    end: int,
    phys_begin: int,
    file_end_phys: int,
    table: QueueTable,
    out: RecordColumns,
    *,
    delay_levels_ms: NDArray[np.int64] | None,
) -> ScanStop:
    """Check the records in ``arena[begin:end]`` one after the other and append a row of columns to ``out`` for each.
    Returns where and why this stopped: at the first byte that is no valid record.

    The first byte is at ``phys_begin`` in the commitlog file that ends at ``file_end_phys``. Prepared and rolled back
    transactions give no row, nor do queues whose ``table.admitted`` is 0 unless the record has an entry of an admitted
    LMQ. New queues are inserted into ``table`` as UNDECIDED. ``delay_levels_ms[i]`` is the delay of level i + 1; when
    given, tagsCode of a scheduled message is its deliver time, as in the consume queue of SCHEDULE_TOPIC_XXXX. Raises
    ValueError for a range outside the arena.
    """
    if not 0 <= begin <= end <= len(arena) or not arena.flags.c_contiguous or arena.dtype != np.uint8:
        raise ValueError(
            f"the range [{begin}, {end}) cannot be scanned: the log was read into {len(arena)} items of {arena.dtype}"
        )
    levels = _NO_DELAY_LEVELS if delay_levels_ms is None else np.ascontiguousarray(delay_levels_ms, np.int64)
    address = arena.ctypes.data
    while True:
        outcome = _scan(
            address,
            begin,
            end,
            phys_begin,
            file_end_phys,
            table.address,
            out.address,
            levels.ctypes.data,
            len(levels),
        )
        if outcome < GROW_ROWS:
            return ScanStop(StopReason(outcome), out.stop_position, out.stop_detail)
        make_room(outcome, table, out)
        phys_begin += out.stop_position - begin
        begin = out.stop_position


def make_room(shortage: int, table: QueueTable, out: RecordColumns) -> None:
    """Enlarge the array that the kernel found full: it continues at the same record."""
    if shortage == GROW_QUEUES:
        table.grow(QUEUES_FULL)
    elif shortage == GROW_TOPIC_BYTES:
        table.grow(TOPIC_BYTES_FULL)
    else:
        out.grow(shortage)


def warm_up() -> None:
    """Compile the scan (some 10 s) or load it from the cache (some 100 ms) before it is needed."""
    scan_log(np.zeros(8, np.uint8), 0, 8, 0, 8, QueueTable(), RecordColumns(1, 1, 1), delay_levels_ms=None)


@kernel
def _scan(
    arena: Int,
    position: Int,
    end: Int,
    phys: Int,
    file_end_phys: Int,
    table: Int,
    out: Int,
    delay_levels: Int,
    level_count: Int,
) -> Int:
    """Check the records from ``position`` to ``end`` and append their rows to ``out``. Returns why this stopped, a
    StopReason or the code of a full array, at the position that the word STOP_POSITION of ``out`` then has. Rows are
    appended as a whole or not at all."""
    while True:
        outcome = check_record(arena, position, end, phys, file_end_phys, out)
        if outcome == VALID:
            if get_i64(out, SYS_FLAG) & _NOT_VISIBLE:
                put_i64(out, SKIPPED, get_i64(out, SKIPPED) + 1)
            else:
                outcome = emit_record(arena, position, phys, table, out, delay_levels, level_count)
        if outcome != VALID:
            put_i64(out, STOP_POSITION, position)
            if outcome != _INVALID:
                put_i64(out, STOP_DETAIL, 0)
            return outcome
        size = get_i64(out, SIZE)
        position += size
        phys += size
