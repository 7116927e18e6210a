"""What is taken out of opened sources of a compaction: rows, keys, stored blocks and records of pieces of runs.

A block that only one piece uses stays as it is stored. Any other one is decoded, one at a time, and its records are
distributed over the pieces. Small objects are opened together, and all work is on the tables of all of them: a call for
each would cost more than its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from maintenance.compaction_plan import PIECE_DTYPE, Candidates
from maintenance.iteration_spool import CHUNK_DTYPE, FOUND_DTYPE, ROW_DTYPE, FoundPieces
from tiered.errors import CorruptionError
from tiered.formats.segment import SHARED_BLOCK_BYTES
from tiered.formats.segment_index import (
    CATALOG_RUN_FIELDS,
    KeySection,
    SegmentBounds,
    SegmentIndex,
    expand_block,
)
from tiered.formats.segment_layout import BLOCK_DTYPE, SEGMENT_RUN_DTYPE
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table, begins, concatenated, picked, positions

COPIED_RAW_BYTES_MIN = SHARED_BLOCK_BYTES // 2
"""Smaller blocks are packed again, except at an object's end: an object of many small blocks is slow to read."""

WANTED_DTYPE = np.dtype([*PIECE_DTYPE.descr, ("iteration", "<i4"), ("ordinal", "<i8")])
"""A piece, its iteration, and its number there."""
PLACE_DTYPE = np.dtype([
    *WANTED_DTYPE.descr,
    ("in_sources", "<i8"),  # ordinal of the run
    ("first_row", "<i8"), ("end_row", "<i8"),  # in the run
    ("first_block", "<i8"), ("end_block", "<i8"),  # in the sources; equal for an LMQ
    ("raw_begin", "<i8"), ("raw_end", "<i8"),  # in the raw bytes of the sources
])  # fmt: skip
"""Where the rows and blocks of a piece are."""


class BlockBytes(Protocol):
    """Stored bytes of an object."""

    def at(self, offset: int, length: int) -> memoryview:
        """Those of one block."""


class Parents:
    """Numbers of the queues that ``parent`` of LMQ rows names: those of the candidates, then others."""

    def __init__(self, queues: Sequence[QueueKey]) -> None:
        self.queues: list[QueueKey] = list(queues)
        self._numbers = {queue: number for number, queue in enumerate(self.queues)}

    def numbers_of(self, queues: Sequence[QueueKey], parent: NDArray[Any]) -> NDArray[np.int32]:
        """``parent`` indexes ``queues``, or is -1."""
        if int(parent.max(initial=-1)) >= len(queues):
            raise CorruptionError("the parent of an LMQ row is not in the footer")
        numbers = np.full(len(queues) + 1, -1, np.int32)
        for local in np.unique(parent[parent >= 0]).tolist():
            number = self._numbers.setdefault(queues[local], len(self.queues))
            if number == len(self.queues):
                self.queues.append(queues[local])
            numbers[local] = number
        found: NDArray[np.int32] = numbers[parent]
        return found


class OpenedSources:
    """Objects as one: their runs, blocks and rows, one object behind the other."""

    def __init__(self, indexes: Sequence[SegmentIndex], keys: Sequence[KeySection]) -> None:
        self._indexes = indexes
        self._first_queue = begins(np.array([len(index.queue_table) for index in indexes]))
        self._first_run = begins(np.array([len(index.runs) for index in indexes]))
        self._first_block = begins(np.array([len(index.blocks) for index in indexes]))
        self._first_row = begins(np.array([index.first_row[-1] for index in indexes]))
        if len(indexes) == 1:
            (index,), (self.keys,) = indexes, keys
            self.runs, self.blocks = index.runs, index.blocks
            self.first_row, self.bounds = index.first_row, index.bounds
        else:
            self.runs = concatenated((index.runs for index in indexes), SEGMENT_RUN_DTYPE)
            self.runs["queue"] += np.repeat(self._first_queue[:-1], np.diff(self._first_run)).astype(
                np.uint32
            )
            self.blocks = concatenated((index.blocks for index in indexes), BLOCK_DTYPE)
            self.first_row = begins(self.runs["rows"])
            self.bounds = SegmentBounds.of(self.runs, self.blocks)
            self.keys = KeySection(
                np.concatenate([one.counts for one in keys]), np.concatenate([one.hashes for one in keys])
            )
        self._has_lmqs = bool((self.runs["kind"] == RunKind.LMQ).any())

    @cached_property
    def queues(self) -> list[QueueKey]:
        """Those of all objects, with parents of LMQ rows."""
        return list(chain.from_iterable(index.queues for index in self._indexes))

    def _queues_of(self, runs: Table) -> Iterator[tuple[str, int, int]]:
        """The queue of each of ``runs``, which are in the order of the objects."""
        bounds = np.searchsorted(runs["queue"], self._first_queue).tolist()
        for index, first, (begin, end) in zip(
            self._indexes, self._first_queue.tolist(), pairwise(bounds), strict=False
        ):
            rows = picked(index.queue_table, runs["queue"][begin:end] - np.uint32(first))
            topics = map(index.topics.__getitem__, rows["topic"].tolist())
            yield from zip(topics, rows["queue_id"].tolist(), rows["generation"].tolist(), strict=True)

    def where_blocks_are(self) -> list[tuple[int, int]]:
        """Object and offset of each block."""
        return [
            (number, offset)
            for number, index in enumerate(self._indexes)
            for offset in index.block_offsets[:-1].tolist()
        ]

    def name_of(self, source: int, offset: int) -> str:
        """A block in messages."""
        return f"{self._indexes[source].key}: block at {offset}"

    def _checked_runs(self, candidates: Candidates, wanted: Table) -> NDArray[np.int64]:
        """The runs of ``wanted`` (WANTED_DTYPE, object by object), on which catalog and objects must agree."""
        rows = picked(candidates.runs, wanted["run"])
        place = np.cumsum(np.diff(rows["object"].astype(np.int64), prepend=rows["object"][0]) != 0)
        ordinals = rows["ordinal"].astype(np.int64)
        beyond = np.flatnonzero(ordinals >= np.diff(self._first_run)[place])
        if len(beyond):
            first = int(beyond[0])
            raise CorruptionError(f"{self._indexes[place[first]].key}: has no run {int(ordinals[first])}")
        found: NDArray[np.int64] = self._first_run[place] + ordinals
        own = picked(self.runs, found)
        differs = np.zeros(len(rows), bool)
        for name in CATALOG_RUN_FIELDS:
            differs |= own[name] != rows[name]
        names = candidates.queues
        pairs = zip(rows["queue"].tolist(), self._queues_of(own), strict=True)
        differs |= np.fromiter((names[one] != queue for one, queue in pairs), bool, len(rows))
        wrong = np.flatnonzero(differs).tolist()
        if wrong:
            key, queue = self._indexes[place[wrong[0]]].key, names[int(rows["queue"][wrong[0]])]
            raise CorruptionError(f"{key}: run {int(ordinals[wrong[0]])} is not the catalog's of {queue}")
        return found

    def places_of(self, candidates: Candidates, wanted: Table) -> Table:
        """Where pieces that have rows are (PLACE_DTYPE), in the order of the objects. Blocks that begin inside a piece
        belong to it, and to the first one of a run also a block that begins before. Raises CorruptionError."""
        run = self._checked_runs(candidates, wanted)
        found = np.zeros(len(wanted), PLACE_DTYPE)
        for name in WANTED_DTYPE.names or ():
            found[name] = wanted[name]
        begin, end = wanted["begin"], wanted["end"]
        found["in_sources"] = run
        bounds = self.bounds
        rows = self.runs["rows"][run].astype(np.int64)
        is_lmq = self.runs["kind"][run] == RunKind.LMQ
        run_rows, run_raw, run_end = bounds.run_rows[run], bounds.run_raw[run], bounds.run_raw[run + 1]
        first_block, end_block = bounds.blocks_of_runs(run)
        is_first, is_last = begin == 0, end >= self.runs["byte_count"][run]
        cuts = np.searchsorted(bounds.block_raw, run_raw + np.stack([begin, end]))
        first, last = np.clip(cuts, first_block, end_block)
        first, last = np.where(is_first, first_block, first), np.where(is_last, end_block, last)

        def row_of(block: NDArray[Any]) -> NDArray[Any]:
            inside = np.maximum(0, bounds.block_rows[block] - run_rows)
            row: NDArray[Any] = np.where(block >= end_block, rows, inside)
            return row

        found["first_row"] = np.where(is_lmq, begin, np.where(is_first, 0, row_of(first)))
        found["end_row"] = np.where(is_lmq, np.minimum(end, rows), row_of(last))
        found["first_block"], found["end_block"] = np.where(is_lmq, 0, first), np.where(is_lmq, 0, last)
        found["raw_begin"] = np.where(is_first | is_lmq, run_raw, bounds.block_raw[first])
        found["raw_end"] = np.where(last >= end_block, run_end, bounds.block_raw[last])
        found = picked(found, found["end_row"] > found["first_row"])
        return picked(found, np.lexsort((found["first_row"], found["in_sources"])))

    def ranges_of(self, places: Table) -> list[list[tuple[int, int]]]:
        """(offset, length) of each block of ``places``, in the order of each object."""
        steps = np.zeros(len(self.blocks) + 1, np.int64)
        np.add.at(steps, places["first_block"], 1)
        np.subtract.at(steps, places["end_block"], 1)
        blocks = np.flatnonzero(np.cumsum(steps)[:-1])
        found = []
        bounds = np.searchsorted(blocks, self._first_block).tolist()
        for number, index in enumerate(self._indexes):
            mine = blocks[bounds[number] : bounds[number + 1]] - self._first_block[number]
            lengths = index.blocks["stored_bytes"][mine]
            found.append(list(zip(index.block_offsets[mine].tolist(), lengths.tolist(), strict=True)))
        return found

    def _offset_at(self, run: int, row: int) -> int:
        """The queue offset of a row of ``run``."""
        base = int(self.runs["base_queue_offset"][run])
        if row == 0 or int(self.runs["kind"][run]) != RunKind.BATCH:
            return base + row
        first = int(self.first_row[run])
        return base + int(self._columns(first, first + row)[4].sum(dtype=np.int64))

    def found(self, places: Table, chunks: Chunks, parents: Parents) -> FoundPieces:
        """``chunks`` with the rows and keys of their ``places``, as copies."""
        counts = places["end_row"] - places["first_row"]
        row_begins = self.first_row[places["in_sources"]] + places["first_row"]
        first, last = int(row_begins[0]), int(row_begins[-1] + counts[-1])
        which: slice | NDArray[np.int64] = slice(None)
        if last - first != int(counts.sum()):
            which = positions(row_begins - first, counts)
        rows = np.empty(int(counts.sum()), ROW_DTYPE)
        for name, column in zip(ROW_DTYPE.names or (), self._columns(first, last), strict=False):
            rows[name] = column[which]
        if self._has_lmqs:
            rows["parent"] = parents.numbers_of(self.queues, rows["parent"])
        key_counts = self.keys.counts[first:last]
        rows["key_count"] = key_counts[which]
        before = int(self.keys.counts[:first].sum(dtype=np.int64))
        hash_ends = before + np.cumsum(key_counts, dtype=np.int64)
        own_keys = (hash_ends - key_counts)[which]
        found = np.zeros(len(places), FOUND_DTYPE)
        for name in ("iteration", "ordinal"):
            found[name] = places[name]
        found["rows"], found["chunks"], found["blocks"] = counts, chunks.of_piece, chunks.blocks_of_piece
        found["hashes"] = np.add.reduceat(rows["key_count"], np.cumsum(counts) - counts, dtype=np.int64)
        found["begin_byte"] = places["raw_begin"] - self.bounds.run_raw[places["in_sources"]]
        found["base_queue_offset"] = self.runs["base_queue_offset"][places["in_sources"]]
        for at in np.flatnonzero(places["first_row"]).tolist():
            found["base_queue_offset"][at] = self._offset_at(
                int(places["in_sources"][at]), int(places["first_row"][at])
            )
        return FoundPieces(
            pieces=found, rows=rows, hashes=self.keys.hashes[positions(own_keys, rows["key_count"])],
            chunks=chunks.table, blocks=chunks.blocks, data=chunks.data,
        )  # fmt: skip

    def _columns(self, first: int, end: int) -> Sequence[NDArray[Any]]:
        """Columns of rows [first, end), as ``SegmentIndex.stored_columns``; ``parent`` indexes ``queues``."""
        parts: list[list[NDArray[Any]]] = []
        for number, index in enumerate(self._indexes):
            begin = int(self._first_row[number])
            low, high = max(first, begin), min(end, int(self._first_row[number + 1]))
            if low < high:
                columns = list(index.stored_columns(low - begin, high - begin))
                if number and self._has_lmqs:
                    columns[5] = np.where(columns[5] < 0, -1, columns[5] + int(self._first_queue[number]))
                parts.append(columns)
        if len(parts) == 1:
            return parts[0]
        return [np.concatenate(columns) for columns in zip(*parts, strict=True)]


class Chunks(NamedTuple):
    """Chunks (CHUNK_DTYPE) of pieces, stored blocks and bytes; and how many each piece has."""

    table: Table
    blocks: Table
    data: Sequence[bytes | memoryview]
    of_piece: NDArray[np.int64]
    blocks_of_piece: NDArray[np.int64]

    @classmethod
    def without_bytes(cls, pieces: int) -> Chunks:
        """Of pieces of which only rows are wanted."""
        none = np.zeros(pieces, np.int64)
        return cls(np.zeros(0, CHUNK_DTYPE), np.zeros(0, BLOCK_DTYPE), [], none, none)


class Taking:
    """Takes the chunks of pieces, in the order of the objects, out of their bytes."""

    def __init__(self, opened: OpenedSources, stored: Sequence[BlockBytes]) -> None:
        self._opened = opened
        self._stored = stored
        self._decompressor = zstandard.ZstdDecompressor()
        self._decoded = -1
        self._raw: bytes | memoryview = b""
        self._where = opened.where_blocks_are()
        self._is_large = opened.blocks["raw_bytes"] >= COPIED_RAW_BYTES_MIN

    def chunks(self, places: Table) -> Chunks:
        """Stored blocks and records of ``places``: a chunk for each block of each of them."""
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
        which = zip(block.tolist(), is_own.tolist(), raw_begin.tolist(), raw_end.tolist(), strict=True)
        data = [
            self._checked(number) if is_stored else self._records(number)[first:last]
            for number, is_stored, first, last in which
        ]
        before, ends = np.cumsum([0, *is_own]), np.cumsum(counts)
        return Chunks(
            table, picked(blocks, block[is_own]), data, counts, before[ends] - before[ends - counts]
        )

    def _checked(self, block: int) -> bytes:
        """A block as stored; its CRC32C is checked."""
        source, offset = self._where[block]
        row = self._opened.blocks[block]
        stored = bytes(self._stored[source].at(offset, int(row["stored_bytes"])))
        if fastcrc.crc32.iscsi(stored) != int(row["crc32c"]):
            raise CorruptionError(f"{self._opened.name_of(source, offset)} fails its CRC32C")
        return stored

    def _records(self, block: int) -> bytes | memoryview:
        """All records of a block."""
        if block != self._decoded:
            source, offset = self._where[block]
            row = self._opened.blocks[block]
            stored = self._stored[source].at(offset, int(row["stored_bytes"]))
            self._raw = expand_block(stored, row, self._decompressor, self._opened.name_of(source, offset))
            self._decoded = block
        return self._raw
