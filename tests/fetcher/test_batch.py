"""Batches: rows, records and buffers over several pieces."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fetcher.rows.message import EMPTY_BATCH, MessageBatch, joined_batch


def batch_of(rows: list[tuple[int, int, int]], pieces: list[bytes], first: int = 0) -> MessageBatch:
    """``rows``: (piece, start, size)."""
    count = len(rows)
    offsets = np.arange(first, first + count)
    piece, starts, sizes = (
        np.array([row[at] for row in rows], kind) for at, kind in enumerate((np.int32, np.int64, np.int32))
    )
    ones = np.ones(count, np.int32)
    return MessageBatch(
        [np.frombuffer(data, np.uint8) for data in pieces],
        piece,
        starts,
        sizes,
        offsets,
        ones,
        offsets * 100,
        offsets * 7,
        offsets + 1000,
    )


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90), st.integers(1, 10)), max_size=12)
PIECES = [bytes(range(100)), bytes(range(100, 200)), bytes(reversed(range(100)))]


@given(rows=ROWS)
def test_buffers_are_the_records_back_to_back(rows: list[tuple[int, int, int]]) -> None:
    batch = batch_of(rows, PIECES)
    records = [PIECES[piece][start : start + size] for piece, start, size in rows]
    assert list(map(bytes, batch.records())) == records
    assert [bytes(batch.record(row)) for row in range(len(batch))] == records
    assert b"".join(batch.buffers()) == b"".join(records)
    assert batch.record_bytes == sum(map(len, records))


def test_neighbours_share_a_buffer() -> None:
    batch = batch_of([(0, 0, 5), (0, 5, 5), (0, 20, 5), (1, 25, 5)], PIECES)
    assert list(map(len, batch.buffers())) == [10, 5, 5]


@given(
    pieces=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4),
    data=st.data(),
)
def test_buffers_of_records_that_fill_their_pieces(pieces: list[list[int]], data: st.DataObject) -> None:
    before, after = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    content = [bytes(range(10 * at, 10 * at + sum(sizes))) for at, sizes in enumerate(pieces)]
    rows = [
        (at, sum(sizes[:row]) + (before if at == 0 else 0), size)
        for at, sizes in enumerate(pieces)
        for row, size in enumerate(sizes)
    ]
    content[0] = bytes(before) + content[0]
    content[-1] += bytes(after)
    batch = batch_of(rows, content)
    batch.is_dense = True
    assert b"".join(batch.buffers()) == b"".join(batch.records())
    assert len(batch.buffers()) == len(pieces)
    assert batch.record_bytes == sum(map(sum, pieces))


@given(first=ROWS, second=ROWS, data=st.data())
def test_joined_and_taken_are_what_lists_would_be(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    parts = [batch_of(first, PIECES), EMPTY_BATCH, batch_of(second, PIECES[::-1], first=len(first))]
    joined = joined_batch(parts)
    records = [bytes(record) for part in parts for record in part.records()]
    assert list(map(bytes, joined.records())) == records
    assert joined.queue_offsets.tolist() == list(range(len(records)))
    chosen = sorted(data.draw(st.sets(st.integers(0, max(0, len(records) - 1)), max_size=len(records))))
    taken = joined.select(np.array(chosen, np.intp))
    assert list(map(bytes, taken.records())) == [records[row] for row in chosen]
    assert taken.phys.tolist() == [int(joined.phys[row]) for row in chosen]


def test_an_empty_batch_is_empty() -> None:
    assert len(EMPTY_BATCH) == 0 and EMPTY_BATCH.buffers() == [] and EMPTY_BATCH.record_bytes == 0
    assert joined_batch([]) is EMPTY_BATCH
    assert repr(EMPTY_BATCH) == "MessageBatch(empty)"


def test_memoryviews_are_pieces_too() -> None:
    batch = batch_of([(0, 1, 3)], PIECES)
    batch.pieces = [memoryview(b"abcdef")]
    assert bytes(batch.record(0)) == b"bcd"
