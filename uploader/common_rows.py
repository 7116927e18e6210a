"""Puts the rows of joined objects below a divergence point as objects of this writer's epoch.

Compaction joins the rows of many commits. If the broker's log diverges inside a joined object, its first rows are in
both logs (tiered/catalog/joined_objects.py). Blocks below the divergence point are copied as they are stored; of the
block around it, and of blocks that runs share, the records are packed again. Each attempt has a key of its own.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered.archive.segment_reader import SegmentReader
from tiered.catalog.joined_objects import CommonRows, JoinedObject
from tiered.catalog.state import CatalogState
from tiered.errors import WITHOUT_EFFECT, CorruptionError
from tiered.formats.keys import compaction_attempts_from, data_key, parse_set_key, set_key
from tiered.formats.segment import BlockCodec, RowTable, SegmentMeta
from tiered.formats.segment_index import expand_block
from tiered.formats.segment_layout import HEADER_BYTES
from tiered.formats.segment_writer import SegmentWriter, WrittenSegment
from tiered.model.tables import RUN_DTYPE, RunKind
from tiered.object_store.interface import FileRange, ObjectStore
from tiered.object_store.own_name import compose_own
from uploader.work_disk import work_disk

logger = logging.getLogger(__name__)

READ_BYTES_MAX = 8 << 20
"""Limit of one GET; a larger block is read by one GET too."""


class CommonRowsWriter:
    """A WriteCommonRows of one archive. An object that was put is not put again while it is unnamed. ``work_dir``: for
    one object at a time; empty: the system's directory for temporary files."""

    def __init__(
        self,
        archive: ObjectStore,
        *,
        writer: str,
        clock_ms: Callable[[], int],
        work_dir: str = "",
        codec: BlockCodec | None = None,
    ) -> None:
        self._archive = archive
        self._writer = writer
        self._clock_ms = clock_ms
        self._work_dir = work_dir
        self._codec = codec or BlockCodec()
        self._done: dict[tuple[str, int, int, bytes], CommonRows] = {}
        self._attempt = compaction_attempts_from(random.SystemRandom().getrandbits(40))

    def __call__(
        self, state: CatalogState, phys: int, objects: Sequence[JoinedObject], unnamed: list[str]
    ) -> list[CommonRows]:
        """See WriteCommonRows. Raises CorruptionError if an object is not what the catalog says."""
        found = []
        if objects:
            logger.warning(
                "the log diverges inside %d objects that compaction joined: copying their rows below %d",
                len(objects),
                phys,
            )
        for joined in objects:
            place = (joined.key, state.epoch, phys, joined.runs["ordinal"].tobytes())
            made = self._done.get(place)
            if made is None or made.key not in unnamed:  # a commit has made it a pending deletion
                made = self._done[place] = self._write(state, phys, joined, unnamed)
            found.append(made)
        return found

    def _write(self, state: CatalogState, phys: int, joined: JoinedObject, unnamed: list[str]) -> CommonRows:
        self._attempt += 1
        key = _key(joined, phys, state.epoch, self._attempt)
        meta = SegmentMeta(
            state.cluster, state.broker, state.epoch, self._attempt, state.cursor.history, state.version,
            int(joined.runs["min_phys"].min()), phys, self._clock_ms(), self._writer,
        )  # fmt: skip
        with (
            work_disk(self._work_dir, "a temporary object"),
            tempfile.TemporaryDirectory(prefix="common-rows-", dir=self._work_dir or None) as directory,
        ):
            path = Path(directory, "blocks")
            with path.open("wb", buffering=1 << 20) as file:
                writer = SegmentWriter(file, self._codec)
                _Source(self._archive, joined).copy(phys, writer)
                segment = writer.finish(meta)
            unnamed.append(key)
            blocks = FileRange(str(path), 0, HEADER_BYTES + segment.blocks_bytes)
            try:
                compose_own(self._archive, key, [blocks, segment.keys, segment.tail])
            except WITHOUT_EFFECT:
                unnamed.remove(key)
                raise
        return _common_rows(key, joined, segment, state.epoch)


def _key(joined: JoinedObject, phys: int, epoch: int, attempt: int) -> str:
    if parse_set_key(joined.key) is not None:
        return set_key(f"{phys:020d}_common", epoch, attempt)
    run = joined.runs[0]
    return data_key(joined.queues[int(run["queue"])], int(run["base_queue_offset"]), epoch, attempt)


def _common_rows(key: str, joined: JoinedObject, segment: WrittenSegment, epoch: int) -> CommonRows:
    runs = segment.runs.astype(RUN_DTYPE)
    runs["version"] = joined.runs["version"]
    (place,) = segment.object_row(epoch, int(joined.place["ttl_class_days"]))
    return CommonRows(key, place, runs)


class _Source:
    """A joined object that is copied from front to back."""

    def __init__(self, archive: ObjectStore, joined: JoinedObject) -> None:
        self._archive = archive
        self._joined = joined
        reader = SegmentReader.open(
            archive, joined.key, size_bytes=int(joined.place["size_bytes"]), tail_bytes=int(joined.place["tail_bytes"])
        )  # fmt: skip
        self._index = reader.index
        self._keys = reader.key_hashes()
        self._hash_ends = np.concatenate([[0], np.cumsum(self._keys.counts, dtype=np.int64)])
        self._window = memoryview(b"")
        self._window_offset = 0
        self._end_offset = HEADER_BYTES
        """Of the last block that is needed."""
        self._decoded: tuple[int, bytes | memoryview] = (-1, b"")
        self._decompressor = zstandard.ZstdDecompressor()

    def copy(self, phys: int, writer: SegmentWriter) -> None:
        """Add the rows below ``phys`` of all runs to ``writer``. Raises CorruptionError."""
        counts = [self._count(run, phys) for run in self._joined.runs]
        for run, count in zip(self._joined.runs, counts, strict=True):
            if int(run["kind"]) != RunKind.LMQ:
                end_block = self._index.block_span(int(run["ordinal"]), 0, count).end_block
                self._end_offset = max(self._end_offset, int(self._index.block_offsets[end_block]))
        for run, count in zip(self._joined.runs, counts, strict=True):
            rows = self._rows(int(run["ordinal"]), count)
            head = run.copy()
            head["min_store_timestamp"], head["min_phys"] = rows.store_timestamp.min(), rows.phys.min()
            writer.begin_runs([self._joined.queues[int(run["queue"])]], head.reshape(1))
            writer.add_rows(rows, self._index.queues)
            if int(run["kind"]) != RunKind.LMQ:
                self._copy_records(int(run["ordinal"]), rows, writer)

    def _count(self, run: np.void, phys: int) -> int:
        """Rows of ``run`` below ``phys``, which are its first ones."""
        index, ordinal = self._index, int(run["ordinal"])
        queue = self._joined.queues[int(run["queue"])]
        index.check_run(run, queue)
        rows = index.row_columns(ordinal)
        count = int((rows.phys < phys).sum())
        if count == 0 or bool(
            (rows.phys[count:] < phys).any() or (rows.phys + rows.size)[:count].max() > phys
        ):
            raise CorruptionError(f"{index.key}: {phys} is between no two records of {queue}")
        return count

    def _rows(self, ordinal: int, count: int) -> RowTable:
        """The first rows of a run, with their keys."""
        rows, first = self._index.row_columns(ordinal), int(self._index.first_row[ordinal])
        columns = {one.name: getattr(rows, one.name)[:count] for one in fields(RowTable)}
        columns["key_count"] = self._keys.counts[first : first + count]
        columns["key_hashes"] = self._keys.hashes[self._hash_ends[first] : self._hash_ends[first + count]]
        return RowTable(**columns)

    # -- records ----------------------------------------------------------------------------------------------

    def _copy_records(self, ordinal: int, rows: RowTable, writer: SegmentWriter) -> None:
        """Blocks that only have ``rows``, the first of a run, as they are stored; other records one block at a time."""
        bounds = self._index.bounds
        begin = int(bounds.run_rows[ordinal])
        end = begin + len(rows)
        span = self._index.block_span(ordinal, 0, len(rows))
        is_whole = (bounds.block_rows[:-1] >= begin) & (bounds.block_rows[1:] <= end)
        block = span.first_block
        while block < span.end_block:
            if is_whole[block]:
                last = self._last_whole(is_whole, block, span.end_block)
                writer.add_stored(self._index.blocks[block:last], [self._stored(block, last)])
                block = last
                continue
            first = max(begin, int(bounds.block_rows[block])) - begin
            last_row = min(end, int(bounds.block_rows[block + 1])) - begin
            raw_begin = int(bounds.run_raw[ordinal] - bounds.block_raw[block]) + int(rows.position[first])
            sizes = rows.size[first:last_row].astype(np.int64)
            records = memoryview(self._raw(block))[raw_begin : raw_begin + int(sizes.sum())]
            writer.add_records([records], sizes)
            block += 1

    def _last_whole(self, is_whole: NDArray[np.bool_], block: int, end_block: int) -> int:
        """The end of whole blocks from ``block`` on that one GET reads."""
        limit = int(self._index.block_offsets[block]) + READ_BYTES_MAX
        end = block + 1
        while end < end_block and is_whole[end] and int(self._index.block_offsets[end + 1]) <= limit:
            end += 1
        return end

    def _raw(self, block: int) -> bytes | memoryview:
        """The records of a block; the last one is kept, as runs share blocks."""
        if self._decoded[0] != block:
            where = f"{self._index.key}: block {block}"
            stored = self._stored(block, block + 1)
            self._decoded = block, expand_block(stored, self._index.blocks[block], self._decompressor, where)
        return self._decoded[1]

    def _stored(self, first: int, last: int) -> memoryview:
        """The bytes of blocks [first, last), which are used in ascending order."""
        offset, end = int(self._index.block_offsets[first]), int(self._index.block_offsets[last])
        if offset < self._window_offset or end > self._window_offset + len(self._window):
            length = max(end - offset, min(READ_BYTES_MAX, self._end_offset - offset))
            self._window = memoryview(self._archive.get_range(self._index.key, offset, length))
            self._window_offset = offset
        begin = offset - self._window_offset
        return self._window[begin : begin + end - offset]
