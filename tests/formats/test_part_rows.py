"""Rows of many parts at once are those of each part, in any windows; what one contradicts, so do all."""

import io
import random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.segment_builder import META, RowSpec, RunSpec, build
from tests.sweeps import examples
from tiered.archive.index.collect import items_of_segment, pieces_of_segment
from tiered.archive.index.items import ITEM_DTYPE
from tiered.archive.index.places import places_of_segment
from tiered.errors import CorruptionError
from tiered.formats import segment_layout, segment_writer
from tiered.formats.part_rows import PartRows, in_object_order, rows_of_parts
from tiered.formats.run_part import CatalogRun, cut_run
from tiered.formats.segment import BlockCodec
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_writer import SegmentWriter, WrittenSegment
from tiered.model.queue import QueueKey
from tiered.model.tables import RUN_DTYPE, RunKind, Table, concatenated, picked

QUEUES = [QueueKey("a", 0, 0), QueueKey("%LMQ%b", 0, 0), QueueKey("c", 1, 3)]
KINDS = (RunKind.PLAIN, RunKind.BATCH, RunKind.LMQ, RunKind.SPARSE)


def opened(seed: int, runs: int, rows: int) -> tuple[SegmentIndex, bytes]:
    """The index and the keys of an object."""
    done = written(seed, runs, rows)
    return SegmentIndex(f"object {seed}", done.size_bytes, done.tail), done.keys


def written(seed: int, runs: int, rows: int) -> WrittenSegment:
    """An object of runs of all kinds; key compaction dropped rows of sparse ones."""
    rng = random.Random(seed)
    specs = []
    for _ in range(runs):
        kind = rng.choice(KINDS)
        spans = kind in (RunKind.BATCH, RunKind.SPARSE)
        found = [
            RowSpec(
                b"x" * rng.randint(1, 9),
                rng.getrandbits(31),
                1_700_000_000_000 + rng.randint(0, 999),
                rng.randint(0, 900),
                rng.randint(1, 5) if spans else 1,
                [] if kind == RunKind.LMQ else [rng.getrandbits(64) for _ in range(rng.randint(0, 3))],
                0,
                rng.randint(0, 999),
            )
            for _ in range(rng.randint(1, rows))
        ]
        queue = 1 if kind == RunKind.LMQ else rng.randint(0, 2)
        specs.append(RunSpec(queue, rng.randint(0, 1000), found, kind, 77 * (kind != RunKind.LMQ), 4096))
    source, file = build(QUEUES, specs), io.BytesIO()
    writer = SegmentWriter(file, BlockCodec())
    writer.begin_runs([QUEUES[spec.queue] for spec in specs], source.runs)
    writer.add_rows(source.rows, QUEUES, source.runs["rows"].astype(np.int64))
    for run, spec in enumerate(specs):
        if spec.kind != RunKind.LMQ:
            records = [row.content for row in spec.rows]
            writer.add_records(records, np.array(list(map(len, records)), np.int32), run)
    return writer.finish(META)


def parts_of(index: SegmentIndex, rng: random.Random) -> Table:
    """Some runs, whole or cut."""
    parts = []
    for run in range(len(index)):
        whole = picked(index.runs, np.array([run]))[list(RUN_DTYPE.names or ())].astype(RUN_DTYPE)[0]
        rows, count = index.row_columns(run), int(whole["rows"])
        first = rng.randint(0, count - 1) if rng.random() < 0.5 else 0
        if rng.random() < 0.7:
            parts.append(np.array([cut_run(whole, rows, first, rng.randint(first + 1, count))], RUN_DTYPE))
            if whole["kind"] == RunKind.SPARSE:  # the catalog's part has holes at both ends
                parts[-1]["base_queue_offset"] -= rng.randint(0, 3)
                parts[-1]["end_queue_offset"] += rng.randint(0, 3)
    rng.shuffle(parts)
    return concatenated(parts, RUN_DTYPE)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 40), st.sampled_from([1, 5, 3000]), st.integers(1, 9000))
def test_the_rows_of_each_part(seed: int, runs: int, rows: int, window: int) -> None:
    index, stored = opened(seed, runs, rows)
    parts = parts_of(index, random.Random(seed))
    ordered = in_object_order(index, parts)
    total = int(ordered["rows"].sum())
    found = list(rows_of_parts(index, ordered, [*range(window, total, window), total]))
    assert sum(len(piece.row) for piece in found) == total
    keys = index.decode_keys(stored)
    ends = np.concatenate([[0], np.cumsum(keys.counts, dtype=np.int64)])
    items, places = [], []
    for number, run in enumerate(ordered):
        expected, mine = index.row_columns(CatalogRun.of(run)), [piece.part == number for piece in found]
        for name in PartRows._fields[2:]:
            columns = [getattr(piece, name)[which] for piece, which in zip(found, mine, strict=True)]
            assert np.array_equal(np.concatenate(columns), getattr(expected, name)), name
        queue = index.queue_of(int(run["ordinal"]))
        if run["kind"] != RunKind.LMQ and not queue.topic.startswith("%LMQ%"):
            first = int(index.first_row[run["ordinal"]] + run["first_row"])
            for row, at in enumerate(range(first, first + len(expected))):
                hashes = keys.hashes[ends[at] : ends[at + 1]].tolist()
                rest = int(expected.queue_offset[row]), int(expected.store_timestamp[row]), *queue[1:]
                items += [(key, *rest) for key in hashes]
        if run["kind"] != RunKind.LMQ:
            places += [(phys, queue) for phys in expected.phys.tolist()]
    assert items_of_segment(index, keys, parts).tolist() == items
    pieces = list(pieces_of_segment(index, keys, parts, window))
    assert concatenated(pieces, ITEM_DTYPE).tolist() == items
    assert all(len(piece) <= max(window, 3) for piece in pieces)
    named = places_of_segment(index, parts)
    assert [(phys, named.queues[queue]) for phys, queue in named.rows.tolist()] == places


@pytest.mark.parametrize("name", ["end_queue_offset", "byte_count"])
def test_what_the_rows_of_a_part_contradict(name: str) -> None:
    index, _ = opened(3, 30, 9)
    parts = in_object_order(index, index.runs[list(RUN_DTYPE.names or ())].astype(RUN_DTYPE))
    for at in np.flatnonzero(parts["kind"] != RunKind.LMQ).tolist():
        wrong = parts.copy()
        wrong[name][at] = 1
        with pytest.raises(CorruptionError) as one:
            index.row_columns(CatalogRun.of(wrong[at]))
        with pytest.raises(CorruptionError) as many:
            list(rows_of_parts(index, wrong))
        assert one.value.message == many.value.message
    for column, value in (("ordinal", len(index)), ("first_row", 1), ("rows", 10_000)):
        wrong = parts.copy()
        wrong[column][0] = value
        with pytest.raises(CorruptionError, match="that it does not have"):
            in_object_order(index, wrong)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 40), st.sampled_from([1, 300, 3000]), st.integers(1, 9))
def test_parts_of_a_tail_answer_for_their_runs(seed: int, runs: int, rows: int, part_runs: int) -> None:
    """A tail in parts says what one footer says, and so does each of its parts."""
    single, stored_keys = opened(seed, runs, rows)
    with (
        patch.object(segment_layout, "PART_RUNS", part_runs),
        patch.object(segment_writer, "PART_RUNS", part_runs),
    ):
        done = written(seed, runs, rows)
    whole = SegmentIndex("key", done.size_bytes, done.tail)
    assert whole.decode_keys(done.keys).hashes.tolist() == single.decode_keys(stored_keys).hashes.tolist()
    parts = [
        SegmentIndex("key", done.size_bytes, done.tail, number) for number in range(-(-runs // part_runs))
    ]
    assert sum(map(len, parts)) == runs and max(map(len, parts)) <= part_runs
    assert sum(len(part.page_bytes) for part in parts) == len(whole.page_bytes)
    for run in range(runs):
        place, kind, queue = (
            CatalogRun.of(single.whole_runs[run]),
            int(single.runs["kind"][run]),
            single.queue_of(run),
        )
        expected = single.row_columns(run)
        for index in (whole, parts[run // part_runs]):
            index.check_pages()
            index.check_part(place, kind, queue)
            found = index.row_columns(place)
            for name in ("size", "phys", "queue_offset", "parent_queue_offset"):
                assert np.array_equal(getattr(found, name), getattr(expected, name)), name
            assert [index.queues[at] for at in found.parent[found.parent >= 0].tolist()] == [
                single.queues[at] for at in expected.parent[expected.parent >= 0].tolist()
            ]
            assert index.row_of(run) == single.row_of(run)
            assert index.byte_count_of(run) == single.byte_count_of(run)
            if kind != RunKind.LMQ:
                span = single.block_span(run, 0, place.rows)
                assert index.block_span(place, 0, place.rows) == index.block_span(run, 0, place.rows) == span
                blocks = range(span.first_block, span.end_block)
                assert index.spans_of_single_blocks(run, blocks) == single.spans_of_single_blocks(run, blocks)
    for index in (whole, parts[-1], SegmentIndex("key", done.size_bytes, done.tail, runs)):
        with pytest.raises(CorruptionError, match="differs"):
            index.check_part(CatalogRun(runs, 0, 1, 0, 1, 0, 1), 0, QUEUES[0])
