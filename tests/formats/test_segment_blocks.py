"""Blocks packed on threads: the same bytes as on one, and the arena is not read after packing."""

import threading
from itertools import pairwise

import fastcrc
import numpy as np
import pytest
import zstandard

from tests.formats.segment_builder import META, RowSpec, RunSpec, build
from tiered.formats import segment
from tiered.formats.segment import (
    KEPT_BYTES,
    PIECE_BYTES,
    BlockCodec,
    BlockPacker,
    Records,
    SegmentScratch,
    encode_segment,
)
from tiered.formats.segment_layout import BLOCK_DTYPE, CODEC_RAW, CODEC_ZSTD
from tiered.kernels.gather import gather_records
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table

QUEUES = [QueueKey("topic", 0, 0), QueueKey("topic", 1, 0), QueueKey("%LMQ%light", 0, 0)]
RECORD_BYTES = 70_000


def _arena(records: int, *, seed: int = 0) -> Records:
    """Text and noise by turns, in no order."""
    random = np.random.default_rng(seed)
    arena = np.frombuffer(b"some words, again " * (records * RECORD_BYTES // 18 + 1), np.uint8).copy()
    for number in range(0, records, 2):
        begin = number * RECORD_BYTES
        arena[begin : begin + RECORD_BYTES] = random.integers(0, 256, RECORD_BYTES, np.uint8)
    position = random.permutation(records).astype(np.int64) * RECORD_BYTES
    return Records(arena, position, np.full(records, RECORD_BYTES, np.int32))


def _blocks(rows: list[int]) -> Table:
    blocks = np.zeros(len(rows), BLOCK_DTYPE)
    blocks["rows"] = rows
    blocks["raw_bytes"] = blocks["rows"].astype(np.uint64) * RECORD_BYTES
    return blocks


def _content(records: Records, block: int, rows: list[int]) -> bytes:
    mine = records.position[sum(rows[:block]) : sum(rows[: block + 1])].tolist()
    return b"".join(records.arena[at : at + RECORD_BYTES].tobytes() for at in mine)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_block_is_stored_whole_whatever_the_threads(threads: int) -> None:
    # Among them is a block larger than a piece, and than what a thread keeps.
    rows = [
        1,
        3,
        7,
        40,
        1,
        1,
        1,
        1,
        1,
        1,
        15,
        2,
    ]
    assert rows[2] * RECORD_BYTES < PIECE_BYTES < KEPT_BYTES < rows[3] * RECORD_BYTES
    records, blocks = _arena(sum(rows)), _blocks(rows)
    packer = BlockPacker(1, threads)
    with packer.packing(blocks, records) as packed:
        data = b"".join([piece.result() for piece in packed])
    packer.close()
    assert len(data) == int(blocks["stored_bytes"].sum())
    for number, (begin, end) in enumerate(pairwise([0, *np.cumsum(blocks["stored_bytes"]).tolist()])):
        block, raw = data[begin:end], _content(records, number, rows)
        is_raw = blocks["codec"][number] == CODEC_RAW
        assert raw == (block if is_raw else zstandard.ZstdDecompressor().decompress(block))
        assert len(block) <= len(raw)
        assert fastcrc.crc32.iscsi(block) == blocks["crc32c"][number]
    assert set(blocks["codec"].tolist()) == {CODEC_RAW, CODEC_ZSTD}


def test_a_record_outside_the_arena_is_refused_by_its_row() -> None:
    rows = [16] * 6
    records = _arena(sum(rows))
    records.position[50] = len(records.arena) - 5
    with (
        pytest.raises(ValueError, match="row 50"),
        BlockPacker(1, 2).packing(_blocks(rows), records) as packed,
    ):
        [piece.result() for piece in packed]


def test_nothing_reads_the_arena_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is filled for the next cycle as soon as this one is cancelled."""
    reading, most = set[int](), [0]
    lock = threading.Lock()

    def watched(*arguments: object) -> object:
        with lock:
            reading.add(threading.get_ident())
            most[0] += 1
        row = gather_records(*arguments)  # type: ignore[arg-type]
        with lock:
            reading.discard(threading.get_ident())
        return row

    monkeypatch.setattr(segment, "gather_records", watched)
    rows = [16] * 40
    with pytest.raises(RuntimeError), BlockPacker(1, 2).packing(_blocks(rows), _arena(sum(rows))):
        raise RuntimeError("the columns could not be encoded")
    before = most[0]
    assert not reading
    threading.Event().wait(0.05)
    assert most[0] == before, "a piece began after the end"


def test_threads_and_scratch_change_no_byte_of_an_object() -> None:
    rows = [RowSpec(b"%d " % number * 900, keys=(number,)) for number in range(1500)]
    lmq = [RowSpec(b"1234", parent=0, parent_queue_offset=at) for at in range(3)]
    runs = [RunSpec(0, 0, rows), RunSpec(2, 0, lmq, RunKind.LMQ), RunSpec(1, 5, rows[:700])]
    segment = build(QUEUES, runs, shuffle_seed=3)
    once = segment.encode(BlockCodec(block_bytes=100_000, threads=1))
    scratch = SegmentScratch()
    for threads in (3, 2, 2):
        codec = BlockCodec(block_bytes=100_000, threads=threads)
        again = encode_segment(META, QUEUES, segment.runs, segment.rows, segment.arena, codec, scratch)
        assert b"".join(again.body) == b"".join(once.body)
    scratch.close()
