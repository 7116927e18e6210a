"""Kernels that write and read segments, against their plain-Python oracles."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.column_pages import KINDS, _encode, _view, page_runs
from tests.kernels import segment_oracle
from tests.kernels.guarded_memory import GuardedMemory
from tests.kernels.segment_oracle import PageRow, PageRun
from tests.sweeps import examples
from tiered.formats import column_pages
from tiered.kernels import columns as column_kernels
from tiered.kernels.gather import cut_blocks, gather_records
from tiered.model.tables import RunKind

_GUARDED = GuardedMemory(1 << 16)


def _decode(runs: list[PageRun], data: bytes, first: int, end: int) -> list[PageRow] | None:
    """By the kernel, which is compared with numpy."""
    view = _view(runs)
    page = _GUARDED.place(data)
    page.flags.writeable = False  # as read from an object: kernels are compiled for it
    found = []
    for decode_page in (column_kernels.decode_page, column_pages.decode_page):
        columns: list[Any] = [np.empty(end - first, kind) for kind in KINDS]
        is_valid = decode_page(page, first, end, view.run_at(first), *view.columns, *columns)
        found.append(
            [PageRow(*map(int, values)) for values in zip(*columns, strict=True)] if is_valid else None
        )
    assert found[0] == found[1]
    return found[0]


def _encode_by_numpy(runs: list[PageRun]) -> bytes:
    rows = [row for run in runs for row in run.rows]
    columns = [np.array(values, kind) for values, kind in zip(zip(*rows, strict=True), KINDS, strict=True)]
    return column_pages.encode_page(*_view(runs).columns, *columns)


@settings(max_examples=examples(150), deadline=None)
@given(page_runs())
def test_a_page_is_what_the_oracle_says_and_comes_back(runs: list[PageRun]) -> None:
    rows = [row for run in runs for row in run.rows]
    data = _encode(runs, 0, len(rows))
    assert data == segment_oracle.encode_page(runs)
    assert data == _encode_by_numpy(runs)
    assert (
        _decode(runs, data, 0, len(rows))
        == rows
        == segment_oracle.decode_page(data, [(run, len(run.rows)) for run in runs])
    )


@settings(max_examples=examples(50), deadline=None)
@given(page_runs(), st.data())
def test_pages_may_begin_and_end_inside_runs(runs: list[PageRun], data: st.DataObject) -> None:
    rows = [row for run in runs for row in run.rows]
    first = data.draw(st.integers(0, len(rows) - 1))
    end = data.draw(st.integers(first + 1, len(rows)))
    assert _decode(runs, _encode(runs, first, end), first, end) == rows[first:end]


@pytest.mark.parametrize("rows_behind", range(10))
def test_integers_of_every_length_at_every_distance_from_the_end_of_their_stream(rows_behind: int) -> None:
    """Integers of up to eight bytes are decoded as one word, longer ones byte by byte."""
    for bits in range(64):
        for value in {(1 << bits) - 1, (1 << bits) >> 1, -(1 << bits) >> 1, -(1 << bits) + 1}:
            rows = [PageRow(1, value, 0, 0), *[PageRow(1, 0, 0, 0)] * rows_behind]
            runs = [PageRun(int(RunKind.PLAIN), 0, 0, rows)]
            page = segment_oracle.encode_page(runs)
            assert _decode(runs, page, 0, len(rows)) == rows
            if value == (1 << bits) - 1 and bits > 6:  # its last byte says that another one follows
                at = page.index(segment_oracle.varint(segment_oracle.zigzag(value)), 28)
                at += len(segment_oracle.varint(segment_oracle.zigzag(value))) - 1
                damaged = page[:at] + bytes([page[at] | 0x80]) + page[at + 1 :]
                assert _decode(runs, damaged, 0, len(rows)) is None


@settings(max_examples=examples(300), deadline=None)
@given(page_runs(), st.data())
def test_damaged_pages_decode_to_what_the_oracle_says(runs: list[PageRun], data: st.DataObject) -> None:
    """A page without its checksum: no read outside it, no impossible value."""
    counts = [(run, len(run.rows)) for run in runs]
    rows = sum(count for _, count in counts)
    page = bytearray(_encode(runs, 0, rows))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(page) - 1))
        page[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, page[at] ^ 0x80]) | st.integers(0, 255))
    cut = data.draw(st.integers(0, len(page)))
    for damaged in (bytes(page), bytes(page[:cut])):
        assert _decode(runs, damaged, 0, rows) == segment_oracle.decode_page(damaged, counts)


@given(st.binary(max_size=80), page_runs())
def test_noise_decodes_to_what_the_oracle_says(noise: bytes, runs: list[PageRun]) -> None:
    counts = [(run, len(run.rows)) for run in runs]
    expected = segment_oracle.decode_page(noise, counts)
    assert _decode(runs, noise, 0, sum(count for _, count in counts)) == expected


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=20), min_size=1, max_size=6),
    st.integers(1, 80),
    st.integers(1, 120),
)
def test_blocks_are_cut_as_the_oracle_says(
    run_sizes: list[list[int]], block_bytes: int, shared_bytes: int
) -> None:
    sizes = np.array([size for run in run_sizes for size in run], np.int32)
    first_row = np.cumsum([0, *map(len, run_sizes)])
    rows, raw = np.zeros(len(sizes), np.uint32), np.zeros(len(sizes), np.int64)
    of_run = np.zeros(len(run_sizes), np.uint32)
    is_lmq = np.zeros(len(run_sizes), np.uint8)
    count = cut_blocks(first_row, is_lmq, sizes, block_bytes, shared_bytes, rows, raw, of_run)
    expected = segment_oracle.cut_blocks(run_sizes, block_bytes, shared_bytes)
    assert rows[:count].tolist() == list(map(len, expected))
    assert raw[:count].tolist() == [sum(size for _, size in block) for block in expected]
    assert of_run.tolist() == [sum(block[0][0] == run for block in expected) for run in range(len(run_sizes))]


def test_a_record_above_the_block_size_has_a_block_to_itself() -> None:
    blocks = segment_oracle.cut_blocks([[5, 100, 5, 5]], 10, 10)
    assert [[size for _, size in block] for block in blocks] == [[5], [100], [5, 5]]


def test_small_runs_share_a_block_and_a_large_one_keeps_its_own() -> None:
    blocks = segment_oracle.cut_blocks([[3], [4], [3], [50, 50, 50], [2], [1]], 100, 16)
    assert [[size for _, size in block] for block in blocks] == [[3, 4, 3], [50, 50], [50], [2, 1]]


@pytest.mark.parametrize(
    ("position", "size"),
    [([0, 95], [10, 10]), ([0, 1 << 62], [10, 10]), ([(1 << 63) - 5], [10]), ([0, 20], [10, -5])],
    ids=["past the end", "far away", "overflowing", "negative size"],
)
def test_gather_never_leaves_the_arena(position: list[int], size: list[int]) -> None:
    arena, out = np.zeros(100, np.uint8), np.zeros(64, np.uint8)
    assert gather_records(arena, np.array(position), np.array(size, np.int32), 0, 20, out) == -len(position)


def test_gather_never_writes_past_its_output() -> None:
    arena, out = np.ones(100, np.uint8), np.zeros(64, np.uint8)
    assert gather_records(arena, np.array([0]), np.array([40], np.int32), 0, 30, out) == -1
    assert not out.any()
