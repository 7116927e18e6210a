"""Tail and key section of a data object together: what indexing reads of a segment.

The key section ends where the tail begins, so one ranged GET brings both where messages have as many keys as usual.
Owns that request.
"""

from __future__ import annotations

from tiered.errors import CorruptionError
from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.formats.segment_layout import TRAILER_BYTES
from tiered.object_store.interface import ObjectStore

KEYS_PER_ROW = 2
"""A unique id and a key of one's own."""
KEY_BYTES = 8
COUNTS_BYTES = 1024


def key_bytes_guess(rows: int) -> int:
    """About how long the key section of ``rows`` rows is, rather more than less."""
    return rows * KEYS_PER_ROW * KEY_BYTES + rows // 4 + COUNTS_BYTES


def read_keys(
    store: ObjectStore, key: str, *, size_bytes: int, tail_bytes: int, rows: int
) -> tuple[SegmentIndex, KeySection]:
    """One request, or two. Raises CorruptionError, UnsupportedFormatError, or what the store raises."""
    if not TRAILER_BYTES <= tail_bytes <= size_bytes:
        raise CorruptionError(f"{key}: a tail of {tail_bytes} of {size_bytes} bytes is impossible")
    length = min(size_bytes, tail_bytes + key_bytes_guess(rows))
    begin = size_bytes - length
    data = store.get_range(key, begin, length)
    index = SegmentIndex(key, size_bytes, data)
    offset, stored_bytes = index.key_span
    if offset >= begin:
        stored: bytes | memoryview = memoryview(data)[offset - begin : offset - begin + stored_bytes]
    else:
        stored = store.get_range(key, offset, stored_bytes)
    return index, index.decode_keys(stored)
