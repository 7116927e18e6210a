"""Decompresses the stored blocks and column pages of objects, each after its checksum. No I/O."""

from collections.abc import Iterator
from contextlib import contextmanager

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered.errors import CorruptionError
from tiered.formats.memory_bound import memory_contained
from tiered.formats.segment_layout import CODEC_RAW


def expand_block(
    stored: memoryview, row: np.void, decompressor: zstandard.ZstdDecompressor, where: str
) -> bytes | memoryview:
    """The decompressed bytes of a stored block or column page. ``row``: what the footer says of it (BLOCK_DTYPE);
    ``where`` names it in messages. Raises CorruptionError; its CRC32C is checked first."""
    _check_stored(stored, row, where)
    if int(row["codec"]) == CODEC_RAW:
        return stored
    return inflate(stored, int(row["raw_bytes"]), decompressor, where)


def expand_into(
    memory: NDArray[np.uint8],
    stored: memoryview,
    row: np.void,
    decompressor: zstandard.ZstdDecompressor,
    where: str,
) -> None:
    """Like ``expand_block``, but the decompressed bytes fill ``memory``, which has to be as long as they are."""
    _check_stored(stored, row, where)
    if int(row["codec"]) == CODEC_RAW:
        memory[:] = np.frombuffer(stored, np.uint8)
        return
    with _damage_named(where), decompressor.stream_reader(stored, read_across_frames=True) as reader:
        _check_frame(stored, len(memory), where)
        if reader.readinto(memory.data) != len(memory) or reader.read(1):
            raise CorruptionError(f"{where} does not expand to the {len(memory)} bytes recorded")


def _check_stored(stored: memoryview, row: np.void, where: str) -> None:
    if len(stored) != int(row["stored_bytes"]) or fastcrc.crc32.iscsi(stored) != int(row["crc32c"]):
        raise CorruptionError(f"{where} fails its CRC32C")


def inflate(
    stored: memoryview, raw_bytes: int, decompressor: zstandard.ZstdDecompressor, where: str
) -> bytes:
    """One zstd frame of exactly ``raw_bytes``; nothing is allocated for a frame of another length."""
    with _damage_named(where):
        _check_frame(stored, raw_bytes, where)
        raw = decompressor.decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    if len(raw) != raw_bytes:
        raise CorruptionError(f"{where} expands to {len(raw)} bytes, not {raw_bytes}")
    return raw


def _check_frame(stored: memoryview, raw_bytes: int, where: str) -> None:
    if zstandard.frame_content_size(stored) != raw_bytes:
        raise CorruptionError(f"{where} does not expand to the {raw_bytes} bytes recorded")


@contextmanager
def _damage_named(where: str) -> Iterator[None]:
    """Raises CorruptionError for what the decompressor raises about the bytes of ``where``."""
    try:
        with memory_contained(where):
            yield
    except zstandard.ZstdError as error:
        raise CorruptionError(f"{where} does not decompress: {error}") from error
