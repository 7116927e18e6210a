"""Reads tail and key section of a data object, for indexing.

The key section ends where the tail begins, so one ranged GET returns both for a usual number of keys.
"""

from __future__ import annotations

from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.formats.segment_layout import check_tail_length
from tiered.object_store.interface import ObjectStore

KEYS_PER_ROW = 2
"""A unique id and a key of one's own."""
KEY_BYTES = 8
COUNTS_BYTES = 1024


def key_bytes_guess(rows: int) -> int:
    """Estimated length of the key section of ``rows`` rows, rather too long."""
    return rows * KEYS_PER_ROW * KEY_BYTES + rows // 4 + COUNTS_BYTES


def read_keys(
    store: ObjectStore, key: str, *, size_bytes: int, tail_bytes: int, rows: int
) -> tuple[SegmentIndex, KeySection]:
    """One request, or two. Raises CorruptionError, UnsupportedFormatError, or the store's errors."""
    check_tail_length(key, size_bytes, tail_bytes)
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
