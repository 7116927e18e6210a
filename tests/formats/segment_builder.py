"""Builds what an uploader hands to ``encode_segment``, from a short description of runs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered.formats.segment import (
    BlockCodec,
    EncodedSegment,
    RowTable,
    SegmentMeta,
    encode_segment,
)
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import RUN_DTYPE, RunKind, Table

META = SegmentMeta("cluster", "broker", 3, 7, 1, 41, 0, 1 << 40, 1_700_000_000_000, "test")


@dataclass(frozen=True)
class RowSpec:
    """One row. ``content`` is the record's bytes; of an LMQ row only its length counts."""

    content: bytes
    tags_code: int = 0
    store_timestamp: int = 1_700_000_000_000
    gap_before: int = 0
    inner_num: int = 1
    keys: Sequence[int] = ()
    parent: int = 0
    parent_queue_offset: int = 0


@dataclass(frozen=True)
class RunSpec:
    """Rows of ``queues[queue]`` from ``base`` on."""

    queue: int
    base: int
    rows: Sequence[RowSpec]
    kind: RunKind = RunKind.PLAIN
    base_byte: int = 0
    phys: int = 0


@dataclass(frozen=True)
class Segment:
    """Input and description of a segment."""

    queues: Sequence[QueueKey]
    specs: Sequence[RunSpec]
    runs: Table
    rows: RowTable
    arena: NDArray[np.uint8]

    def encode(self, codec: BlockCodec | None = None, meta: SegmentMeta = META) -> EncodedSegment:
        """The object."""
        return encode_segment(meta, self.queues, self.runs, self.rows, self.arena, codec or BlockCodec())

    def content(self, run: int) -> bytes:
        """All records of a run, one behind the other."""
        return b"".join(row.content for row in self.specs[run].rows)


def build(
    queues: Sequence[QueueKey], specs: Sequence[RunSpec], *, shuffle_seed: int | None = None
) -> Segment:
    """Arrange rows as a log would have them: the arena order is that of the runs, or shuffled."""
    stored = [
        (run, row)
        for run, spec in enumerate(specs)
        for row in range(len(spec.rows))
        if spec.kind != RunKind.LMQ
    ]
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(stored)
    place: dict[tuple[int, int], int] = {}
    arena = bytearray(b"\xee" * 3)
    for run, row in stored:
        place[run, row] = len(arena)
        arena += specs[run].rows[row].content
    runs = np.zeros(len(specs), RUN_DTYPE)
    lists: dict[str, list[int]] = {name: [] for name in RowTable.__dataclass_fields__}
    for index, spec in enumerate(specs):
        _add_run(runs[index : index + 1], index, spec, place, lists)
    kinds = {
        "size": np.int32,
        "inner_num": np.int32,
        "key_count": np.uint16,
        "parent": np.int32,
        "key_hashes": np.uint64,
    }
    rows = RowTable(**{name: np.array(values, kinds.get(name, np.int64)) for name, values in lists.items()})
    return Segment(queues, specs, runs, rows, np.frombuffer(bytes(arena), np.uint8))


def _add_run(
    run: Table, index: int, spec: RunSpec, place: dict[tuple[int, int], int], lists: dict[str, list[int]]
) -> None:
    is_lmq = spec.kind == RunKind.LMQ
    offset, phys = spec.base, spec.phys
    first_phys = spec.phys + spec.rows[0].gap_before
    for number, row in enumerate(spec.rows):
        phys += row.gap_before
        lists["position"].append(-1 if is_lmq else place[index, number])
        lists["size"].append(len(row.content))
        lists["tags_code"].append(row.tags_code)
        lists["store_timestamp"].append(row.store_timestamp)
        lists["phys"].append(phys)
        lists["queue_offset"].append(offset)
        lists["inner_num"].append(row.inner_num)
        lists["key_count"].append(len(row.keys))
        lists["key_hashes"].extend(row.keys)
        lists["parent"].append(row.parent if is_lmq else -1)
        lists["parent_queue_offset"].append(row.parent_queue_offset if is_lmq else -1)
        offset += row.inner_num
        phys += len(row.content)
    stamps = [row.store_timestamp for row in spec.rows]
    values = {
        "queue": spec.queue,
        "ordinal": index,
        "kind": spec.kind,
        "base_queue_offset": spec.base,
        "end_queue_offset": offset,
        "rows": len(spec.rows),
        "base_byte": 0 if is_lmq else spec.base_byte,
        "byte_count": 0 if is_lmq else sum(len(row.content) for row in spec.rows),
        "min_store_timestamp": min(stamps),
        "max_store_timestamp": max(stamps),
        "min_phys": first_phys,
        "end_phys": phys,
    }
    for name, value in values.items():
        run[name] = value


def whole(encoded: EncodedSegment) -> bytes:
    """The object's bytes."""
    return b"".join(bytes(piece) for piece in encoded.body)


def opened(encoded: EncodedSegment, key: str = "data/x.so") -> SegmentIndex:
    """The index of an encoded segment, from its tail."""
    return SegmentIndex(key, encoded.size_bytes, whole(encoded)[-encoded.tail_bytes :])


def read_run(index: SegmentIndex, data: bytes, run: int) -> bytes:
    """All records of a run, through its blocks."""
    span = index.block_span(run, 0, int(index.runs["rows"][run]))
    raw = index.decode_blocks(span, data[span.offset : span.offset + span.length]).tobytes()
    return raw[-span.raw_offset : int(index.runs["byte_count"][run]) - span.raw_offset]
