"""A damaged object gives a CorruptionError or the right bytes; never wrong data, zero-fill or a huge allocation."""

import random
from contextlib import suppress
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archive.uncataloged import open_uncataloged
from tests.formats.segment_builder import RowSpec, RunSpec, Segment, build, whole
from tests.peak_memory import peak_below
from tests.sweeps import examples
from tiered.archive.segment_reader import SegmentReader
from tiered.errors import CorruptionError
from tiered.formats import segment_layout
from tiered.formats.container import decode_container, encode_container
from tiered.formats.segment import BlockCodec
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import (
    FOOTER_KIND,
    PART_KIND,
    TRAILER_BYTES,
    decode_trailer,
    encode_trailer,
)
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, begins
from tiered.object_store.memory import MemoryStore

KEY = "data/00/topic/0/0/00000000000000000005-1-1.so"
QUEUES = [QueueKey("topic", 0, 0), QueueKey("batch", 1, 0), QueueKey("%LMQ%a", 0, 0)]
ROWS = [
    RowSpec(b'{"n": %d, "text": "lorem ipsum"}' % number, tags_code=number, keys=(number, 5))
    for number in range(60)
]
NOISE = [RowSpec(random.Random(number).randbytes(90), inner_num=number + 1) for number in range(8)]
LMQ = [RowSpec(ROWS[number].content, parent=0, parent_queue_offset=5 + number) for number in (1, 4, 30)]
SEGMENT = build(
    QUEUES,
    [RunSpec(0, 5, ROWS), RunSpec(1, 0, NOISE, RunKind.BATCH), RunSpec(2, 7, LMQ, RunKind.LMQ)],
    shuffle_seed=1,
)
SINGLE = whole(SEGMENT.encode(BlockCodec(block_bytes=400)))
"""Its tail has one footer, that of DATA has parts."""
with patch.object(segment_layout, "PART_RUNS", 2):
    ENCODED = SEGMENT.encode(BlockCodec(block_bytes=400))
DATA = whole(ENCODED)


def _everything(segment: Segment, reader: SegmentReader) -> list[object]:
    """All a reader can say, as comparable values."""
    found: list[object] = [reader.index.runs.tolist(), reader.queues]
    for run, spec in enumerate(segment.specs):
        rows = reader.row_columns(run)
        found.append([getattr(rows, name).tolist() for name in rows.__dataclass_fields__])
        if spec.kind != RunKind.LMQ:
            records = reader.read_blocks(run, 1, len(rows) - 1)
            found.append([records.data.tobytes(), records.starts.tolist(), records.sizes.tolist()])
    keys = reader.key_hashes()
    return [*found, keys.counts.tolist(), keys.hashes.tolist()]


def _open(data: bytes, *, known: bool) -> SegmentReader:
    store = MemoryStore()
    store.put_if_absent(KEY, [data])
    if known:
        return SegmentReader.open(store, KEY, size_bytes=len(DATA), tail_bytes=ENCODED.tail_bytes)
    return open_uncataloged(store, KEY)


EXPECTED = _everything(SEGMENT, _open(DATA, known=True))


def _check(damaged: bytes, *, known: bool) -> None:
    with peak_below(16 << 20):
        try:
            assert _everything(SEGMENT, _open(damaged, known=known)) == EXPECTED
        except CorruptionError as error:
            assert KEY in str(error)


def test_an_undamaged_object_opens_both_ways() -> None:
    assert _everything(SEGMENT, _open(DATA, known=False)) == EXPECTED


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, len(DATA) * 8 - 1), st.booleans())
def test_a_flipped_bit(bit: int, known: bool) -> None:
    damaged = bytearray(DATA)
    damaged[bit // 8] ^= 1 << bit % 8
    _check(bytes(damaged), known=known)


def test_every_bit_of_the_trailer_and_before() -> None:
    for position in range(len(DATA) - 100, len(DATA)):
        for bit in range(8):
            damaged = bytearray(DATA)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptionError):
                _open(bytes(damaged), known=bit % 2 == 0)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, len(DATA) - 1), st.booleans())
def test_a_truncated_object(length: int, known: bool) -> None:
    with pytest.raises(CorruptionError):
        _open(DATA[:length], known=known)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, len(DATA)), st.binary(min_size=1, max_size=64), st.booleans())
def test_bytes_put_in_the_middle(at: int, extra: bytes, known: bool) -> None:
    _check(DATA[:at] + extra + DATA[at:], known=known)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_an_overwritten_range(data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(DATA) - 1))
    length = data.draw(st.integers(1, min(600, len(DATA) - begin)))
    filler = data.draw(st.sampled_from([b"\0", b"\xff", b"RMQT"])) * length
    damaged = DATA[:begin] + filler[:length] + DATA[begin + length :]
    _check(damaged, known=data.draw(st.booleans()))


def test_two_blocks_exchanged_are_noticed() -> None:
    """Whole, valid blocks in the wrong place: their checksums are theirs, not their places'."""
    reader = _open(DATA, known=True)
    first, second = (reader.index.block_span(1, row, row + 1) for row in (0, 5))
    assert first.length == second.length
    damaged = bytearray(DATA)
    damaged[first.offset : first.offset + first.length] = DATA[second.offset : second.offset + second.length]
    with pytest.raises(CorruptionError, match="CRC32C"):
        _everything(SEGMENT, _open(bytes(damaged), known=True))


def test_an_empty_object_and_one_of_zeros() -> None:
    for data in (b"", bytes(10), bytes(len(DATA))):
        with pytest.raises(CorruptionError):
            _open(data, known=False)


NUMBERS = st.one_of(
    st.integers(-3, 5), st.sampled_from([-(1 << 63), (1 << 62), (1 << 63) - 1, (1 << 32) - 1])
)


@settings(max_examples=examples(400))
@given(st.data())
def test_a_footer_that_lies_behind_valid_checksums(data: st.DataObject) -> None:
    """Not damage but malice or a defect: no crash, no read outside, no allocation for what is only claimed."""
    true = data.draw(st.sampled_from([SINGLE, DATA]))
    trailer = decode_trailer(true, len(true), source=KEY)
    footer = decode_container(true[trailer.footer_offset : -TRAILER_BYTES], FOOTER_KIND, source=KEY)
    parts, table = [], footer.tables.get("parts")
    if table is not None:
        first = trailer.footer_offset - int(table["stored_bytes"].sum())
        bounds = pairwise((first + begins(table["stored_bytes"])).tolist())
        parts = [decode_container(true[begin:end], PART_KIND, source=KEY) for begin, end in bounds]
    tables = [one for container in (footer, *parts) for one in container.tables.values() if len(one)]
    for _ in range(data.draw(st.integers(1, 3))):
        table = tables[data.draw(st.integers(0, len(tables) - 1))]
        column = data.draw(st.sampled_from(table.dtype.names or ()))
        limits = np.iinfo(table.dtype[column])
        value = min(max(data.draw(NUMBERS), limits.min), limits.max)
        table[column][data.draw(st.integers(0, len(table) - 1))] = value
    header = footer.header
    if data.draw(st.booleans()):
        header["keys"][data.draw(st.sampled_from(["count", "stored_counts_bytes", "crc32c"]))] = data.draw(
            NUMBERS
        )
    encoded_parts = [encode_container(PART_KIND, part.header, part.tables) for part in parts]
    before = true[: trailer.footer_offset]
    if parts:
        before = true[:first] + b"".join(encoded_parts)
        if data.draw(st.booleans()):
            footer.tables["parts"]["stored_bytes"] = list(map(len, encoded_parts))
    encoded = encode_container(FOOTER_KIND, header, footer.tables)
    lying = before + encoded + encode_trailer(trailer.tail_offset, len(before), encoded)
    # ValueError, IndexError: the caller's own expectation of what is in the object does not hold.
    with peak_below(16 << 20), suppress(CorruptionError, ValueError, IndexError):
        part = SegmentIndex(KEY, len(lying), lying, data.draw(st.integers(0, 3)))
        for run in range(part.first_run, part.first_run + len(part)):
            part.row_columns(run)
            if part.byte_count_of(run):
                part.block_span(run, 0, 1)
        _everything(SEGMENT, _open(lying, known=False))
