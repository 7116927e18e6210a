"""Fixed parts of a segment: magics, header, trailer, and the tables its footer adds to the catalog's."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import fastcrc
import numpy as np
from numpy.typing import NDArray

from tiered.errors import CorruptionError
from tiered.formats.memory_bound import require_stored_bytes
from tiered.formats.version import FORMAT_MAJOR, FORMAT_MINOR, require_major
from tiered.model.tables import RUN_DTYPE, Table, begins

MAGIC = b"RMQTSEG\n"
FOOTER_KIND = b"RMQTSEGF"
PART_KIND = b"RMQTSEGP"
TRAILER_MAGIC = b"RMQTSEGE"
HEADER = struct.Struct("<8sHHI")
HEADER_BYTES = HEADER.size
_TRAILER = struct.Struct("<QQIHHI4x8sQ")
TRAILER_BYTES = _TRAILER.size

CODEC_RAW = 0
CODEC_ZSTD = 1
PAGE_ROWS = 4096
"""Rows of a column page; some 40 KiB before compression."""
BLOCK_RAW_BYTES_MAX = 64 * 1024 * 1024
"""A larger block is valid only with a single record."""
PART_RUNS = 2048
"""Runs of each part of a tail but the last; a smaller tail has none."""
RECORD_BYTES_MAX = 1 << 30
"""Limit of a block with a single record: the size of a commitlog file."""
TAIL_BYTES_MAX = 1 << 30

BLOCK_DTYPE = np.dtype([
    ("rows", "<u4"), ("raw_bytes", "<u4"), ("stored_bytes", "<u4"), ("crc32c", "<u4"), ("codec", "u1"),
])  # fmt: skip
"""Blocks, back to back from the end of the header, in run order; small runs share them. ``crc32c``: of stored bytes."""

PAGE_DTYPE = BLOCK_DTYPE
"""Column pages, back to back from the start of the tail, in row order."""

SEGMENT_RUN_DTYPE = np.dtype([*RUN_DTYPE.descr, ("blocks", "<u4"), ("dictionary", "<u4")])
"""A run in a footer or part; ``blocks`` begin in it. Its first row and first byte are sums over earlier runs."""

PART_DTYPE = np.dtype(
    [("runs", "<u4"), ("stored_bytes", "<u4"), ("rows", "<i8"), ("block_rows", "<i8"), ("raw_bytes", "<i8")]
)
"""Parts, back to back up to the footer. ``block_rows`` and ``raw_bytes`` are those of runs that are not LMQs'."""


@dataclass(frozen=True)
class RunView:
    """Runs as contiguous columns. ``first_row`` has one entry more than there are runs."""

    first_row: NDArray[np.int64]
    kind: NDArray[np.int32]
    min_store_timestamp: NDArray[np.int64]
    min_phys: NDArray[np.int64]

    @classmethod
    def of(cls, runs: Table, rows_before: int = 0) -> RunView:
        """Columns of a run table whose row counts are not negative. Their object has ``rows_before`` ahead of them."""
        return cls(
            begins(runs["rows"]) + rows_before,
            runs["kind"].astype(np.int32),
            np.ascontiguousarray(runs["min_store_timestamp"], np.int64),
            np.ascontiguousarray(runs["min_phys"], np.int64),
        )

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def columns(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The columns that ``encode_page`` and ``decode_page`` take, in the order of their parameters."""
        return self.first_row, self.kind, self.min_store_timestamp, self.min_phys

    def run_at(self, row: int) -> int:
        """The run that holds ``row``."""
        return int(np.searchsorted(self.first_row, row, side="right")) - 1


@dataclass(frozen=True)
class Trailer:
    """Positions from the start of the object."""

    tail_offset: int
    footer_offset: int
    footer_crc32c: int
    total_bytes: int
    version: tuple[int, int]
    """Major and minor format version."""


def part_bounds(runs: int) -> list[int]:
    """The first run of each part of a tail of so many ``runs``, and the end of the last; of a small one: all."""
    return [*range(0, runs, PART_RUNS), runs]


def encode_header() -> bytes:
    """The first 16 bytes of a segment: they identify the object to a person or a repair tool."""
    return HEADER.pack(MAGIC, FORMAT_MAJOR, FORMAT_MINOR, 0)


def check_header(data: bytes | memoryview, version: tuple[int, int], *, source: str) -> None:
    """Raise CorruptionError unless ``data`` begins a segment of the ``version`` (major, minor) of its trailer."""
    if bytes(data[:HEADER_BYTES]) != HEADER.pack(MAGIC, *version, 0):
        raise CorruptionError(
            f"{source} does not begin with the header of a segment of format {version[0]}.{version[1]}"
        )


def check_tail_length(key: str, size_bytes: int, tail_bytes: int) -> None:
    """Raise CorruptionError if no segment can have ``size_bytes``, of which ``tail_bytes`` are its tail."""
    if not TRAILER_BYTES <= tail_bytes <= min(size_bytes, TAIL_BYTES_MAX):
        raise CorruptionError(
            f"{key} cannot have a tail (the end that describes its messages) of {tail_bytes} of its {size_bytes} bytes"
        )
    require_stored_bytes(tail_bytes, key)


def encode_trailer(tail_offset: int, footer_offset: int, footer: bytes) -> bytes:
    """The last bytes of a segment whose footer begins at ``footer_offset``."""
    crc = fastcrc.crc32.iscsi(footer)
    total = footer_offset + len(footer) + TRAILER_BYTES
    fields = (tail_offset, footer_offset, crc, FORMAT_MAJOR, FORMAT_MINOR)
    trailer_crc = fastcrc.crc32.iscsi(_TRAILER.pack(*fields, 0, TRAILER_MAGIC, total))
    return _TRAILER.pack(*fields, trailer_crc, TRAILER_MAGIC, total)


def decode_trailer(data: bytes | memoryview, size_bytes: int, *, source: str) -> Trailer:
    """Check the trailer, which ends ``data``, of an object of ``size_bytes``.

    Raises CorruptionError, or UnsupportedFormatError when another major version wrote it.
    """
    if len(data) < TRAILER_BYTES:
        raise CorruptionError(f"{source}: {len(data)} bytes are too few for a segment")
    raw = bytes(data[len(data) - TRAILER_BYTES :])
    tail_offset, footer_offset, footer_crc, major, minor, trailer_crc, magic, total = _TRAILER.unpack(raw)
    where = f"{source}: trailer [{size_bytes - TRAILER_BYTES}, {size_bytes})"
    if magic != TRAILER_MAGIC:
        raise CorruptionError(
            f"{where} does not end with the bytes that mark a segment: it is damaged, or no segment"
        )
    fields = (tail_offset, footer_offset, footer_crc, major, minor)
    # Packing the fields again finds damaged padding, which unpacking ignores. The checksum was made of the trailer with
    # 0 in the place of the checksum.
    is_padding_whole = raw == _TRAILER.pack(*fields, trailer_crc, magic, total)
    if not is_padding_whole or trailer_crc != fastcrc.crc32.iscsi(_TRAILER.pack(*fields, 0, magic, total)):
        raise CorruptionError(f"{where} fails its CRC32C")
    require_major(major, minor, f"{source}: segment")
    if total != size_bytes:
        raise CorruptionError(f"{source} has {size_bytes} bytes, but its trailer says {total}")
    if not HEADER_BYTES <= tail_offset <= footer_offset <= total - TRAILER_BYTES:
        raise CorruptionError(f"{where} points outside the object")
    return Trailer(tail_offset, footer_offset, footer_crc, total, (major, minor))
