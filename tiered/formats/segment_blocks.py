"""Gathers, compresses and checksums the blocks of a segment on a pool of threads.

The work is cut into pieces of about a megabyte, so that gathered bytes are still in the cache of the core that
compresses them. Each thread keeps its compressor and its buffer: their page faults cost a tenth of the compression.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered.formats.segment_layout import CODEC_RAW, CODEC_ZSTD
from tiered.kernels.gather import gather_records
from tiered.model.tables import Table

PIECE_BYTES = 1024 * 1024
"""Raw bytes a thread gathers at once, unless a single block is larger."""
KEPT_BYTES = 2 * PIECE_BYTES


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


class PackedBlocks:
    """Blocks being compressed."""

    def __init__(self, pieces: Sequence[Future[bytes]]) -> None:
        self._pieces = pieces

    def stored(self) -> list[bytes]:
        """Wait for the stored bytes of all blocks, in order; their table is then complete.

        Raises ValueError when a record lies outside the arena.
        """
        return [piece.result() for piece in self._pieces]


class BlockPacker:
    """Compresses the blocks of one object after the other. With ``threads`` 1, in the calling thread."""

    def __init__(self, level: int, threads: int) -> None:
        self.shape = (level, threads)
        self._level = level
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="compress") if threads > 1 else None

    @contextmanager
    def packing(self, blocks: Table, records: Records) -> Iterator[PackedBlocks]:
        """Compress in the background during the ``with`` block; after it the arena is no longer read.

        ``blocks`` has its rows and raw bytes.
        """
        pieces: list[Future[bytes]] = []
        try:
            rows = records.first_rows(blocks).tolist()
            for first, last in _pieces(blocks["raw_bytes"]):
                pieces.append(self._submit(blocks[first:last], records, rows[first]))
            yield PackedBlocks(pieces)
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
        """Neighbouring blocks, the first of which begins with ``row``."""
        compress, buffer = self._tools(int(blocks["raw_bytes"].sum()))
        raw_bytes = blocks["raw_bytes"].tolist()
        end = sum(raw_bytes)
        stopped = int(gather_records(records.arena, records.position, records.size, row, end, buffer))
        if stopped < 0:
            raise ValueError(f"the record of row {-1 - stopped} lies outside the arena")
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
