"""Encodes a segment, the content of one data object.

A stream object (SO) and a stream set object (SSO) have the same format; only the key differs. Layout (every byte is in
docs/FORMATS.md):

    header 16 | blocks | key section | column pages | parts | footer (container RMQTSEGF) | trailer 48

The footer of more than PART_RUNS runs leaves them to parts (containers RMQTSEGP), so that a reader opens one of these.
``segment_index.py`` decodes it, ``tiered.archive.segment_reader`` reads it from a store.

``BlockPacker`` gathers, compresses and checksums the blocks on a pool of threads. The work is cut into pieces of about
a megabyte, so that gathered bytes are still in the cache of the core that compresses them. Each thread keeps its
compressor and its buffer, as page faults of new ones would cost a tenth of the compression.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered.formats.container import encode_container
from tiered.formats.segment_layout import (
    BLOCK_DTYPE,
    CODEC_RAW,
    CODEC_ZSTD,
    FOOTER_KIND,
    HEADER_BYTES,
    PAGE_DTYPE,
    PAGE_ROWS,
    PART_DTYPE,
    PART_KIND,
    SEGMENT_RUN_DTYPE,
    RunView,
    encode_header,
    encode_trailer,
    part_bounds,
)
from tiered.kernels.columns import encode_page
from tiered.kernels.gather import check_rows, cut_blocks, gather_records
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import selection_of
from tiered.model.tables import RUN_DTYPE, RunKind, Table

PIECE_BYTES = 1024 * 1024
"""Raw bytes a thread gathers at once, unless a single block is larger."""
KEPT_BYTES = 2 * PIECE_BYTES
"""A thread keeps a buffer of up to so many bytes; a larger one is for one piece alone."""


@dataclass(frozen=True)
class Records:
    """Places of records in ``arena``, block after block; a negative position is a row without bytes."""

    arena: NDArray[np.uint8]
    position: NDArray[np.int64]
    size: NDArray[np.int32]

    def first_rows(self, blocks: Table) -> NDArray[np.int64]:
        """The row each block begins with."""
        counts = blocks["rows"].astype(np.int64)
        ordinal = np.cumsum(counts) - counts
        if len(self.position) == int(counts.sum()):
            return ordinal
        rows: NDArray[np.int64] = np.flatnonzero(self.position >= 0)[ordinal]
        return rows


class BlockPacker:
    """Compresses the blocks of one object after the other. With ``threads`` 1, in the calling thread."""

    def __init__(self, level: int, threads: int) -> None:
        self.shape = (level, threads)
        self._level = level
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="compress") if threads > 1 else None

    @contextmanager
    def packing(self, blocks: Table, records: Records) -> Iterator[list[Future[bytes]]]:
        """Compress in the background during the ``with`` block; after it the arena is no longer read.

        ``blocks`` has its rows and raw bytes, and is complete once all futures are done, which have the stored bytes of
        the blocks, in order. They raise ValueError when a record lies outside the arena.
        """
        pieces: list[Future[bytes]] = []
        try:
            rows = records.first_rows(blocks).tolist()
            for first, last in _pieces(blocks["raw_bytes"]):
                pieces.append(self._submit(blocks[first:last], records, rows[first]))
            yield pieces
        finally:
            for piece in pieces:
                piece.cancel()
            wait(pieces)

    def _submit(self, blocks: Table, records: Records, row: int) -> Future[bytes]:
        if self._threads is not None:
            return self._threads.submit(self._pack, blocks, records, row)
        done: Future[bytes] = Future()
        done.set_result(self._pack(blocks, records, row))
        return done

    def _pack(self, blocks: Table, records: Records, row: int) -> bytes:
        """The stored bytes of neighbouring ``blocks``, the first of which begins with ``row``. Fills in their sizes,
        checksums and codecs: a block that does not shrink is stored raw. Raises ValueError if a record lies outside the
        arena."""
        compress, buffer = self._tools(int(blocks["raw_bytes"].sum()))
        raw_bytes = blocks["raw_bytes"].tolist()
        end = sum(raw_bytes)
        stopped = int(gather_records(records.arena, records.position, records.size, row, end, buffer))
        if stopped < 0:
            raise ValueError(
                f"the record of row {-1 - stopped} lies outside the part of the commitlog that was read"
            )
        stored: list[bytes] = []
        codecs: list[int] = []
        begin = 0
        for length in raw_bytes:
            raw = buffer[begin : begin + length].data
            block = compress(raw)
            is_smaller = len(block) < length
            stored.append(block if is_smaller else bytes(raw))
            codecs.append(CODEC_ZSTD if is_smaller else CODEC_RAW)
            begin += length
        blocks["stored_bytes"], blocks["codec"] = list(map(len, stored)), codecs
        blocks["crc32c"] = list(map(fastcrc.crc32.iscsi, stored))
        return b"".join(stored)  # one allocation: separate ones fragment memory

    def _tools(self, buffer_bytes: int) -> tuple[Any, NDArray[np.uint8]]:
        """This thread's compressor, and a buffer of at least ``buffer_bytes``."""
        own = self._own
        if not hasattr(own, "compress"):
            compressor = zstandard.ZstdCompressor(
                level=self._level, write_checksum=False, write_content_size=True
            )
            own.compress, own.buffer = compressor.compress, np.empty(0, np.uint8)
        buffer: NDArray[np.uint8] = own.buffer
        if len(buffer) < buffer_bytes:
            buffer = np.empty(max(buffer_bytes, PIECE_BYTES), np.uint8)
            if len(buffer) <= KEPT_BYTES:
                own.buffer = buffer
        return own.compress, buffer

    def close(self) -> None:
        """Stop the threads once idle."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def _pieces(raw_bytes: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Neighbouring blocks [first, last) of up to PIECE_BYTES together, or one that is larger."""
    ends = np.cumsum(raw_bytes, dtype=np.int64)
    cuts = [0]
    while cuts[-1] < len(ends):
        begin = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, begin + PIECE_BYTES, side="right"))))
    return pairwise(cuts)


Buffer = bytes | bytearray | memoryview

SHARED_BLOCK_BYTES = 64 * 1024
"""Raw bytes up to which a block takes records of several runs: tiny frames cost more CPU than their bytes."""
_PAGE_BYTES_MAX = PAGE_ROWS * 70 + 64  # seven columns of at most ten bytes
_EMPTY_HASHES = np.zeros(0, np.uint64)


@dataclass(frozen=True)
class SegmentMeta:
    """The writer of an object and its source; in the footer, so that a repair can tell live objects from garbage.

    ``catalog_version``: the newest version the writer knew; [from_phys, to_phys): the commitlog range of its cycle;
    ``history_phys``: where its log history began, -1 if that does not matter.
    """

    cluster: str
    broker: str
    epoch: int
    attempt: int
    log_history: int
    catalog_version: int
    from_phys: int
    to_phys: int
    created_ms: int
    writer: str
    history_phys: int = -1


@dataclass(frozen=True)
class BlockCodec:
    """zstd level, target size of a block in raw bytes, and threads that compress one object."""

    level: int = 1
    block_bytes: int = 512 * 1024
    threads: int = 1


@dataclass(frozen=True)
class RowTable:
    """Consume-queue rows, run after run. All columns have one entry per row but ``key_hashes``.

    ``position`` is in the arena when written (-1 for LMQ rows), in the bytes of the run when read.
    """

    position: NDArray[Any]  # i8
    size: NDArray[Any]  # i4, bytes of the stored record
    tags_code: NDArray[Any]  # i8
    store_timestamp: NDArray[Any]  # i8, ms since the epoch
    phys: NDArray[Any]  # i8, physical commitlog offset
    queue_offset: NDArray[Any]  # i8, base offset of the row
    inner_num: NDArray[
        Any
    ]  # i4, queue offsets that the row spans; of sparse runs, as stored, with the hole before
    key_count: NDArray[Any]  # u2
    parent: NDArray[Any]  # i4, index into the segment's queues; -1 but in LMQ rows
    parent_queue_offset: NDArray[Any]  # i8, -1 but in LMQ rows
    key_hashes: NDArray[Any] = field(default_factory=lambda: _EMPTY_HASHES)  # u8, sum(key_count) of them

    def __len__(self) -> int:
        return len(self.size)


def row_at(rows: RowTable, queue_offset: int) -> int:
    """The row that spans ``queue_offset``, which is in the run, or the next one. ``len(rows)``: none follows."""
    row = int(np.searchsorted(rows.queue_offset, queue_offset, side="right")) - 1
    is_past = row < 0 or queue_offset >= int(rows.queue_offset[row]) + int(rows.inner_num[row])
    return row + is_past


@dataclass(frozen=True)
class EncodedSegment:
    """An object ready to be put. ``body`` shares no memory with the arena or the scratch.

    The last ``tail_bytes``, with the CRC32C ``tail_crc32c``, open the object. ``raw_bytes`` counts message bytes.
    """

    body: list[Buffer]
    size_bytes: int
    tail_bytes: int
    tail_crc32c: int
    rows: int
    raw_bytes: int
    min_phys: int
    end_phys: int


class SegmentScratch:
    """Memory and threads that an encoder reuses from object to object. Not thread-safe."""

    def __init__(self) -> None:
        self._packer: BlockPacker | None = None
        self.page: NDArray[np.uint8] = np.empty(_PAGE_BYTES_MAX, np.uint8)
        self.streams: NDArray[np.uint8] = np.empty(PAGE_ROWS * 70, np.uint8)

    def packer(self, codec: BlockCodec) -> BlockPacker:
        """The packer for ``codec``."""
        if self._packer is None or self._packer.shape != (codec.level, codec.threads):
            self.close()
            self._packer = BlockPacker(codec.level, codec.threads)
        return self._packer

    def close(self) -> None:
        """Stop its threads."""
        if self._packer is not None:
            self._packer.close()


def encode_segment(
    meta: SegmentMeta,
    queues: Sequence[QueueKey],
    runs: Table,
    rows: RowTable,
    arena: NDArray[np.uint8],
    codec: BlockCodec,
    scratch: SegmentScratch | None = None,
) -> EncodedSegment:
    """The object that holds ``runs`` (RUN_DTYPE) with ``rows`` in the same order.

    ``runs["queue"]`` and ``rows.parent`` index ``queues``. Raises ValueError when runs and rows contradict each other
    or a record lies outside the arena, as a reader would refuse the object.
    """
    scratch = scratch or SegmentScratch()
    view = RunView.of(runs)
    _check(queues, runs, view, rows)
    is_lmq = runs["kind"] == RunKind.LMQ
    parents = np.zeros(0, np.int64)
    if is_lmq.any():
        # LMQ rows refer to parents by their places in the footer, where they are the first queues.
        parents = np.unique(rows.parent[rows.parent >= 0])
        numbers = np.where(rows.parent < 0, -1, np.searchsorted(parents, rows.parent))
        rows = replace(rows, parent=numbers.astype(np.int32))
    blocks, blocks_of_run = _cut_blocks(view, is_lmq, rows.size, codec.block_bytes)
    with scratch.packer(codec).packing(blocks, Records(arena, _i8(rows.position), _i4(rows.size))) as packed:
        keys, key_header = encode_keys(rows.key_count, rows.key_hashes)
        pages = _encode_pages(view, rows, codec.level, scratch)
        body: list[Buffer] = [encode_header(), *(piece.result() for piece in packed)]
    tail = encode_tail(meta, queues, parents, runs, (blocks, blocks_of_run), pages, key_header)
    if keys:
        body.append(keys)
    body.append(tail)
    return EncodedSegment(
        body=body,
        size_bytes=HEADER_BYTES + int(blocks["stored_bytes"].sum()) + len(keys) + len(tail),
        tail_bytes=len(tail),
        tail_crc32c=fastcrc.crc32.iscsi(tail),
        rows=len(rows),
        raw_bytes=int(runs["byte_count"].sum()),
        min_phys=int(runs["min_phys"].min()),
        end_phys=int(runs["end_phys"].max()),
    )


def warm_up() -> None:
    """Compile the kernels (seconds) or load them from the cache (some 100 ms) before they are needed."""
    one = np.ones(1, np.int64)
    runs = np.zeros(1, RUN_DTYPE)
    for name in ("end_queue_offset", "rows", "byte_count", "end_phys"):
        runs[name] = 1
    zero = np.zeros(1, np.int64)
    rows = RowTable(zero, one, zero, zero, zero, zero, one, np.zeros(1, np.uint16), zero - 1, zero - 1)
    meta = SegmentMeta("", "", 0, 0, 0, 0, 0, 0, 0, "")
    encode_segment(meta, [QueueKey("warm-up", 0, 0)], runs, rows, np.zeros(1, np.uint8), BlockCodec())


def _check(queues: Sequence[QueueKey], runs: Table, view: RunView, rows: RowTable) -> None:
    """Raises ValueError unless the columns have one row for each row of the runs, and the offsets, positions and
    sizes in them agree with the runs."""
    count = len(rows)
    columns = (
        rows.position,
        rows.tags_code,
        rows.store_timestamp,
        rows.phys,
        rows.queue_offset,
        rows.inner_num,
        rows.key_count,
        rows.parent,
        rows.parent_queue_offset,
    )
    if len(runs) == 0 or any(len(column) != count for column in columns):
        raise ValueError("a segment needs a run, and columns of equal length")
    if int(runs["rows"].min()) < 1 or int(view.first_row[-1]) != count:
        raise ValueError(f"a segment's runs have {int(view.first_row[-1])} rows, its columns {count}")
    if int(runs["queue"].max()) >= len(queues):
        raise ValueError("a run has the number of a queue that the segment's table of queues lacks")
    if int(rows.key_count.sum(dtype=np.int64)) != len(rows.key_hashes):
        raise ValueError("the key counts of the rows do not add up to the number of key hashes")
    bad = check_rows(
        view.first_row,
        view.kind,
        runs["base_queue_offset"].astype(np.int64),
        runs["end_queue_offset"].astype(np.int64),
        runs["byte_count"].astype(np.int64),
        len(queues),
        _i8(rows.position),
        _i4(rows.size),
        _i8(rows.queue_offset),
        _i4(rows.inner_num),
        _i4(rows.parent),
    )
    if bad >= 0:
        run = view.run_at(min(int(bad), count - 1))
        raise ValueError(f"row {bad} does not fit in run {run}, of {queues[int(runs['queue'][run])]}")


def _cut_blocks(
    view: RunView, is_lmq: NDArray[Any], size: NDArray[Any], block_bytes: int
) -> tuple[Table, NDArray[np.uint32]]:
    """Block table (places and sums still 0), and how many blocks begin in each run."""
    block_rows = np.empty(len(size), np.uint32)
    block_raw = np.empty(len(size), np.int64)
    blocks_of_run = np.zeros(len(view), np.uint32)
    count = int(
        cut_blocks(
            view.first_row,
            is_lmq.astype(np.uint8),
            _i4(size),
            block_bytes,
            SHARED_BLOCK_BYTES,
            block_rows,
            block_raw,
            blocks_of_run,
        )
    )
    blocks = np.zeros(count, BLOCK_DTYPE)
    blocks["rows"] = block_rows[:count]
    blocks["raw_bytes"] = block_raw[:count]
    return blocks, blocks_of_run


def encode_keys(key_count: NDArray[Any], key_hashes: NDArray[Any]) -> tuple[bytes, dict[str, int]]:
    """The key section: counts per row (zstd), then the hashes uncompressed; and what the footer says of it."""
    if len(key_hashes) == 0:
        return b"", {"count": 0, "stored_counts_bytes": 0, "crc32c": 0}
    counts = zstandard.ZstdCompressor(level=1).compress(key_count.astype("<u2").tobytes())
    section = counts + key_hashes.astype("<u8").tobytes()
    header = {"count": len(key_hashes), "stored_counts_bytes": len(counts)}
    return section, header | {"crc32c": fastcrc.crc32.iscsi(section)}


def _encode_pages(
    view: RunView, rows: RowTable, level: int, scratch: SegmentScratch
) -> tuple[list[bytes], Table]:
    """Column pages of up to PAGE_ROWS rows each; one holds rows of many runs of a part, a long run spans pages."""
    compressor = zstandard.ZstdCompressor(level=level)
    columns: list[Any] = [
        *view.columns,
        _i4(rows.size),
        _i8(rows.tags_code),
        _i8(rows.store_timestamp),
        _i8(rows.phys),
        _i4(rows.inner_num),
        _i4(rows.parent),
        _i8(rows.parent_queue_offset),
        scratch.streams,
        scratch.page,
    ]
    ends_of_parts = view.first_row[part_bounds(len(view))].tolist()
    starts = [row for first, end in pairwise(ends_of_parts) for row in range(first, end, PAGE_ROWS)]
    table = np.zeros(len(starts), PAGE_DTYPE)
    pages: list[bytes] = []
    for number, (start, end) in enumerate(pairwise([*starts, len(rows)])):
        length = int(encode_page(start, end, view.run_at(start), *columns))
        raw = scratch.page[:length].tobytes()
        stored, codec = compressor.compress(raw), CODEC_ZSTD
        if len(stored) >= length:
            stored, codec = raw, CODEC_RAW
        table[number] = (end - start, length, len(stored), fastcrc.crc32.iscsi(stored), codec)
        pages.append(stored)
    return pages, table


def encode_tail(
    meta: SegmentMeta,
    queues: Sequence[QueueKey],
    parents: NDArray[np.int64],
    runs: Table,
    blocks: tuple[Table, NDArray[np.uint32]],
    pages: tuple[Sequence[bytes], Table],
    keys: dict[str, int],
) -> bytes:
    """The tail of an object: column pages, parts, footer and trailer. ``runs`` refer to ``queues`` by number, and
    ``parents`` are the numbers of those that LMQ rows refer to, by their places in ``parents``. ``blocks``: their
    table, and how many begin in each run; ``pages``: the stored ones, and their table."""
    topics, names = selection_of(queues).table()
    run_table = np.zeros(len(runs), SEGMENT_RUN_DTYPE)
    for name in runs.dtype.names or ():
        run_table[name] = runs[name]
    run_table["object"] = 0
    run_table["version"] = 0
    run_table["ordinal"] = np.arange(len(runs))
    run_table["blocks"] = blocks[1]
    tables = {"queues": names, "runs": run_table, "blocks": blocks[0], "pages": pages[1]}
    bounds, parts = part_bounds(len(runs)), list[bytes]()
    if len(parents):  # they become the first queues, as rows refer to them by place
        order = np.concatenate([parents, np.setdiff1d(np.arange(len(names)), parents)])
        tables["queues"] = names[order]
        run_table["queue"] = np.argsort(order)[runs["queue"]]
    if len(bounds) > 2:  # each part has its runs and their queues; the footer keeps only the parents
        table = np.zeros(len(bounds) - 1, PART_DTYPE)
        for number, (first, end) in enumerate(pairwise(bounds)):
            part = run_table[first:end]
            used, part["queue"] = np.unique(runs["queue"][first:end], return_inverse=True)
            header, own_queues = _named(topics, names[used])
            own_tables = {"queues": own_queues, "runs": part}
            parts.append(encode_container(PART_KIND, header, own_tables, is_packed=True, level=1))
            in_blocks = part[part["kind"] != RunKind.LMQ]
            sums = part["rows"].sum(), in_blocks["rows"].sum(), in_blocks["byte_count"].sum()
            table[number] = (end - first, len(parts[-1]), *sums)
        header, tables["queues"] = _named(topics, names[parents])
        topics = header["topics"]
        del tables["runs"]
        tables["parts"] = table
    header = {
        "meta": asdict(meta),
        "topics": topics,
        "keys": keys,
        "encryption": None,  # key id and nonces, once blocks are encrypted
        "dictionaries": [],  # keys of dictionary objects; run field ``dictionary`` counts from 1
    }
    footer = encode_container(FOOTER_KIND, header, tables)
    tail_offset = HEADER_BYTES + int(blocks[0]["stored_bytes"].sum(dtype=np.int64))
    tail_offset += keys["stored_counts_bytes"] + 8 * keys["count"]
    footer_offset = tail_offset + sum(map(len, pages[0])) + sum(map(len, parts))
    return b"".join([*pages[0], *parts, footer, encode_trailer(tail_offset, footer_offset, footer)])


def _named(topics: Sequence[str], queues: Table) -> tuple[dict[str, Any], Table]:
    """A container's header with the names that ``queues`` use of ``topics``, and ``queues`` with numbers of these."""
    used, queues["topic"] = np.unique(queues["topic"], return_inverse=True)
    return {"topics": [topics[number] for number in used.tolist()]}, queues


def _i8(column: NDArray[Any]) -> NDArray[np.int64]:
    return np.ascontiguousarray(column, np.int64)


def _i4(column: NDArray[Any]) -> NDArray[np.int32]:
    return np.ascontiguousarray(column, np.int32)
