"""Writes a segment from parts of others: runs in order, their rows, and for each either stored blocks or records.

For objects that memory does not hold: blocks go to a file at once, or stay in objects from which the store copies
them. Only the key section and the tail are kept. ``tiered.formats.segment`` encodes objects that are in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered.formats.column_pages import encode_page
from tiered.formats.segment import (
    SHARED_BLOCK_BYTES,
    BlockCodec,
    RowTable,
    SegmentMeta,
    encode_keys,
    encode_tail,
)
from tiered.formats.segment_layout import (
    BLOCK_DTYPE,
    CODEC_RAW,
    CODEC_ZSTD,
    HEADER_BYTES,
    PAGE_DTYPE,
    PAGE_ROWS,
    PART_RUNS,
    encode_header,
)
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, RunKind, Table, concatenated, copied, picked

_COLUMNS = {
    "size": np.int32,
    "tags_code": np.int64,
    "store_timestamp": np.int64,
    "phys": np.int64,
    "inner_num": np.int32,
    "parent": np.int32,
    "parent_queue_offset": np.int64,
}
"""In the order of the parameters of ``encode_page``."""


@dataclass(frozen=True)
class WrittenSegment:
    """What follows the blocks, and what a commit says of the object.

    ``runs`` (RUN_DTYPE) index ``queues``. The object is a header and ``blocks_bytes`` of blocks, then ``keys`` and
    ``tail``.
    """

    queues: list[QueueKey]
    runs: Table
    blocks_bytes: int
    keys: bytes
    tail: bytes
    tail_crc32c: int
    rows: int

    @property
    def size_bytes(self) -> int:
        """Size of the whole object."""
        return HEADER_BYTES + self.blocks_bytes + len(self.keys) + len(self.tail)

    def object_row(self, epoch: int, ttl_class_days: int) -> Table:
        """One row of OBJECT_DTYPE, whose ``key`` is 0."""
        row = np.zeros(1, OBJECT_DTYPE)
        row["rows"], row["size_bytes"] = self.rows, self.size_bytes
        row["tail_bytes"], row["tail_crc32c"] = len(self.tail), self.tail_crc32c
        row["epoch"], row["raw_bytes"] = epoch, self.runs["byte_count"].sum()
        row["min_phys"], row["end_phys"] = self.runs["min_phys"].min(), self.runs["end_phys"].max()
        row["ttl_class_days"] = ttl_class_days
        return row


class SegmentWriter:
    """One object. Not thread-safe. Runs come in order: ``begin_runs``, then ``add_rows``, and either ``add_stored`` or
    ``add_records`` for each run with bytes; the last run may get more rows, and then more bytes."""

    def __init__(self, blocks: BinaryIO | None, codec: BlockCodec) -> None:
        """``blocks``: a file for header and blocks; None if the store copies them from other objects."""
        self._file = blocks
        self._codec = codec
        self._compressor = zstandard.ZstdCompressor(
            level=codec.level, write_checksum=False, write_content_size=True
        )
        if blocks is not None:
            blocks.write(encode_header())
        self._queues: list[QueueKey] = []
        self._numbers: dict[QueueKey, int] = {}
        self._parent_places: dict[int, int] = {}
        """Places in the footer of queues to which LMQ rows refer, by their numbers."""
        self._runs = np.zeros(0, RUN_DTYPE)
        self._blocks: list[Table] = []
        self._blocks_bytes = 0
        self._blocks_of_run: list[int] = []
        self._pending = bytearray()
        """Records of the block that is not complete yet, how many, and the run of the first."""
        self._pending_rows = 0
        self._pending_run = -1
        self._newest_run = -1
        """The one whose records came last."""
        self._page = {name: np.empty(PAGE_ROWS, kind) for name, kind in _COLUMNS.items()}
        self._page_rows = 0
        self._page_runs: list[tuple[NDArray[Any], NDArray[Any]]] = []
        """Runs with rows in the page, and the first row of each there."""
        self._pages: list[bytes] = []
        self._page_table: list[Table] = []
        self._key_counts: list[NDArray[Any]] = []
        self._key_hashes: list[NDArray[Any]] = []
        self._keys: tuple[bytes, dict[str, int]] | None = None

    def begin_runs(self, queues: Sequence[QueueKey], heads: Table) -> None:
        """The rows that follow are of new runs, one of each of ``queues``. Of ``heads`` (RUN_DTYPE), kind, begin and
        minima count; what depends on the rows is summed up."""
        runs = np.zeros(len(queues), RUN_DTYPE)
        for name in ("kind", "base_queue_offset", "base_byte", "min_store_timestamp", "min_phys"):
            runs[name] = heads[name]
        runs["queue"] = [self._number(queue) for queue in queues]
        runs["ordinal"] = np.arange(len(self._runs), len(self._runs) + len(runs))
        runs["end_queue_offset"] = heads["base_queue_offset"]
        runs["max_store_timestamp"], runs["end_phys"] = heads["min_store_timestamp"], heads["min_phys"]
        self._runs = concatenated([self._runs, runs], RUN_DTYPE)
        self._blocks_of_run += [0] * len(runs)

    def add_rows(
        self, rows: RowTable, parents: Sequence[QueueKey], counts: NDArray[np.int64] | None = None
    ) -> None:
        """Columns of the next ``counts`` rows of each of the last runs, or of the last one. ``rows.parent`` indexes
        ``parents``; positions do not matter.

        Raises ValueError for rows that do not continue their run.
        """
        if counts is None:
            counts = np.array([len(rows)], np.int64)
        first = len(self._runs) - len(counts)
        runs, starts = self._runs[first:], np.cumsum(counts) - counts
        is_lmq = runs["kind"] == RunKind.LMQ
        apart = np.flatnonzero(counts == 0)
        if not len(apart):
            apart = np.flatnonzero(rows.queue_offset[starts] != runs["end_queue_offset"])
        if len(apart):
            queue = self._queues[int(runs["queue"][apart[0]])]
            raise ValueError(
                f"{queue} ends at {runs['end_queue_offset'][apart[0]]}: the next rows begin elsewhere"
            )
        early = (np.minimum.reduceat(rows.store_timestamp, starts) < runs["min_store_timestamp"]) | (
            np.minimum.reduceat(rows.phys, starts) < runs["min_phys"]
        )
        if early.any():
            queue = self._queues[int(runs["queue"][early.argmax()])]
            raise ValueError(f"rows of {queue} are before the begin of their run")
        runs["rows"] += counts
        runs["end_queue_offset"] += np.add.reduceat(rows.inner_num, starts, dtype=np.int64)
        runs["byte_count"] += np.where(is_lmq, 0, np.add.reduceat(rows.size, starts, dtype=np.int64))
        newest = np.maximum.reduceat(rows.store_timestamp, starts)
        runs["max_store_timestamp"] = np.maximum(runs["max_store_timestamp"], newest)
        runs["end_phys"] = np.maximum(runs["end_phys"], np.maximum.reduceat(rows.phys + rows.size, starts))
        columns = {name: getattr(rows, name) for name in _COLUMNS}
        if is_lmq.any():
            columns["parent"] = self._parents(rows.parent, np.repeat(is_lmq, counts), parents)
        self._add_to_pages(columns, first, starts, len(rows))
        self._key_counts.append(rows.key_count.astype("<u2"))
        self._key_hashes.append(rows.key_hashes.astype("<u8"))

    def add_stored(self, blocks: Table, stored: Sequence[bytes | memoryview], run: int = -1) -> None:
        """Blocks (BLOCK_DTYPE) of ``run``, by default the last one, as they are stored; ``stored`` is empty without a
        file."""
        self._flush()
        self._blocks_of_run[run] += len(blocks)
        self._append(blocks, stored)

    def add_records(self, records: Sequence[bytes | memoryview], sizes: NDArray[Any], run: int = -1) -> None:
        """Records of ``run``, by default the last one, that go to new blocks: ``sizes`` of each, and their bytes in any
        pieces. Raises ValueError if these are not as long."""
        run %= len(self._runs)
        if run != self._newest_run and 2 * len(self._pending) >= SHARED_BLOCK_BYTES:
            self._flush()
        self._newest_run = run
        length = sum(map(len, records))
        if length != int(sizes.sum(dtype=np.int64)):
            raise ValueError(
                f"{length} bytes of records, but the rows add up to {int(sizes.sum(dtype=np.int64))}"
            )
        if not length:
            return
        before = len(self._pending)
        for piece in records:
            self._pending += piece
        if before + length <= self._limit(run):
            self._begin_block(run)
            self._pending_rows += len(sizes)
            return
        # Cut all records into blocks, but leave the last block pending, as more records may follow.
        ends = before + np.cumsum(sizes, dtype=np.int64)
        row = begin = 0
        with memoryview(self._pending) as records_of_blocks:
            while True:
                last = int(np.searchsorted(ends, begin + self._limit(run), side="right"))
                if last <= row and not self._pending_rows:
                    last = row + 1  # a larger record has its own block
                if last > row:
                    self._begin_block(run)
                    self._pending_rows += last - row
                if last == len(sizes):
                    break
                end = int(ends[last - 1]) if last else before
                self._pack(records_of_blocks[begin:end])
                row, begin = last, end
        del self._pending[:begin]

    def finish(self, meta: SegmentMeta) -> WrittenSegment:
        """Complete the object; again with another ``meta`` for another attempt. Raises ValueError when blocks and rows
        differ in bytes."""
        self._flush()
        self._end_page()
        runs = copied(self._runs)
        blocks = concatenated(self._blocks, BLOCK_DTYPE)
        if int(blocks["raw_bytes"].sum(dtype=np.int64)) != int(runs["byte_count"].sum()):
            raise ValueError("blocks and rows differ in bytes")
        if self._keys is None:
            self._keys = encode_keys(np.concatenate(self._key_counts), np.concatenate(self._key_hashes))
            self._key_counts, self._key_hashes = [], []
        keys, key_header = self._keys
        counts = np.array(self._blocks_of_run, np.uint32)
        pages = self._pages, concatenated(self._page_table, PAGE_DTYPE)
        parents = np.array(list(self._parent_places), np.int64)
        tail = encode_tail(meta, self._queues, parents, runs, (blocks, counts), pages, key_header)
        return WrittenSegment(
            queues=self._queues,
            runs=runs,
            blocks_bytes=self._blocks_bytes,
            keys=keys,
            tail=tail,
            tail_crc32c=fastcrc.crc32.iscsi(tail),
            rows=int(runs["rows"].sum()),
        )

    def _number(self, queue: QueueKey) -> int:
        number = self._numbers.setdefault(queue, len(self._queues))
        if number == len(self._queues):
            self._queues.append(queue)
        return number

    def _parents(
        self, parent: NDArray[Any], is_lmq: NDArray[np.bool_], parents: Sequence[QueueKey]
    ) -> NDArray[np.int32]:
        """The place, in this object's footer, of the queue to which each LMQ row refers; -1 for other rows.
        ``parent``: numbers of ``parents``."""
        place_of_row = np.full(len(parent), -1, np.int32)
        used, inverse = np.unique(parent[is_lmq], return_inverse=True)
        numbers = [self._number(parents[number]) for number in used.tolist()]
        places = [self._parent_places.setdefault(number, len(self._parent_places)) for number in numbers]
        place_of_row[is_lmq] = np.array(places, np.int32)[inverse]
        return place_of_row

    # -- blocks -----------------------------------------

    def _limit(self, run: int) -> int:
        """Raw bytes of the block that gets the next records of ``run``."""
        is_shared = self._pending_rows > 0 and self._pending_run != run
        return min(self._codec.block_bytes, SHARED_BLOCK_BYTES) if is_shared else self._codec.block_bytes

    def _begin_block(self, run: int) -> None:
        """Count a new block for ``run``, unless records are pending: then the next ones join their block."""
        if self._pending_rows == 0:
            self._pending_run = run
            self._blocks_of_run[run] += 1

    def _flush(self) -> None:
        if self._pending_rows:
            with memoryview(self._pending) as raw:
                self._pack(raw)
            self._pending = bytearray()

    def _pack(self, raw: memoryview) -> None:
        """A block of the pending rows."""
        stored, codec = self._compressor.compress(raw), CODEC_ZSTD
        if len(stored) >= len(raw):
            stored, codec = bytes(raw), CODEC_RAW
        block = np.zeros(1, BLOCK_DTYPE)
        block[0] = (self._pending_rows, len(raw), len(stored), fastcrc.crc32.iscsi(stored), codec)
        self._pending_rows = 0
        self._append(block, [stored])

    def _append(self, blocks: Table, stored: Sequence[bytes | memoryview]) -> None:
        self._blocks.append(blocks)
        self._blocks_bytes += int(blocks["stored_bytes"].sum(dtype=np.int64))
        if stored:
            assert self._file is not None
            self._file.writelines(stored)

    # -- column pages -----------------------------------------

    def _add_to_pages(
        self, columns: dict[str, NDArray[Any]], run: int, starts: NDArray[np.int64], count: int
    ) -> None:
        """Add ``count`` rows of the run number ``run`` and of those after it, which begin at ``starts``, to the open
        page. A page ends when it is full, and where a part of the tail ends: after each PART_RUNS runs."""
        taken = 0
        for part in [*starts[-run % PART_RUNS :: PART_RUNS].tolist(), count]:
            while taken < part:
                fitting = min(part - taken, PAGE_ROWS - self._page_rows)
                end = taken + fitting
                first, last = np.searchsorted(starts, [taken, end - 1], side="right").tolist()
                numbers = np.arange(first - 1, last)
                places = np.maximum(starts[numbers], taken) - taken + self._page_rows
                if self._page_runs and self._page_runs[-1][0][-1] == run + numbers[0]:
                    numbers, places = numbers[1:], places[1:]
                if len(numbers):
                    self._page_runs.append((run + numbers, places))
                for name, column in columns.items():
                    self._page[name][self._page_rows : self._page_rows + fitting] = column[taken:end]
                self._page_rows += fitting
                taken = end
                if self._page_rows == PAGE_ROWS:
                    self._end_page()
            if part < count and self._page_runs and (part or self._page_runs[-1][0][-1] < run):
                self._end_page()

    def _end_page(self) -> None:
        """Encodes the buffered rows as one column page and compresses it. Pages stay in memory until the tail is
        written."""
        if not self._page_rows:
            return
        runs = picked(self._runs, np.concatenate([numbers for numbers, _ in self._page_runs]))
        first_row = np.concatenate([*(first for _, first in self._page_runs), [self._page_rows]])
        heads: list[Any] = [
            first_row,
            runs["kind"].astype(np.int32),
            runs["min_store_timestamp"],
            runs["min_phys"],
        ]
        raw = encode_page(*heads, *(column[: self._page_rows] for column in self._page.values()))
        stored, codec = self._compressor.compress(raw), CODEC_ZSTD
        if len(stored) >= len(raw):
            stored, codec = raw, CODEC_RAW
        page = np.zeros(1, PAGE_DTYPE)
        page[0] = (self._page_rows, len(raw), len(stored), fastcrc.crc32.iscsi(stored), codec)
        self._page_table.append(page)
        self._pages.append(stored)
        self._page_rows, self._page_runs = 0, []
