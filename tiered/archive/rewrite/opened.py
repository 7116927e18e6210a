"""What is taken out of opened sources: rows, keys, stored blocks and records of ranges of runs.

A block that only one range uses stays as it is stored. Any other one is decoded, one at a time, and its records are
distributed over the ranges. Small objects are opened together, and all work is on the tables of all of them: a call for
each would cost more than its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered.archive.rewrite.plan import RANGE_DTYPE, Candidates, Selection
from tiered.archive.rewrite.spool import CHUNK_DTYPE, FOUND_DTYPE, ROW_DTYPE, FoundRanges
from tiered.errors import CorruptionError
from tiered.formats.part_rows import is_inside
from tiered.formats.segment import SHARED_BLOCK_BYTES
from tiered.formats.segment_index import (
    CATALOG_RUN_FIELDS,
    KeySection,
    SegmentBounds,
    SegmentIndex,
)
from tiered.formats.segment_layout import BLOCK_DTYPE, SEGMENT_RUN_DTYPE
from tiered.formats.stored_block import expand_block
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table, begins, concatenated, picked, positions

COPIED_RAW_BYTES_MIN = SHARED_BLOCK_BYTES // 2
"""Smaller blocks are packed again, except at an object's end: an object of many small blocks is slow to read."""

WANTED_DTYPE = np.dtype([*RANGE_DTYPE.descr, ("iteration", "<i4"), ("ordinal", "<i8")])
"""A range, its iteration, and its number there."""
PLACE_DTYPE = np.dtype(
    [
        *WANTED_DTYPE.descr,
        ("in_sources", "<i8"),  # ordinal of the run
        ("first_row", "<i8"),
        ("end_row", "<i8"),  # in the object's run
        ("first_block", "<i8"),
        ("end_block", "<i8"),  # in the sources; equal for an LMQ
        ("raw_begin", "<i8"),
        ("raw_end", "<i8"),  # in the raw bytes of the sources
        ("begin_byte", "<i8"),  # in the catalog's run
        ("base_queue_offset", "<i8"),  # where its first row begins to span; -1: not known yet
    ]
)
"""Where the rows and blocks of a range are."""


SOURCE_RUN_DTYPE = np.dtype(
    [
        *((name, SEGMENT_RUN_DTYPE[name]) for name in CATALOG_RUN_FIELDS),
        ("queue", "<u8"),  # its hash
    ]
)
"""What is checked of a run, and needed of it."""
_OFFSETS = ("base_queue_offset", "end_queue_offset")
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class SourceRows(NamedTuple):
    """Consecutive rows (ROW_DTYPE) of an object, across runs, and their key hashes, row after row."""

    table: Table
    hashes: NDArray[np.uint64]


class Parents:
    """Numbers the parents of LMQ rows (the queues that hold their messages) across objects: first the queues of the
    candidates, then others as they appear."""

    def __init__(self, queues: Sequence[QueueKey]) -> None:
        self.queues: list[QueueKey] = list(queues)
        self._numbers = {queue: number for number, queue in enumerate(self.queues)}

    def numbers_of(self, queues: Sequence[QueueKey], parent: NDArray[Any]) -> NDArray[np.int32]:
        """The numbers here of the parent queues of LMQ rows, which ``parent`` gives as indexes into the ``queues`` of
        one object; -1, of other rows, stays. New queues are added. Raises CorruptionError for an index outside them."""
        if int(parent.max(initial=-1)) >= len(queues):
            raise CorruptionError(
                "an LMQ row refers to a parent queue that the footer of its object does not list"
            )
        numbers = np.full(len(queues) + 1, -1, np.int32)  # the last is for parent -1
        for local in np.unique(parent[parent >= 0]).tolist():
            number = self._numbers.setdefault(queues[local], len(self.queues))
            if number == len(self.queues):
                self.queues.append(queues[local])
            numbers[local] = number
        found: NDArray[np.int32] = numbers[parent]
        return found


class OpenedSource:
    """An open object. ``bounds`` and ``first_row`` end with the end of the last run; ``parent`` of LMQ rows is a number
    of ``parents``."""

    def __init__(self, index: SegmentIndex, keys: KeySection, parents: Parents) -> None:
        """``index`` and ``keys``: the object's footer and key section; ``parents`` numbers parent queues. In ``runs``
        the queue is a hash of its name, which is the same in all sources."""
        self._index, self._keys, self._parents = index, keys, parents
        self.key, self.blocks, self.block_offsets = index.key, index.blocks, index.block_offsets[:-1]
        self.first_row, self.bounds = index.first_row, index.bounds
        self.runs = np.empty(len(index.runs), SOURCE_RUN_DTYPE)
        for name in CATALOG_RUN_FIELDS:
            self.runs[name] = index.runs[name]
        queues = picked(index.queue_table, index.runs["queue"])
        self.runs["queue"] = _hashes(index.topics, queues["topic"], queues["queue_id"], queues["generation"])

    def rows(self, first: int, end: int) -> SourceRows:
        """The rows from ``first`` up to, but not including, ``end`` of the object, with the hashes of their keys."""
        columns = self._index.stored_columns(first, end)
        table = np.empty(end - first, ROW_DTYPE)
        for name, column in zip(ROW_DTYPE.names or (), columns, strict=False):
            table[name] = column
        if int(columns[5].max(initial=-1)) >= 0:
            table["parent"] = self._parents.numbers_of(self._index.queues, columns[5])
        table["key_count"] = counts = self._keys.counts[first:end]
        begin = int(self._keys.counts[:first].sum(dtype=np.int64))
        return SourceRows(table, self._keys.hashes[begin : begin + int(counts.sum(dtype=np.int64))])


class BlockBytes(Protocol):
    """Stored bytes of an object."""

    def at(self, offset: int, length: int) -> memoryview:
        """Those of one block."""


class OpenedSources:
    """Objects as one: their runs, blocks and rows, one object behind the other."""

    def __init__(self, sources: Sequence[OpenedSource]) -> None:
        """Join the runs, blocks and bounds of ``sources`` to one table each; those of a single source are not
        copied."""
        self._sources = sources
        self._first_run = begins(np.array([len(source.runs) for source in sources]))
        self._first_block = begins(np.array([len(source.blocks) for source in sources]))
        if len(sources) == 1:
            (source,) = sources
            self.runs, self.blocks, self._offsets = source.runs, source.blocks, source.block_offsets
            self.first_row, self.bounds = source.first_row, source.bounds
        else:
            self.runs = concatenated((source.runs for source in sources), SOURCE_RUN_DTYPE)
            self.blocks = concatenated((source.blocks for source in sources), BLOCK_DTYPE)
            self._offsets = np.concatenate([source.block_offsets for source in sources])
            self.first_row = begins(self.runs["rows"])
            self.bounds = SegmentBounds.of(self.runs, self.blocks)
        self._row_bounds = self.first_row[self._first_run].tolist()

    def where(self, blocks: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Object and offset of each of ``blocks``."""
        numbers = np.searchsorted(self._first_block, blocks, side="right") - 1
        return zip(numbers.tolist(), self._offsets[blocks].tolist(), strict=True)

    def name_of(self, source: int, offset: int) -> str:
        """The name of a block in messages."""
        return f"{self._sources[source].key}: block at {offset}"

    def _checked_runs(
        self, candidates: Candidates, hashes: NDArray[np.uint64], wanted: Table
    ) -> NDArray[np.int64]:
        """The numbers here of the runs to which the ranges ``wanted`` (WANTED_DTYPE, object by object) belong, after a
        check that the footers have them as the catalog does. ``hashes``: of the candidates' queues. Raises
        CorruptionError."""
        rows = picked(candidates.runs, wanted["run"])
        place = np.cumsum(np.diff(rows["object"].astype(np.int64), prepend=rows["object"][0]) != 0)
        found: NDArray[np.int64] = rows["ordinal"].astype(np.int64)
        beyond = np.flatnonzero(found >= np.diff(self._first_run)[place])
        if len(beyond):
            first = int(beyond[0])
            raise CorruptionError(
                f"{self._sources[place[first]].key}: the catalog names its run {int(found[first])}, which the object "
                "does not have"
            )
        ordinals, found = found, found + self._first_run[place]
        own = picked(self.runs, found)
        differs = own["queue"] != hashes[rows["queue"]]
        is_whole = own["rows"] == rows["rows"]
        is_sparse = own["kind"] == RunKind.SPARSE
        for name in CATALOG_RUN_FIELDS:
            is_same = (own[name] == rows[name]) | (is_sparse & (name in _OFFSETS))
            differs |= is_whole & ~is_same
        differs |= ~is_whole & ~is_inside(rows, own)
        wrong = np.flatnonzero(differs).tolist()
        if wrong:
            key, queue = self._sources[place[wrong[0]]].key, candidates.queues[int(rows["queue"][wrong[0]])]
            raise CorruptionError(
                f"{key}: run {int(ordinals[wrong[0]])} of the object is not the catalog's of {queue}"
            )
        return found

    def places_of(self, candidates: Candidates, hashes: NDArray[np.uint64], wanted: Table) -> Table:
        """Where the rows and blocks of the ranges ``wanted`` are (PLACE_DTYPE), in the order of the objects, without
        ranges that have no rows. Blocks that begin inside a range belong to it, and to the first range of a run also a
        block that begins before. ``hashes``: of the candidates' queues. Raises CorruptionError if the objects differ
        from the catalog."""
        run = self._checked_runs(candidates, hashes, wanted)
        found = np.zeros(len(wanted), PLACE_DTYPE)
        for name in WANTED_DTYPE.names or ():
            found[name] = wanted[name]
        begin, end = wanted["begin"], wanted["end"]
        found["in_sources"] = run
        bounds = self.bounds
        named = picked(candidates.runs, wanted["run"])
        rows, first_row = named["rows"].astype(np.int64), named["first_row"]
        is_lmq = named["kind"] == RunKind.LMQ
        run_rows = bounds.run_rows[run] + np.where(is_lmq, 0, first_row)
        run_raw = bounds.run_raw[run] + named["base_byte"] - self.runs["base_byte"][run]
        run_end = run_raw + named["byte_count"]
        first_block = np.searchsorted(bounds.block_rows, run_rows, side="right") - 1
        end_block = np.searchsorted(bounds.block_rows, run_rows + np.where(is_lmq, 0, rows), side="left")
        is_first, is_last = begin == 0, end >= named["byte_count"]
        cuts = np.searchsorted(bounds.block_raw, run_raw + np.stack([begin, end]))
        first, last = np.clip(cuts, first_block, end_block)
        first, last = np.where(is_first, first_block, first), np.where(is_last, end_block, last)

        def row_of(block: NDArray[Any]) -> NDArray[Any]:
            inside = np.maximum(0, bounds.block_rows[block] - run_rows)
            row: NDArray[Any] = np.where(block >= end_block, rows, inside)
            return row

        found["first_row"] = first_row + np.where(is_lmq, begin, np.where(is_first, 0, row_of(first)))
        found["end_row"] = first_row + np.where(is_lmq, np.minimum(end, rows), row_of(last))
        found["first_block"], found["end_block"] = np.where(is_lmq, 0, first), np.where(is_lmq, 0, last)
        found["raw_begin"] = np.where(is_first | is_lmq, run_raw, bounds.block_raw[first])
        found["begin_byte"] = found["raw_begin"] - run_raw
        found["raw_end"] = np.where(last >= end_block, run_end, bounds.block_raw[last])
        found["base_queue_offset"] = -1
        found = picked(found, found["end_row"] > found["first_row"])
        return picked(found, np.lexsort((found["first_row"], found["in_sources"])))

    def selected(self, candidates: Candidates, places: Table, selection: Selection) -> Table:
        """``places`` divided where key compaction drops rows: a place for each group of neighbouring rows that
        ``selection`` keeps. Not for rows that span several offsets (a batch), or have no bytes (of an LMQ)."""
        parts = [np.zeros(0, PLACE_DTYPE)]
        for at in range(len(places)):
            place = places[at]
            run, first = int(place["in_sources"]), int(place["first_row"])
            row = int(self.first_row[run]) + first
            rows = self._rows(row, row + int(place["end_row"]) - first).table
            ends = self._offset_at(run, first) + np.cumsum(rows["inner_num"], dtype=np.int64)
            kept = selection(candidates.queues[int(candidates.runs["queue"][place["run"]])], ends - 1)
            edges = np.flatnonzero(np.diff(kept.astype(np.int8), prepend=0, append=0))
            begin, end = edges[::2], edges[1::2]
            raw, in_blocks = begins(rows["size"]), int(self.bounds.run_rows[run]) + first
            mine = picked(places, np.full(len(begin), at))
            mine["first_row"], mine["end_row"] = first + begin, first + end
            mine["first_block"] = np.searchsorted(self.bounds.block_rows, in_blocks + begin, side="right") - 1
            mine["end_block"] = np.searchsorted(self.bounds.block_rows, in_blocks + end)
            mine["raw_end"] = place["raw_begin"] + raw[end]
            mine["raw_begin"] += raw[begin]
            mine["begin_byte"] += raw[begin]
            mine["base_queue_offset"] = ends[begin] - rows["inner_num"][begin]
            parts.append(mine)
        return concatenated(parts, PLACE_DTYPE)

    def spans_of(self, places: Table) -> list[list[tuple[int, int]]]:
        """Which blocks of each object ``places`` need, as (offset, length) in the object, in order; each once."""
        steps = np.zeros(len(self.blocks) + 1, np.int64)
        np.add.at(steps, places["first_block"], 1)
        np.subtract.at(steps, places["end_block"], 1)
        blocks = np.flatnonzero(np.cumsum(steps)[:-1])
        spans = zip(self._offsets[blocks].tolist(), self.blocks["stored_bytes"][blocks].tolist(), strict=True)
        bounds = np.searchsorted(blocks, self._first_block).tolist()
        return [list(islice(spans, end - begin)) for begin, end in pairwise(bounds)]

    def _offset_at(self, run: int, row: int) -> int:
        """Where a row of ``run`` begins to span queue offsets."""
        base = int(self.runs["base_queue_offset"][run])
        if row == 0 or int(self.runs["kind"][run]) not in (RunKind.BATCH, RunKind.SPARSE):
            return base + row
        first = int(self.first_row[run])
        return base + int(self._rows(first, first + row).table["inner_num"].sum(dtype=np.int64))

    def found(self, places: Table, chunks: Chunks) -> FoundRanges:
        """The ranges of ``places``, with copies of their rows and keys, and their bytes, which are ``chunks``."""
        counts = places["end_row"] - places["first_row"]
        row_begins = self.first_row[places["in_sources"]] + places["first_row"]
        first, last = int(row_begins[0]), int(row_begins[-1] + counts[-1])
        rows, hashes = self._rows(first, last)
        if last - first != int(counts.sum()):
            which = positions(row_begins - first, counts)
            ends = np.cumsum(rows["key_count"], dtype=np.int64)[which]
            rows = picked(rows, which)
            hashes = hashes[positions(ends - rows["key_count"], rows["key_count"])]
        found = np.zeros(len(places), FOUND_DTYPE)
        for name in ("iteration", "ordinal"):
            found[name] = places[name]
        found["rows"], found["chunks"], found["blocks"] = counts, chunks.of_range, chunks.blocks_of_range
        found["hashes"] = np.add.reduceat(rows["key_count"], np.cumsum(counts) - counts, dtype=np.int64)
        found["begin_byte"] = places["begin_byte"]
        known, base = places["base_queue_offset"], self.runs["base_queue_offset"][places["in_sources"]]
        found["base_queue_offset"] = np.where(known < 0, base, known)
        for at in np.flatnonzero((places["first_row"] > 0) & (known < 0)).tolist():
            found["base_queue_offset"][at] = self._offset_at(
                int(places["in_sources"][at]), int(places["first_row"][at])
            )
        return FoundRanges(
            ranges=found,
            rows=rows,
            hashes=hashes,
            chunks=chunks.table,
            blocks=chunks.blocks,
            data=chunks.data,
        )

    def _rows(self, first: int, end: int) -> SourceRows:
        """The rows from ``first`` up to, but not including, ``end``, when the rows of all objects are numbered
        through."""
        if len(self._sources) == 1:
            return self._sources[0].rows(first, end)
        parts = [
            source.rows(max(first, begin) - begin, min(end, last) - begin)
            for source, (begin, last) in zip(self._sources, pairwise(self._row_bounds), strict=True)
            if begin < end and last > first
        ]
        return SourceRows(
            concatenated((part.table for part in parts), ROW_DTYPE),
            np.concatenate([part.hashes for part in parts]),
        )


class Chunks(NamedTuple):
    """Chunks (CHUNK_DTYPE) of ranges, stored blocks and bytes; and how many each range has."""

    table: Table
    blocks: Table
    data: Sequence[bytes | memoryview]
    of_range: NDArray[np.int64]
    blocks_of_range: NDArray[np.int64]

    @classmethod
    def without_bytes(cls, ranges: int) -> Chunks:
        """Empty chunks of ``ranges`` of which only rows are wanted."""
        none = np.zeros(ranges, np.int64)
        return cls(np.zeros(0, CHUNK_DTYPE), np.zeros(0, BLOCK_DTYPE), [], none, none)


class Taking:
    """Takes the chunks of ranges, in the order of the objects, out of their bytes."""

    def __init__(self, opened: OpenedSources, stored: Sequence[BlockBytes]) -> None:
        self._opened = opened
        self._stored = stored
        self._decompressor = zstandard.ZstdDecompressor()
        self._decoded = -1
        self._raw: bytes | memoryview = b""
        self._is_large = opened.blocks["raw_bytes"] >= COPIED_RAW_BYTES_MIN

    def chunks(self, places: Table) -> Chunks:
        """The bytes of ``places``, as a chunk for each block of each of them: a large block of which all rows are
        wanted stays as it is stored, of others the records are taken out."""
        counts = places["end_block"] - places["first_block"]
        of = np.repeat(np.arange(len(places)), counts)
        block = positions(places["first_block"], counts)
        bounds, blocks = self._opened.bounds, self._opened.blocks
        rows, raw = bounds.block_rows, bounds.block_raw
        run_rows = bounds.run_rows[places["in_sources"]]
        first_row, end_row = (run_rows + places["first_row"])[of], (run_rows + places["end_row"])[of]
        begin, end = rows[block], rows[block + 1]
        is_own = self._is_large[block] & (begin >= first_row) & (end <= end_row)
        raw_begin = np.maximum(places["raw_begin"][of], raw[block]) - raw[block]
        raw_end = np.minimum(places["raw_end"][of], raw[block + 1]) - raw[block]
        table = np.zeros(len(block), CHUNK_DTYPE)
        table["rows"] = np.minimum(end_row, end) - np.maximum(first_row, begin)
        table["blocks"] = is_own
        table["size_bytes"] = np.where(is_own, blocks["stored_bytes"][block], raw_end - raw_begin)
        places_of = self._opened.where(block)
        which = zip(
            block.tolist(), places_of, is_own.tolist(), raw_begin.tolist(), raw_end.tolist(), strict=True
        )
        data: list[bytes | memoryview] = []
        for number, where, is_stored, first, last in which:
            if is_stored:
                data.append(self._checked(number, *where))
                continue
            if number != self._decoded:
                self._decode(number, *where)
            data.append(bytes(self._raw[first:last]))  # not the whole block
        before, ends = np.cumsum([0, *is_own]), np.cumsum(counts)
        return Chunks(
            table, picked(blocks, block[is_own]), data, counts, before[ends] - before[ends - counts]
        )

    def _checked(self, block: int, source: int, offset: int) -> bytes:
        """A block as stored; its CRC32C is checked."""
        row = self._opened.blocks[block]
        stored = bytes(self._stored[source].at(offset, int(row["stored_bytes"])))
        if fastcrc.crc32.iscsi(stored) != int(row["crc32c"]):
            raise CorruptionError(f"{self._opened.name_of(source, offset)} fails its checksum")
        return stored

    def _decode(self, block: int, source: int, offset: int) -> None:
        """All records of a block, until the next one."""
        row = self._opened.blocks[block]
        stored = self._stored[source].at(offset, int(row["stored_bytes"]))
        self._raw = expand_block(stored, row, self._decompressor, self._opened.name_of(source, offset))
        self._decoded = block


def queue_hashes(queues: Sequence[QueueKey]) -> NDArray[np.uint64]:
    """A hash of each of ``queues``, the same one within this process."""
    numbers = np.array([queue[1:] for queue in queues], np.int64).reshape(-1, 2)
    return _hashes([queue.topic for queue in queues], slice(None), numbers[:, 0], numbers[:, 1])


def _hashes(
    topics: Sequence[str], topic: NDArray[Any] | slice, queue_id: NDArray[Any], generation: NDArray[Any]
) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = np.array(list(map(hash, topics)), np.int64).view(np.uint64)[topic]
    for column in (queue_id, generation):
        found = found * _HASH_FACTOR + column.astype(np.uint64)
    return found
