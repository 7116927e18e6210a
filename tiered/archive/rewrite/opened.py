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
from tiered.archive.rewrite.spool import CHUNK_DTYPE, READ_RANGE_DTYPE, ROW_DTYPE, ReadRanges
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
"""A range, the iteration that moves it, and its number among that iteration's ranges."""
LOCATED_DTYPE = np.dtype(
    [
        *WANTED_DTYPE.descr,
        ("source_run", "<i8"),  # number of its run among the runs of all sources
        ("first_row", "<i8"),
        ("end_row", "<i8"),  # rows of that run
        ("first_block", "<i8"),
        ("end_block", "<i8"),  # among the blocks of all sources; equal for an LMQ, which has none
        ("raw_begin", "<i8"),
        ("raw_end", "<i8"),  # among the decoded bytes of all sources
        ("begin_byte", "<i8"),  # in the catalog's run
        ("base_queue_offset", "<i8"),  # of its first row; -1: not looked up yet
    ]
)
"""A range, and where its rows and blocks are in opened sources: a located range."""


SOURCE_RUN_DTYPE = np.dtype(
    [
        *((name, SEGMENT_RUN_DTYPE[name]) for name in CATALOG_RUN_FIELDS),
        ("queue", "<u8"),  # hash of the queue's name, the same in all sources
    ]
)
"""The columns of a source's run that a rewrite checks or needs."""
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
        numbers_here: NDArray[np.int32] = numbers[parent]
        return numbers_here


class OpenedSource:
    """An open object. ``bounds`` and ``first_row`` end with the end of the last run."""

    def __init__(self, index: SegmentIndex, keys: KeySection, parents: Parents) -> None:
        """``index`` and ``keys``: the object's footer and key section; ``parents`` numbers the parents of LMQ rows (the
        queues that hold their messages) in the same way for all sources."""
        self._index, self._keys, self._parents = index, keys, parents
        self.key, self.blocks, self.block_offsets = index.key, index.blocks, index.block_offsets[:-1]
        self.first_row, self.bounds = index.first_row, index.bounds
        self.runs = np.empty(len(index.runs), SOURCE_RUN_DTYPE)
        for name in CATALOG_RUN_FIELDS:
            self.runs[name] = index.runs[name]
        queues = picked(index.queue_table, index.runs["queue"])
        self.runs["queue"] = _hashes(index.topics, queues["topic"], queues["queue_id"], queues["generation"])

    def rows(self, first: int, end: int) -> SourceRows:
        """The rows from ``first`` up to, but not including, ``end`` of the object, with the hashes of their keys. The
        parents of LMQ rows, which the object numbers in its own way, get the numbers that all sources use."""
        columns = self._index.stored_columns(first, end)
        table = np.empty(end - first, ROW_DTYPE)
        for name, column in zip(ROW_DTYPE.names or (), columns, strict=False):
            table[name] = column
        if int(table["parent"].max(initial=-1)) >= 0:  # -1: not a row of an LMQ
            table["parent"] = self._parents.numbers_of(self._index.queues, table["parent"])
        table["key_count"] = counts = self._keys.counts[first:end]
        begin = int(self._keys.counts[:first].sum(dtype=np.int64))
        return SourceRows(table, self._keys.hashes[begin : begin + int(counts.sum(dtype=np.int64))])


class BlockBytes(Protocol):
    """Stored bytes of an object."""

    def at(self, offset: int, length: int) -> memoryview:
        """The ``length`` stored bytes of the block that begins at byte ``offset`` of the object."""


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
        """For each of ``blocks``, the number of its object among the sources, and the byte at which it begins there."""
        numbers = np.searchsorted(self._first_block, blocks, side="right") - 1
        return zip(numbers.tolist(), self._offsets[blocks].tolist(), strict=True)

    def name_of(self, source: int, offset: int) -> str:
        """The name of a block in messages."""
        return f"{self._sources[source].key}: block at {offset}"

    def _checked_runs(
        self, candidates: Candidates, hashes: NDArray[np.uint64], wanted: Table
    ) -> NDArray[np.int64]:
        """The numbers, among the runs of all sources, of the runs to which the ranges ``wanted`` (WANTED_DTYPE, object
        by object) belong. ``hashes``: of the candidates' queues. Raises CorruptionError if the footers do not have
        these runs as the catalog describes them. The catalog's run may be a part of the object's; the offsets of
        sparse runs may differ, as the catalog counts holes at their ends."""
        listed = picked(candidates.runs, wanted["run"])
        source = np.cumsum(np.diff(listed["object"].astype(np.int64), prepend=listed["object"][0]) != 0)
        ordinals: NDArray[np.int64] = listed["ordinal"].astype(np.int64)
        beyond = np.flatnonzero(ordinals >= np.diff(self._first_run)[source])
        if len(beyond):
            first = int(beyond[0])
            raise CorruptionError(
                f"{self._sources[source[first]].key}: the catalog names its run {int(ordinals[first])}, which the "
                "object does not have"
            )
        numbers: NDArray[np.int64] = ordinals + self._first_run[source]
        own = picked(self.runs, numbers)
        differs = own["queue"] != hashes[listed["queue"]]
        is_whole = own["rows"] == listed["rows"]
        is_sparse = own["kind"] == RunKind.SPARSE
        for name in CATALOG_RUN_FIELDS:
            is_same = (own[name] == listed[name]) | (is_sparse & (name in _OFFSETS))
            differs |= is_whole & ~is_same
        differs |= ~is_whole & ~is_inside(listed, own)
        wrong = np.flatnonzero(differs).tolist()
        if wrong:
            key, queue = (
                self._sources[source[wrong[0]]].key,
                candidates.queues[int(listed["queue"][wrong[0]])],
            )
            raise CorruptionError(
                f"{key}: run {int(ordinals[wrong[0]])} of the object is not the run of {queue} that the catalog "
                "describes"
            )
        return numbers

    def locate(self, candidates: Candidates, hashes: NDArray[np.uint64], wanted: Table) -> Table:
        """Where the rows and blocks of the ranges ``wanted`` are (LOCATED_DTYPE), in the order of the objects, without
        ranges that have no rows. Blocks that begin inside a range belong to it, and to the first range of a run also a
        block that begins before. ``hashes``: of the candidates' queues. Raises CorruptionError if the objects differ
        from the catalog."""
        run = self._checked_runs(candidates, hashes, wanted)
        located = np.zeros(len(wanted), LOCATED_DTYPE)
        for name in WANTED_DTYPE.names or ():
            located[name] = wanted[name]
        begin, end = wanted["begin"], wanted["end"]
        located["source_run"] = run
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
            """The rows of the catalog's runs with which blocks begin."""
            inside = np.maximum(0, bounds.block_rows[block] - run_rows)
            row: NDArray[Any] = np.where(block >= end_block, rows, inside)
            return row

        located["first_row"] = first_row + np.where(is_lmq, begin, np.where(is_first, 0, row_of(first)))
        located["end_row"] = first_row + np.where(is_lmq, np.minimum(end, rows), row_of(last))
        located["first_block"], located["end_block"] = np.where(is_lmq, 0, first), np.where(is_lmq, 0, last)
        located["raw_begin"] = np.where(is_first | is_lmq, run_raw, bounds.block_raw[first])
        located["begin_byte"] = located["raw_begin"] - run_raw
        located["raw_end"] = np.where(last >= end_block, run_end, bounds.block_raw[last])
        located["base_queue_offset"] = -1
        located = picked(located, located["end_row"] > located["first_row"])
        return picked(located, np.lexsort((located["first_row"], located["source_run"])))

    def selected(self, candidates: Candidates, located: Table, selection: Selection) -> Table:
        """``located`` divided where key compaction drops rows: a located range for each group of neighbouring rows that
        ``selection`` keeps. Not for rows that span several offsets (a batch), or have no bytes (of an LMQ)."""
        parts = [np.zeros(0, LOCATED_DTYPE)]
        for at in range(len(located)):
            whole = located[at]
            run, first = int(whole["source_run"]), int(whole["first_row"])
            row = int(self.first_row[run]) + first
            rows = self._rows(row, row + int(whole["end_row"]) - first).table
            # A row of a sparse run spans the hole before it as well: its message has the last of these offsets.
            ends = self._offset_at(run, first) + np.cumsum(rows["inner_num"], dtype=np.int64)
            kept = selection(candidates.queues[int(candidates.runs["queue"][whole["run"]])], ends - 1)
            edges = np.flatnonzero(np.diff(kept.astype(np.int8), prepend=0, append=0))
            begin, end = edges[::2], edges[1::2]
            raw, in_blocks = begins(rows["size"]), int(self.bounds.run_rows[run]) + first
            groups = picked(located, np.full(len(begin), at))
            groups["first_row"], groups["end_row"] = first + begin, first + end
            groups["first_block"] = (
                np.searchsorted(self.bounds.block_rows, in_blocks + begin, side="right") - 1
            )
            groups["end_block"] = np.searchsorted(self.bounds.block_rows, in_blocks + end)
            groups["raw_end"] = whole["raw_begin"] + raw[end]
            groups["raw_begin"] += raw[begin]
            groups["begin_byte"] += raw[begin]
            groups["base_queue_offset"] = ends[begin] - rows["inner_num"][begin]
            parts.append(groups)
        return concatenated(parts, LOCATED_DTYPE)

    def spans_of(self, located: Table) -> list[list[tuple[int, int]]]:
        """The blocks that the ranges ``located`` need of each object, as (offset, length) in the object, in order, each
        once."""
        steps = np.zeros(len(self.blocks) + 1, np.int64)
        np.add.at(steps, located["first_block"], 1)
        np.subtract.at(steps, located["end_block"], 1)
        blocks = np.flatnonzero(np.cumsum(steps)[:-1])
        spans = zip(self._offsets[blocks].tolist(), self.blocks["stored_bytes"][blocks].tolist(), strict=True)
        bounds = np.searchsorted(blocks, self._first_block).tolist()
        return [list(islice(spans, end - begin)) for begin, end in pairwise(bounds)]

    def _offset_at(self, run: int, row: int) -> int:
        """The first queue offset of row number ``row`` of ``run``: rows of batches, and of sparse runs with the holes
        before them, span several."""
        base = int(self.runs["base_queue_offset"][run])
        if row == 0 or int(self.runs["kind"][run]) not in (RunKind.BATCH, RunKind.SPARSE):
            return base + row
        first = int(self.first_row[run])
        return base + int(self._rows(first, first + row).table["inner_num"].sum(dtype=np.int64))

    def read_ranges(self, located: Table, chunks: Chunks) -> ReadRanges:
        """The ranges ``located``, with copies of their rows and key hashes, and the bytes of their messages, which were
        read as ``chunks``."""
        counts = located["end_row"] - located["first_row"]
        row_begins = self.first_row[located["source_run"]] + located["first_row"]
        first, last = int(row_begins[0]), int(row_begins[-1] + counts[-1])
        rows, hashes = self._rows(first, last)
        if last - first != int(counts.sum()):
            which = positions(row_begins - first, counts)
            ends = np.cumsum(rows["key_count"], dtype=np.int64)[which]
            rows = picked(rows, which)
            hashes = hashes[positions(ends - rows["key_count"], rows["key_count"])]
        ranges = np.zeros(len(located), READ_RANGE_DTYPE)
        for name in ("iteration", "ordinal"):
            ranges[name] = located[name]
        ranges["rows"], ranges["chunks"], ranges["blocks"] = counts, chunks.of_range, chunks.blocks_of_range
        ranges["hashes"] = np.add.reduceat(rows["key_count"], np.cumsum(counts) - counts, dtype=np.int64)
        ranges["begin_byte"] = located["begin_byte"]
        # A range whose offset is not looked up yet (-1) begins with its run, or at the offset of its first row inside.
        offset, base = located["base_queue_offset"], self.runs["base_queue_offset"][located["source_run"]]
        ranges["base_queue_offset"] = np.where(offset < 0, base, offset)
        for at in np.flatnonzero((located["first_row"] > 0) & (offset < 0)).tolist():
            ranges["base_queue_offset"][at] = self._offset_at(
                int(located["source_run"][at]), int(located["first_row"][at])
            )
        return ReadRanges(
            ranges=ranges,
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
    """Message bytes of ranges: a table of chunks (CHUNK_DTYPE), the table rows of blocks that stay as they are stored
    (BLOCK_DTYPE), and the bytes of each chunk. ``of_range``, ``blocks_of_range``: how many chunks and such blocks each
    range has."""

    table: Table
    blocks: Table
    data: Sequence[bytes | memoryview]
    of_range: NDArray[np.int64]
    blocks_of_range: NDArray[np.int64]

    @classmethod
    def without_bytes(cls, ranges: int) -> Chunks:
        """No chunks, for ``ranges`` ranges of which only rows are wanted."""
        none = np.zeros(ranges, np.int64)
        return cls(np.zeros(0, CHUNK_DTYPE), np.zeros(0, BLOCK_DTYPE), [], none, none)


class ChunkReader:
    """Takes the chunks of ranges out of the bytes of their objects, which are read from the first to the last."""

    def __init__(self, opened: OpenedSources, stored: Sequence[BlockBytes]) -> None:
        self._opened = opened
        self._stored = stored
        self._decompressor = zstandard.ZstdDecompressor()
        self._decoded = -1
        self._raw: bytes | memoryview = b""
        self._is_large = opened.blocks["raw_bytes"] >= COPIED_RAW_BYTES_MIN

    def chunks(self, located: Table) -> Chunks:
        """The bytes of ``located``, as a chunk for each block of each of them: a large block of which all rows are
        wanted stays as it is stored, of others the records are taken out."""
        counts = located["end_block"] - located["first_block"]
        of = np.repeat(np.arange(len(located)), counts)
        block = positions(located["first_block"], counts)
        bounds, blocks = self._opened.bounds, self._opened.blocks
        rows, raw = bounds.block_rows, bounds.block_raw
        run_rows = bounds.run_rows[located["source_run"]]
        first_row, end_row = (run_rows + located["first_row"])[of], (run_rows + located["end_row"])[of]
        begin, end = rows[block], rows[block + 1]
        is_own = self._is_large[block] & (begin >= first_row) & (end <= end_row)
        raw_begin = np.maximum(located["raw_begin"][of], raw[block]) - raw[block]
        raw_end = np.minimum(located["raw_end"][of], raw[block + 1]) - raw[block]
        table = np.zeros(len(block), CHUNK_DTYPE)
        table["rows"] = np.minimum(end_row, end) - np.maximum(first_row, begin)
        table["blocks"] = is_own
        table["size_bytes"] = np.where(is_own, blocks["stored_bytes"][block], raw_end - raw_begin)
        where_stored = self._opened.where(block)
        which = zip(
            block.tolist(), where_stored, is_own.tolist(), raw_begin.tolist(), raw_end.tolist(), strict=True
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
        """The block number ``block`` as it is stored, after a check of its CRC32C: it begins at byte ``offset`` of the
        source number ``source``. Raises CorruptionError."""
        row = self._opened.blocks[block]
        stored = bytes(self._stored[source].at(offset, int(row["stored_bytes"])))
        if fastcrc.crc32.iscsi(stored) != int(row["crc32c"]):
            raise CorruptionError(f"{self._opened.name_of(source, offset)} fails its checksum")
        return stored

    def _decode(self, block: int, source: int, offset: int) -> None:
        """Decode the block number ``block``, at byte ``offset`` of the source number ``source``, and keep its records
        until another one is decoded: several ranges may have a part of them."""
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
    """A hash of each queue: its topic, one of ``topics``, which ``topic`` picks; its id; and its generation."""
    hashes: NDArray[np.uint64] = np.array(list(map(hash, topics)), np.int64).view(np.uint64)[topic]
    for column in (queue_id, generation):
        hashes = hashes * _HASH_FACTOR + column.astype(np.uint64)
    return hashes
