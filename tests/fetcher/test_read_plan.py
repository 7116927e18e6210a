"""Rows of a run over several blocks, beside the records they were made of: every cut a pull can ask for."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.rows.run_list import RunPlace
from fetcher.rows.run_rows import RunRows, rows_of_run
from tests.formats.segment_builder import RowSpec, RunSpec, build, whole
from tiered.errors import CorruptionError
from tiered.formats.segment import BlockCodec
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind

KEY = "one/object"
FIRST_OFFSET = 40


@dataclass(frozen=True)
class Stored:
    """One object: runs of records, in blocks of about ``block_bytes``; ``spans``: offsets each record takes."""

    sizes: tuple[tuple[int, ...], ...]
    spans: tuple[int, ...]
    block_bytes: int

    def records(self, run: int) -> list[bytes]:
        return [bytes([run, row % 251]) * size + b"|" for row, size in enumerate(self.sizes[run])]

    def inner_num(self, run: int, row: int) -> int:
        return self.spans[(run + row) % len(self.spans)]

    def offsets(self, run: int) -> list[int]:
        """Of each record, and the end."""
        spans = (self.inner_num(run, row) for row in range(len(self.sizes[run])))
        return list(accumulate(spans, initial=FIRST_OFFSET))

    @cached_property
    def object(self) -> tuple[bytes, SegmentIndex]:
        queues = [QueueKey("topic", run, 0) for run in range(len(self.sizes))]
        kind = RunKind.PLAIN if self.spans == (1,) else RunKind.BATCH
        runs = [
            RunSpec(
                run,
                FIRST_OFFSET,
                [
                    RowSpec(
                        record, inner_num=self.inner_num(run, row), tags_code=row, store_timestamp=1000 + row
                    )
                    for row, record in enumerate(self.records(run))
                ],
                kind,
            )
            for run in range(len(self.sizes))
        ]
        encoded = build(queues, runs).encode(BlockCodec(block_bytes=self.block_bytes))
        content = whole(encoded)
        return content, SegmentIndex(KEY, len(content), content[-encoded.tail_bytes :])

    def place(self, run: int) -> RunPlace:
        content, index = self.object
        row = index.runs[run]
        return RunPlace(
            index.queue_of(run),
            KEY,
            len(content),
            len(content) - index.tail_offset,
            run,
            int(row["kind"]),
            int(row["base_queue_offset"]),
            int(row["end_queue_offset"]),
            int(row["first_row"]),
            int(row["rows"]),
            int(row["base_byte"]),
            int(row["byte_count"]),
        )

    def block(self, run: int, number: int) -> np.ndarray:
        content, index = self.object
        span = index.span_of_blocks(run, number, number + 1)
        return index.decode_blocks(span, content[span.offset : span.offset + span.length])


stored = st.builds(
    Stored,
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=30).map(tuple), min_size=1, max_size=4).map(
        tuple
    ),
    st.sampled_from([(1,), (1, 3, 2)]),
    st.sampled_from([64, 256, 1024]),
)


def taken(archive: Stored, run: int, rows: RunRows, part: slice) -> tuple[list[bytes], list[int]]:
    """The records and offsets of a batch of ``part``."""
    batch = rows.batch(part, [archive.block(run, number) for number in rows.blocks_of(part)])
    assert batch.tags_code.tolist() == [offset_row(archive, run, at) for at in batch.queue_offsets.tolist()]
    return [bytes(record) for record in batch.records()], batch.queue_offsets.tolist()


def offset_row(archive: Stored, run: int, offset: int) -> int:
    return archive.offsets(run).index(offset)


@given(stored, st.data())
def test_any_rows_of_any_blocks_are_the_records_that_were_stored(
    archive: Stored, data: st.DataObject
) -> None:
    run = data.draw(st.integers(0, len(archive.sizes) - 1))
    records, offsets = archive.records(run), archive.offsets(run)
    at = data.draw(st.integers(offsets[0], offsets[-1] - 1))
    count, max_bytes = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 4000))
    rows = rows_of_run(archive.object[1], archive.place(run), at, count=count, max_bytes=max_bytes)
    assert rows.base <= at < rows.end
    first = offset_row(archive, run, rows.base)
    assert rows.end == offsets[first + len(rows)]
    begin = data.draw(st.integers(0, len(rows) - 1))
    end = data.draw(st.integers(begin + 1, len(rows)))
    found, at_offsets = taken(archive, run, rows, slice(begin, end))
    assert found == records[first + begin : first + end]
    assert at_offsets == offsets[first + begin : first + end]
    some = np.array(sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))))
    batch = rows.batch(some, [archive.block(run, number) for number in rows.blocks_of(some)])
    assert [bytes(record) for record in batch.records()] == [records[first + row] for row in some.tolist()]


@given(stored, st.data())
def test_exactly_as_many_blocks_are_planned_as_the_limits_need(archive: Stored, data: st.DataObject) -> None:
    run = data.draw(st.integers(0, len(archive.sizes) - 1))
    index, place = archive.object[1], archive.place(run)
    at = data.draw(st.integers(place.base, place.end - 1))
    count, max_bytes = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4000))
    rows = rows_of_run(index, place, at, count=count, max_bytes=max_bytes)
    row = rows.row_of(at)
    before_last = rows.in_block_of(len(rows) - 1).base
    if rows.first_block + 1 < rows.end_block:
        assert rows.row_of(before_last) - row < count  # the last block was still wanted
        assert rows.block_bytes[-2] < max_bytes
    is_end = rows.end == place.end
    assert is_end or len(rows) - row >= count or rows.block_bytes[-1] >= max_bytes
    assert len(rows_of_run(index, place, at).blocks) == 1


@given(stored, st.data())
def test_the_buffered_block_is_the_same_as_one_read_alone(archive: Stored, data: st.DataObject) -> None:
    run = data.draw(st.integers(0, len(archive.sizes) - 1))
    index, place = archive.object[1], archive.place(run)
    rows = rows_of_run(index, place, place.base, count=1 << 20, max_bytes=1 << 40)
    assert (rows.base, rows.end) == (place.base, place.end)
    kept = rows.in_block_of(data.draw(st.integers(0, len(rows) - 1)))
    alone = rows_of_run(index, place, kept.base)
    for name in RunRows.__slots__:
        assert np.array_equal(getattr(kept, name), getattr(alone, name)), name
    everything = slice(0, len(kept))
    assert taken(archive, run, kept, everything) == taken(archive, run, alone, everything)
    assert b"".join(kept.bodies(everything, [archive.block(run, kept.first_block)])) == b"".join(
        taken(archive, run, alone, everything)[0]
    )


def test_sizes_that_do_not_end_with_a_block_are_corruption(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Stored((tuple([30] * 12),), (1,), 128)
    index, place = archive.object[1], archive.place(0)
    columns = index.stored_columns

    def across(first: int, end: int) -> tuple[np.ndarray, ...]:
        size, *others = columns(first, end)
        size = size.copy()
        size[0] += 7
        size[-1] -= 7
        return size, *others

    monkeypatch.setattr(index, "stored_columns", across)
    with pytest.raises(CorruptionError, match=r"rows 0 to 12 of run 0 do not fill blocks 0 to \d"):
        rows_of_run(index, place, place.base, count=12, max_bytes=1 << 20)
