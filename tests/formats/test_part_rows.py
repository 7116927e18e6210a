"""Rows of many parts at once are those of each part, in any windows; what one contradicts, so do all."""

from __future__ import annotations

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
from tiered.formats import segment_index
from tiered.formats.part_rows import PartRows, in_object_order, rows_of_parts
from tiered.formats.run_part import CatalogRun, cut_run
from tiered.formats.segment import BlockCodec
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_writer import SegmentWriter
from tiered.model.queue import QueueKey
from tiered.model.tables import RUN_DTYPE, RunKind, Table, concatenated, picked

QUEUES = [QueueKey("a", 0, 0), QueueKey("%LMQ%b", 0, 0), QueueKey("c", 1, 3)]
KINDS = (RunKind.PLAIN, RunKind.BATCH, RunKind.LMQ, RunKind.SPARSE)


def opened(seed: int, runs: int, rows: int) -> tuple[SegmentIndex, bytes]:
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
    done = writer.finish(META)
    return SegmentIndex(f"object {seed}", done.size_bytes, done.tail), done.keys


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
def test_a_part_of_a_tail_answers_for_its_runs(seed: int, runs: int, rows: int, part_runs: int) -> None:
    index, _ = opened(seed, runs, rows)
    with patch.object(segment_index, "PART_RUNS", part_runs):
        parts = [index.part_of(ordinal) for ordinal in range(runs)]
    for ordinal, part in enumerate(parts):
        first = ordinal // part_runs * part_runs
        for run in range(first, min(first + part_runs, runs)):
            place, queue = CatalogRun.of(index.whole_runs[run]), index.queue_of(run)
            part.check_part(place, int(index.runs["kind"][run]), queue)
            found, expected = part.row_columns(place), index.row_columns(run)
            for name in ("size", "phys", "queue_offset", "parent_queue_offset"):
                assert np.array_equal(getattr(found, name), getattr(expected, name)), name
            assert [part.queues[at] for at in found.parent[found.parent >= 0].tolist()] == [
                index.queues[at] for at in expected.parent[expected.parent >= 0].tolist()
            ]
            assert (part.row_of(run), part.byte_count_of(run)) == (
                index.row_of(run),
                index.byte_count_of(run),
            )
            if index.runs["kind"][run] != RunKind.LMQ:
                span = index.block_span(run, 0, place.rows)
                assert part.block_span(place, 0, place.rows) == part.block_span(run, 0, place.rows) == span
                blocks = range(span.first_block, span.end_block)
                assert part.spans_of_single_blocks(run, blocks) == index.spans_of_single_blocks(run, blocks)
        with pytest.raises(CorruptionError, match="differs"):
            part.check_part(CatalogRun(runs, 0, 1, 0, 1, 0, 1), 0, QUEUES[0])
        assert part is index if runs <= part_runs else len(part) <= runs
