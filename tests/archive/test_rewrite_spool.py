"""What goes into the spool comes back by iteration, in memory or through the file, and in batches of one run."""

import random
from pathlib import Path

import numpy as np
import pytest

from tiered.archive.rewrite.spool import (
    BUFFERS_MAX,
    CHUNK_DTYPE,
    READ_RANGE_DTYPE,
    ROW_DTYPE,
    IterationSpool,
    ReadRanges,
)
from tiered.formats.segment_layout import BLOCK_DTYPE

STORED, LMQ = 2, 3
"""Every third range has stored blocks, every fourth no bytes."""


def found(iterations: int, ranges: int, rows: int, seed: int = 1) -> ReadRanges:
    """``ranges`` of each iteration in any order; range n of an iteration continues the one before."""
    rng = random.Random(seed)
    table = np.zeros(iterations * ranges, READ_RANGE_DTYPE)
    numbers = [(iteration, ordinal) for iteration in range(iterations) for ordinal in range(ranges)]
    rng.shuffle(numbers)
    table["iteration"], table["ordinal"] = np.array(numbers).T
    table["rows"], table["hashes"] = rows, rows
    table["base_queue_offset"] = table["ordinal"] * rows
    is_stored, is_lmq = table["ordinal"] % 3 == STORED, table["ordinal"] % 4 == LMQ
    table["chunks"] = np.where(is_lmq, 0, 2)
    table["blocks"] = np.where(is_stored & ~is_lmq, 2, 0)
    all_rows = np.zeros(len(table) * rows, ROW_DTYPE)
    all_rows["inner_num"], all_rows["key_count"] = 1, 1
    all_rows["phys"] = np.repeat(table["iteration"] * 1000 + table["ordinal"], rows)
    chunks = np.zeros(int(table["chunks"].sum()), CHUNK_DTYPE)
    chunks["rows"] = np.tile([1, rows - 1], len(chunks) // 2)
    chunks["blocks"] = np.repeat(table["blocks"] > 0, table["chunks"])
    data = [rng.randbytes(rng.randint(1, 50)) for _ in chunks]
    chunks["size_bytes"] = list(map(len, data))
    blocks = np.zeros(int(table["blocks"].sum()), BLOCK_DTYPE)
    return ReadRanges(table, all_rows, np.arange(len(all_rows), dtype="<u8"), chunks, blocks, data)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("memory_bytes_max", [None, 0, 20_000])
def test_pieces_come_back_by_iteration(
    tmp_path: Path, memory_bytes_max: int | None, *, is_packed: bool
) -> None:
    parts = [found(3, BUFFERS_MAX // 2 + 300, 2, seed) for seed in range(2)]
    spool = IterationSpool(tmp_path / "spool")
    spool.clear(is_packed=is_packed)
    for part in parts:
        spool.add(part, memory_bytes_max)
    for iteration in range(3):
        taken = spool.take(iteration)
        for seed, part in enumerate(parts):
            order = np.flatnonzero(part.ranges["iteration"] == iteration)
            order = order[np.argsort(part.ranges["ordinal"][order])]
            expected = part.selected(order)
            own = taken.selected(np.arange(seed, len(taken.ranges), 2))
            assert own.ranges.tobytes() == expected.ranges.tobytes()
            assert own.rows.tobytes() == expected.rows.tobytes()
            assert own.hashes.tolist() == expected.hashes.tolist()
            assert own.blocks.tobytes() == expected.blocks.tobytes()
            assert list(map(bytes, own.data)) == expected.data
    spool.close()


def test_batches_are_of_one_run_and_of_one_kind() -> None:
    ranges = found(1, 40, 3)
    ranges = ranges.selected(np.argsort(ranges.ranges["ordinal"]))
    bounds = np.array([0, 1, 3, 4, 11, 30, 40])  # the run [3, 4) is of an LMQ
    for size_bytes in (1, 60, 1 << 20):
        data: list[bytes | memoryview] = []
        blocks = 0
        for batch in ranges.batches(bounds, size_bytes):
            first = int(bounds[batch.run]) * 3
            assert first <= batch.first_row < batch.end_row <= int(bounds[batch.run + 1]) * 3
            assert len(batch.blocks) in (0, len(batch.data))
            blocks += len(batch.blocks)
            data += batch.data
        assert data == list(ranges.data)
        assert blocks == len(ranges.blocks)
    assert [batch[:3] for batch in found(1, 1, 3).batches(np.array([0, 1]), 1 << 20)] == [(0, 0, 3)]


def test_rows_continue_inside_a_run_only() -> None:
    ranges = found(1, 6, 2)
    ranges = ranges.selected(np.argsort(ranges.ranges["ordinal"]))
    ranges.ranges["base_queue_offset"][3:] += 100
    assert ranges.row_table(np.array([0, 3, 6])).queue_offset.tolist() == [*range(6), *range(106, 112)]
    with pytest.raises(ValueError, match="before queue offset 106"):
        ranges.row_table(np.array([0, 6]))
