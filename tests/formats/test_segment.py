"""What goes into a segment comes out again, whatever the columns; what contradicts itself does not go in."""

import dataclasses
import random
from unittest.mock import patch

import fastcrc
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.segment_builder import META, RowSpec, RunSpec, Segment, build, opened, read_run, whole
from tests.sweeps import examples
from tiered.errors import CorruptionError, UnsupportedFormatError
from tiered.formats import segment_layout
from tiered.formats.segment import SHARED_BLOCK_BYTES, BlockCodec, SegmentScratch, encode_segment
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import (
    CODEC_RAW,
    HEADER_BYTES,
    PAGE_ROWS,
    TRAILER_BYTES,
    check_header,
    decode_trailer,
)
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind

QUEUES = [
    QueueKey("topic", 0, 0),
    QueueKey("topic", 1, 2),
    QueueKey("%LMQ%light", 0, 0),
    QueueKey("日志", 7, 1),
]
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
U64 = st.integers(0, (1 << 64) - 1)
COLUMNS = (
    "size",
    "tags_code",
    "store_timestamp",
    "phys",
    "queue_offset",
    "inner_num",
    "parent",
    "parent_queue_offset",
)


@st.composite
def _content(draw: st.DrawFn) -> bytes:
    size = draw(st.one_of(st.integers(1, 40), st.integers(1, 5000)))
    if draw(st.booleans()):
        return random.Random(size).randbytes(size)
    return (b"body " * (size // 5 + 1))[:size]


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    specs = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(list(RunKind)))
        row = st.builds(
            RowSpec,
            content=_content(),
            tags_code=I64,
            store_timestamp=I64,
            gap_before=st.integers(0, 1 << 40),
            inner_num=st.integers(1, 1000) if kind == RunKind.BATCH else st.just(1),
            keys=st.lists(U64, max_size=3),
            parent=st.integers(0, len(QUEUES) - 1),
            parent_queue_offset=st.integers(0, (1 << 63) - 1),
        )
        specs.append(
            RunSpec(
                queue=draw(st.integers(0, len(QUEUES) - 1)),
                base=draw(st.integers(0, 1 << 60)),
                rows=draw(st.lists(row, min_size=1, max_size=12)),
                kind=kind,
                base_byte=draw(st.integers(0, 1 << 60)),
                phys=draw(st.integers(0, 1 << 60)),
            )
        )
    return build(QUEUES, specs, shuffle_seed=draw(st.one_of(st.none(), st.integers(0, 100))))


def _assert_same(segment: Segment, index: SegmentIndex, data: bytes) -> None:
    queues = [segment.queues[spec.queue] for spec in segment.specs]
    assert list(map(index.queue_of, range(len(queues)))) == queues
    for name in set(segment.runs.dtype.names or ()) - {"queue"}:
        assert index.runs[name].tolist() == segment.runs[name].tolist(), name
    first = 0
    for run, spec in enumerate(segment.specs):
        columns = index.row_columns(run)
        end = first + len(spec.rows)
        for name in set(COLUMNS) - {"parent"}:
            assert getattr(columns, name).tolist() == getattr(segment.rows, name)[first:end].tolist(), name
        parents = columns.parent.tolist(), segment.rows.parent[first:end].tolist()
        assert [at >= 0 and index.queues[at] for at in parents[0]] == [
            at >= 0 and segment.queues[at] for at in parents[1]
        ]
        first = end
        if spec.kind != RunKind.LMQ:
            assert read_run(index, data, run) == segment.content(run)
            assert columns.position.tolist() == (np.cumsum(columns.size) - columns.size).tolist()
    offset, length = index.key_span
    keys = index.decode_keys(data[offset : offset + length])
    assert keys.counts.tolist() == segment.rows.key_count.tolist()
    assert keys.hashes.tolist() == segment.rows.key_hashes.tolist()


@settings(max_examples=examples(120), deadline=None)
@given(segments(), st.integers(1, 6000), st.integers(1, 2), st.integers(1, 6))
def test_everything_comes_back(segment: Segment, block_bytes: int, threads: int, part_runs: int) -> None:
    with patch.object(segment_layout, "PART_RUNS", part_runs):
        encoded = segment.encode(BlockCodec(block_bytes=block_bytes, threads=threads))
    data = whole(encoded)
    assert len(data) == encoded.size_bytes
    assert (encoded.rows, encoded.raw_bytes) == (len(segment.rows), int(segment.runs["byte_count"].sum()))
    assert len(data) - decode_trailer(data, len(data), source="k").tail_offset == encoded.tail_bytes
    check_header(data, opened(encoded).version, source="k")
    index = opened(encoded)
    assert index.meta == META
    _assert_same(segment, index, data)


def _plain(rows: int, content: bytes = b"x" * 100, **changes: int) -> RunSpec:
    return RunSpec(0, 10, [RowSpec(content)] * rows, **changes)  # type: ignore[arg-type]


def test_a_long_run_spans_pages_and_blocks() -> None:
    rows = [
        RowSpec(b"m%06d" % number, tags_code=number % 3, keys=(number,))
        for number in range(3 * PAGE_ROWS + 5)
    ]
    segment = build(QUEUES, [RunSpec(1, 5, rows), RunSpec(0, 0, [RowSpec(b"other")])], shuffle_seed=4)
    encoded = segment.encode(BlockCodec(block_bytes=4000))
    index = opened(encoded)
    assert len(index.pages) == 4
    assert int(index.runs["blocks"][0]) > 10
    _assert_same(segment, index, whole(encoded))


def test_any_rows_of_a_run_are_found_in_few_blocks() -> None:
    rows = [RowSpec(b"m%06d" % number) for number in range(1000)]
    encoded = build(QUEUES, [_plain(3), RunSpec(1, 5, rows)]).encode(BlockCodec(block_bytes=70))
    index, data = opened(encoded), whole(encoded)
    assert int(index.runs["blocks"][1]) == 100
    span = index.block_span(1, 25, 41)
    assert (span.first_row, span.end_row) == (20, 50)
    found = index.decode_blocks(span, data[span.offset : span.offset + span.length]).tobytes()
    assert found == b"".join(b"m%06d" % number for number in range(20, 50))
    pieces = index.split_span(1, span, stored_bytes_max=1)
    assert [(piece.first_row, piece.end_row) for piece in pieces] == [(20, 30), (30, 40), (40, 50)]
    numbers = [1, 2, 30, 100]
    singles = index.spans_of_single_blocks(1, numbers)
    assert singles == [index.span_of_blocks(1, number, number + 1) for number in numbers]
    stored = [memoryview(data)[one.offset : one.offset + one.length] for one in singles]
    decoded = index.decode_each(numbers, stored, zstandard.ZstdDecompressor())
    assert [bytes(one) for one in decoded if isinstance(one, np.ndarray)] == [
        index.decode_blocks(one, bytes_).tobytes() for one, bytes_ in zip(singles, stored, strict=True)
    ]


def test_blocks_decoded_together_fail_alone() -> None:
    content = random.Random(1).randbytes(50)
    rows = [RowSpec(content + bytes(100) if number % 4 else content) for number in range(40)]
    encoded = build(QUEUES, [RunSpec(1, 5, rows)]).encode(BlockCodec(block_bytes=300))
    index, data = opened(encoded), bytearray(whole(encoded))
    numbers = list(range(len(index.blocks)))
    singles = index.spans_of_single_blocks(0, numbers)
    wrong = {2, 5}
    for number in wrong:
        data[singles[number].offset] ^= 1
    stored = [memoryview(data)[one.offset : one.offset + one.length] for one in singles]
    # One that passes its checksum, and does not decompress.
    index.blocks["crc32c"][5] = fastcrc.crc32.iscsi(bytes(stored[5]))
    decoded = index.decode_each(numbers, stored, zstandard.ZstdDecompressor())
    assert {at for at, one in enumerate(decoded) if isinstance(one, CorruptionError)} == wrong
    assert all(f"block {at} [{singles[at].offset}" in str(decoded[at]) for at in wrong)
    assert sum(len(one) for one in decoded if isinstance(one, np.ndarray)) == sum(
        span.raw_bytes for span in singles if span.first_block not in wrong
    )


def test_small_runs_share_blocks_and_each_reads_its_own() -> None:
    runs = [
        RunSpec(n % 2, 100 * n, [RowSpec(b"%06d" % n * 50) for _ in range(5 + n % 7)]) for n in range(400)
    ]
    segment = build(QUEUES, [*runs, _plain(3000)])
    encoded = segment.encode()
    index = opened(encoded)
    assert len(index.blocks) < 40 < int((index.runs["blocks"] == 0).sum())
    assert index.blocks["raw_bytes"][:-2].max() <= SHARED_BLOCK_BYTES
    _assert_same(segment, index, whole(encoded))


def test_an_oversized_record_makes_an_oversized_block() -> None:
    big = random.Random(1).randbytes(20 << 20)
    segment = build(QUEUES, [RunSpec(0, 0, [RowSpec(b"a"), RowSpec(big), RowSpec(b"b")])])
    encoded = segment.encode(BlockCodec(block_bytes=1000))
    index = opened(encoded)
    assert index.blocks["rows"].tolist() == [1, 1, 1]
    assert read_run(index, whole(encoded), 0) == segment.content(0)


def test_a_block_that_does_not_shrink_is_stored_raw() -> None:
    segment = build(QUEUES, [RunSpec(0, 0, [RowSpec(random.Random(2).randbytes(50_000))]), _plain(50)])
    index = opened(segment.encode())
    assert index.blocks["codec"].tolist()[0] == CODEC_RAW
    assert index.blocks["stored_bytes"].tolist()[0] == 50_000
    assert index.blocks["codec"].tolist()[1] != CODEC_RAW


def test_a_segment_of_lmqs_alone_has_no_blocks() -> None:
    segment = build(QUEUES, [RunSpec(2, 0, [RowSpec(b"1234", parent=1, parent_queue_offset=9)], RunKind.LMQ)])
    encoded = segment.encode()
    assert (len(opened(encoded).blocks), encoded.raw_bytes) == (0, 0)
    _assert_same(segment, opened(encoded), whole(encoded))


def test_equal_input_gives_equal_bytes_with_a_scratch_used_before() -> None:
    scratch = SegmentScratch()
    segment, other = build(QUEUES, [_plain(40)]), build(QUEUES, [_plain(3, b"z" * 9999)])
    first = segment.encode()
    encode_segment(META, QUEUES, other.runs, other.rows, other.arena, BlockCodec(), scratch)
    again = encode_segment(META, QUEUES, segment.runs, segment.rows, segment.arena, BlockCodec(), scratch)
    encode_segment(META, QUEUES, other.runs, other.rows, other.arena, BlockCodec(), scratch)
    assert whole(again) == whole(first), "a body must not alias the scratch"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 99),
        ("size", 0),
        ("queue_offset", 3),
        ("inner_num", 2),
        ("inner_num", 0),
        ("position", -1),
        ("position", 1 << 40),
    ],
)
def test_rows_that_contradict_their_run_are_refused(field: str, value: int) -> None:
    segment = build(QUEUES, [_plain(3)])
    getattr(segment.rows, field)[1] = value
    with pytest.raises(ValueError, match="row"):
        segment.encode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 2),
        ("end_queue_offset", 99),
        ("byte_count", 1),
        ("queue", 9),
        ("kind", RunKind.LMQ),
        ("rows", 0),
    ],
)
def test_runs_that_contradict_their_rows_are_refused(field: str, value: int) -> None:
    segment = build(QUEUES, [_plain(3)])
    segment.runs[field][0] = value
    with pytest.raises(ValueError):
        segment.encode()


def test_a_parent_outside_the_queues_is_refused() -> None:
    spec = RunSpec(2, 0, [RowSpec(b"1234", parent=len(QUEUES))], RunKind.LMQ)
    with pytest.raises(ValueError, match="row 0"):
        build(QUEUES, [spec]).encode()


def test_keys_must_be_as_many_as_their_counts_say() -> None:
    segment = build(QUEUES, [_plain(3)])
    rows = dataclasses.replace(segment.rows, key_hashes=np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="key"):
        encode_segment(META, QUEUES, segment.runs, rows, segment.arena, BlockCodec())


def test_a_newer_major_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(segment_layout, "FORMAT_MAJOR", 2)
        encoded = build(QUEUES, [_plain(3)]).encode()
    with pytest.raises(UnsupportedFormatError, match=r"segment has format 2\.0, and this program reads 1\.x"):
        opened(encoded)


def test_header_and_trailer_have_fixed_places() -> None:
    data = whole(build(QUEUES, [_plain(3)]).encode())
    assert data[:8] == b"RMQTSEG\n"
    assert data[-16:-8] == b"RMQTSEGE"
    assert int.from_bytes(data[-8:], "little") == len(data)
    assert (HEADER_BYTES, TRAILER_BYTES) == (16, 48)
