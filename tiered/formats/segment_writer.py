"""Writes a segment from parts of others: runs in order, their rows, and for each either stored blocks or records.

For objects that memory does not hold: blocks go to a file at once, or stay in objects from which the store copies
them. Only the key section and the tail are kept. ``tiered.formats.segment`` encodes objects that are in memory.
"""

from __future__ import annotations

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
    encode_footer,
    encode_keys,
)
from tiered.formats.segment_layout import (
    BLOCK_DTYPE,
    CODEC_RAW,
    CODEC_ZSTD,
    HEADER_BYTES,
    PAGE_DTYPE,
    PAGE_ROWS,
    TRAILER_BYTES,
    encode_header,
    encode_trailer,
)
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, RunKind, Table, concatenated

_COLUMNS = {
    "size": np.int32, "tags_code": np.int64, "store_timestamp": np.int64, "phys": np.int64,
    "inner_num": np.int32, "parent": np.int32, "parent_queue_offset": np.int64,
}  # fmt: skip
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
    """One object. Not thread-safe. Calls for each run, in order: ``begin_run``, then ``add_rows`` and either
    ``add_stored`` or ``add_records``, any number of times."""

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
        self._runs: list[NDArray[Any]] = []
        self._blocks: list[Table] = []
        self._blocks_bytes = 0
        self._blocks_of_run: list[int] = []
        self._pending = bytearray()
        self._pending_rows = 0
        self._pending_run = -1
        self._page = {name: np.empty(PAGE_ROWS, kind) for name, kind in _COLUMNS.items()}
        self._page_rows = 0
        self._page_runs: list[tuple[int, int]] = []
        """Runs with rows in the page: (run, first row in the page)."""
        self._pages: list[bytes] = []
        self._page_table: list[Table] = []
        self._key_counts: list[NDArray[Any]] = []
        self._key_hashes: list[NDArray[Any]] = []
        self._keys: tuple[bytes, dict[str, int]] | None = None

    def begin_run(self, queue: QueueKey, head: Any) -> None:
        """The rows that follow are a new run. Of ``head``, a row of RUN_DTYPE, the kind, the begin and the minima
        count; what depends on the rows is summed up."""
        self._end_run()
        run = np.zeros(1, RUN_DTYPE)
        for name in ("kind", "base_queue_offset", "base_byte", "min_store_timestamp", "min_phys"):
            run[name] = head[name]
        run["queue"] = self._number(queue)
        run["ordinal"] = len(self._runs)
        run["end_queue_offset"] = head["base_queue_offset"]
        run["max_store_timestamp"], run["end_phys"] = head["min_store_timestamp"], head["min_phys"]
        self._runs.append(run)
        self._blocks_of_run.append(0)

    def add_rows(self, rows: RowTable, parents: Sequence[QueueKey]) -> None:
        """Columns of the run's next rows. ``rows.parent`` indexes ``parents``; positions do not matter.

        Raises ValueError for rows that do not continue the run.
        """
        run = self._runs[-1][0]
        is_lmq = int(run["kind"]) == RunKind.LMQ
        if len(rows) == 0 or int(rows.queue_offset[0]) != int(run["end_queue_offset"]):
            raise ValueError(f"rows do not continue {self._queues[int(run['queue'])]}")
        run["rows"] += len(rows)
        run["end_queue_offset"] += int(rows.inner_num.sum(dtype=np.int64))
        if not is_lmq:
            run["byte_count"] += int(rows.size.sum(dtype=np.int64))
        if (
            int(rows.store_timestamp.min()) < run["min_store_timestamp"]
            or int(rows.phys.min()) < run["min_phys"]
        ):
            raise ValueError(f"rows of {self._queues[int(run['queue'])]} are before the begin of their run")
        run["max_store_timestamp"] = max(int(run["max_store_timestamp"]), int(rows.store_timestamp.max()))
        run["end_phys"] = max(int(run["end_phys"]), int((rows.phys + rows.size).max()))
        columns = {name: getattr(rows, name) for name in _COLUMNS}
        if is_lmq:
            columns["parent"] = self._parents(rows.parent, parents)
        self._add_to_pages(columns, len(rows))
        self._key_counts.append(rows.key_count.astype("<u2"))
        self._key_hashes.append(rows.key_hashes.astype("<u8"))

    def add_stored(self, blocks: Table, stored: Sequence[bytes | memoryview]) -> None:
        """Blocks (BLOCK_DTYPE) of the run, as they are stored; ``stored`` is empty without a file."""
        self._flush()
        self._blocks_of_run[-1] += len(blocks)
        self._append(blocks, stored)

    def add_records(self, records: memoryview, sizes: NDArray[Any]) -> None:
        """Records of the run, back to back, which go to new blocks."""
        ends = np.cumsum(sizes, dtype=np.int64)
        run, row, begin = len(self._runs) - 1, 0, 0
        while row < len(sizes):
            is_shared = self._pending_rows > 0 and self._pending_run != run
            limit = min(self._codec.block_bytes, SHARED_BLOCK_BYTES) if is_shared else self._codec.block_bytes
            last = int(np.searchsorted(ends, begin + limit - len(self._pending), side="right"))
            if last <= row:
                if self._pending_rows:
                    self._flush()
                    continue
                last = row + 1  # a larger record has its own block
            end = int(ends[last - 1])
            if self._pending_rows == 0:
                self._pending_run = run
                self._blocks_of_run[run] += 1
            self._pending += records[begin:end]
            self._pending_rows += last - row
            row, begin = last, end
            if row < len(sizes):
                self._flush()

    def finish(self, meta: SegmentMeta) -> WrittenSegment:
        """Complete the object; again with another ``meta`` for another attempt. Raises ValueError when blocks and rows
        differ in bytes."""
        self._end_run()
        self._flush()
        self._end_page()
        runs = concatenated(self._runs, RUN_DTYPE)
        blocks = concatenated(self._blocks, BLOCK_DTYPE)
        if int(blocks["raw_bytes"].sum(dtype=np.int64)) != int(runs["byte_count"].sum()):
            raise ValueError("blocks and rows differ in bytes")
        if self._keys is None:
            self._keys = encode_keys(np.concatenate(self._key_counts), np.concatenate(self._key_hashes))
            self._key_counts, self._key_hashes = [], []
        keys, key_header = self._keys
        counts = np.array(self._blocks_of_run, np.uint32)
        pages = concatenated(self._page_table, PAGE_DTYPE)
        footer = encode_footer(meta, self._queues, runs, blocks, counts, pages, key_header)
        tail_offset = HEADER_BYTES + self._blocks_bytes + len(keys)
        footer_offset = tail_offset + sum(map(len, self._pages))
        tail = b"".join([*self._pages, footer, encode_trailer(tail_offset, footer_offset, footer)])
        assert len(tail) == footer_offset - tail_offset + len(footer) + TRAILER_BYTES
        return WrittenSegment(
            queues=self._queues, runs=runs, blocks_bytes=self._blocks_bytes, keys=keys, tail=tail,
            tail_crc32c=fastcrc.crc32.iscsi(tail), rows=int(runs["rows"].sum()),
        )  # fmt: skip

    def _number(self, queue: QueueKey) -> int:
        number = self._numbers.setdefault(queue, len(self._queues))
        if number == len(self._queues):
            self._queues.append(queue)
        return number

    def _parents(self, parent: NDArray[Any], parents: Sequence[QueueKey]) -> NDArray[np.int32]:
        used, inverse = np.unique(parent, return_inverse=True)
        numbers = np.array([self._number(parents[number]) for number in used.tolist()], np.int32)
        found: NDArray[np.int32] = numbers[inverse]
        return found

    # -- blocks -----------------------------------------

    def _end_run(self) -> None:
        if 2 * len(self._pending) >= SHARED_BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._pending_rows:
            return
        raw = bytes(self._pending)
        stored, codec = self._compressor.compress(raw), CODEC_ZSTD
        if len(stored) >= len(raw):
            stored, codec = raw, CODEC_RAW
        block = np.zeros(1, BLOCK_DTYPE)
        block[0] = (self._pending_rows, len(raw), len(stored), fastcrc.crc32.iscsi(stored), codec)
        self._pending, self._pending_rows = bytearray(), 0
        self._append(block, [stored])

    def _append(self, blocks: Table, stored: Sequence[bytes | memoryview]) -> None:
        self._blocks.append(blocks)
        self._blocks_bytes += int(blocks["stored_bytes"].sum(dtype=np.int64))
        if stored:
            assert self._file is not None
            self._file.writelines(stored)

    # -- column pages -----------------------------------------

    def _add_to_pages(self, columns: dict[str, NDArray[Any]], count: int) -> None:
        taken, run = 0, len(self._runs) - 1
        while taken < count:
            if not self._page_runs or self._page_runs[-1][0] != run:
                self._page_runs.append((run, self._page_rows))
            fitting = min(count - taken, PAGE_ROWS - self._page_rows)
            for name, column in columns.items():
                self._page[name][self._page_rows : self._page_rows + fitting] = column[
                    taken : taken + fitting
                ]
            self._page_rows += fitting
            taken += fitting
            if self._page_rows == PAGE_ROWS:
                self._end_page()

    def _end_page(self) -> None:
        if not self._page_rows:
            return
        runs = [self._runs[run][0] for run, _ in self._page_runs]
        first_row = np.array([first for _, first in self._page_runs] + [self._page_rows], np.int64)
        heads: list[Any] = [
            first_row,
            np.array([run["kind"] for run in runs], np.int32),
            np.array([run["min_store_timestamp"] for run in runs], np.int64),
            np.array([run["min_phys"] for run in runs], np.int64),
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
