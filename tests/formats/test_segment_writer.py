"""The writer from parts gives the bytes of the encoder, whatever the parts; it refuses what contradicts itself."""

import io
import random
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.formats.segment_builder import META, RowSpec, RunSpec, Segment, build
from tiered.formats.segment import BlockCodec, RowTable
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import HEADER_BYTES
from tiered.formats.segment_writer import SegmentWriter
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind

CODEC = BlockCodec(block_bytes=100_000)
QUEUES = [QueueKey("a", 0, 0), QueueKey("%LMQ%b", 0, 0), QueueKey("c", 1, 3)]


def segment(seed: int, rows: int) -> Segment:
    """Plain, LMQ and batch runs, with keys; queues in the order in which the writer meets them."""
    rng = random.Random(seed)
    specs = []
    for queue, kind in ((0, RunKind.PLAIN), (1, RunKind.LMQ), (2, RunKind.BATCH), (2, RunKind.PLAIN)):
        found = [
            RowSpec(
                (b"text " if rng.random() < 0.5 else rng.randbytes(5)) * rng.randint(1, 60),
                rng.getrandbits(31),
                1_700_000_000_000 + rng.randint(0, 10**6),
                rng.randint(0, 900),
                rng.randint(1, 5) if kind == RunKind.BATCH else 1,
                [] if kind == RunKind.LMQ else [rng.getrandbits(64) for _ in range(rng.randint(0, 2))],
                0,
                rng.randint(0, 999),
            )
            for _ in range(rng.randint(1, rows))
        ]
        specs.append(
            RunSpec(queue, rng.randint(0, 1000), found, kind, 0 if kind == RunKind.LMQ else 77, 4096)
        )
    return build(QUEUES, specs)


def part_of(rows: RowTable, begin: int, end: int) -> RowTable:
    """Rows [begin, end)."""
    ends = np.concatenate([[0], np.cumsum(rows.key_count, dtype=np.int64)])
    columns = {
        item.name: getattr(rows, item.name)[begin:end] for item in fields(rows) if item.name != "key_hashes"
    }
    return RowTable(**columns, key_hashes=rows.key_hashes[int(ends[begin]) : int(ends[end])])


def records_of(source: Segment, first: int, last: int) -> tuple[list[bytes], NDArray[Any]]:
    """Records of rows [first, last), and their sizes."""
    part = part_of(source.rows, first, last)
    places = zip(part.position.tolist(), part.size.tolist(), strict=True)
    return [source.arena[at : at + size].tobytes() for at, size in places], part.size


def written(source: Segment, seed: int) -> bytes:
    """The segment, handed over in parts of any size."""
    rng, file = random.Random(seed), io.BytesIO()
    writer = SegmentWriter(file, CODEC)
    first = 0
    for run, spec in zip(source.runs, source.specs, strict=True):
        writer.begin_runs([QUEUES[spec.queue]], run.reshape(1))
        end = first + int(run["rows"])
        while first < end:
            last = min(end, first + rng.randint(1, 3000))
            writer.add_rows(part_of(source.rows, first, last), QUEUES)
            if spec.kind != RunKind.LMQ:
                writer.add_records(*records_of(source, first, last))
            first = last
    done = writer.finish(META)
    assert done.size_bytes == len(file.getvalue()) + len(done.keys) + len(done.tail)
    assert len(file.getvalue()) == HEADER_BYTES + done.blocks_bytes
    assert writer.finish(META).tail == done.tail, "for another attempt"
    return file.getvalue() + done.keys + done.tail


@pytest.mark.parametrize(("seed", "rows"), [(1, 5), (2, 300), (3, 9000), (4, 9000)])
def test_the_bytes_of_the_encoder(seed: int, rows: int) -> None:
    source = segment(seed, rows)
    expected = b"".join(bytes(piece) for piece in source.encode(CODEC).body)
    assert written(source, seed) == expected


@pytest.mark.parametrize(("seed", "rows"), [(5, 5), (6, 300), (7, 9000)])
def test_all_runs_together(seed: int, rows: int) -> None:
    """Rows of all runs at once, and then the records of each; the last run has more rows."""
    source, file = segment(seed, rows), io.BytesIO()
    counts = source.runs["rows"].astype(np.int64)
    ends = np.cumsum(counts).tolist()
    counts[-1] = (counts[-1] + 1) // 2
    middle = int(counts.sum())
    writer = SegmentWriter(file, CODEC)
    writer.begin_runs([QUEUES[spec.queue] for spec in source.specs], source.runs)
    writer.add_rows(part_of(source.rows, 0, middle), QUEUES, counts)
    bounds = [0, *ends[:-1], middle]
    for run, (first, last) in enumerate(pairwise(bounds)):
        if source.specs[run].kind != RunKind.LMQ:
            records, sizes = records_of(source, first, last)
            writer.add_records(records, sizes, run)
    if middle < ends[-1]:
        writer.add_rows(part_of(source.rows, middle, ends[-1]), QUEUES)
        writer.add_records(*records_of(source, middle, ends[-1]))
    done = writer.finish(META)
    assert file.getvalue() + done.keys + done.tail == b"".join(
        bytes(piece) for piece in source.encode(CODEC).body
    )


def test_stored_blocks_stay_as_they_are() -> None:
    """Blocks of the encoder's object, handed over as they are stored, without a file and with one."""
    source = build(QUEUES[:1], [RunSpec(0, 5, [RowSpec(bytes([n]) * 40_000) for n in range(9)])])
    encoded = b"".join(bytes(piece) for piece in source.encode(CODEC).body)
    index = SegmentIndex("k", len(encoded), encoded)
    stored = encoded[HEADER_BYTES : index.key_span[0]]
    for file in (io.BytesIO(), None):
        writer = SegmentWriter(file, CODEC)
        writer.begin_runs(QUEUES[:1], source.runs[:1])
        writer.add_rows(source.rows, QUEUES)
        writer.add_stored(
            index.blocks[:2], [] if file is None else [stored[: int(index.blocks["stored_bytes"][:2].sum())]]
        )
        writer.add_stored(
            index.blocks[2:], [] if file is None else [stored[int(index.blocks["stored_bytes"][:2].sum()) :]]
        )
        done = writer.finish(META)
        begin = encoded[: index.key_span[0]] if file is None else file.getvalue()
        assert begin + done.keys + done.tail == encoded


def test_parts_that_contradict_each_other_are_refused() -> None:
    source = segment(1, 50)
    run, rows = source.runs[0], part_of(source.rows, 0, int(source.runs["rows"][0]))
    writer = SegmentWriter(io.BytesIO(), CODEC)
    writer.begin_runs(QUEUES[:1], run.reshape(1))
    with pytest.raises(ValueError, match="the next rows begin elsewhere"):
        writer.add_rows(part_of(source.rows, 1, 3), QUEUES)
    writer.add_rows(rows, QUEUES)
    with pytest.raises(ValueError, match="bytes of records"):
        writer.add_records([b"short"], rows.size)
    with pytest.raises(ValueError, match="differ in bytes"):
        writer.finish(META)
    late = run.copy()
    late["min_phys"] += 1
    writer.begin_runs(QUEUES[:1], late.reshape(1))
    with pytest.raises(ValueError, match="before the begin"):
        writer.add_rows(rows, QUEUES)
