"""Reads tail and key section of a data object, for indexing.

The key section ends where the tail begins, so one ranged GET returns both for a usual number of keys.
"""

from tiered.formats.segment_index import KeySection, SegmentIndex
from tiered.formats.segment_layout import check_tail_length
from tiered.object_store.interface import ObjectStore

KEYS_PER_ROW = 2
"""Usually a message has its unique key and one of KEYS."""
KEY_BYTES = 8
COUNTS_BYTES = 1024


def key_bytes_guess(rows: int) -> int:
    """An estimate of the bytes of a key section of ``rows`` rows, rather too large than too small."""
    return rows * KEYS_PER_ROW * KEY_BYTES + rows // 4 + COUNTS_BYTES


def read_keys(
    store: ObjectStore, key: str, *, size_bytes: int, tail_bytes: int, rows: int
) -> tuple[SegmentIndex, KeySection]:
    """The footer of the data object ``key`` and the hashes of its messages' keys, by one request, or two if it has more
    keys than expected. ``size_bytes``, ``tail_bytes`` and ``rows``: as the catalog has them. Raises CorruptionError,
    UnsupportedFormatError, or the store's errors."""
    check_tail_length(key, size_bytes, tail_bytes)
    length = min(size_bytes, tail_bytes + key_bytes_guess(rows))
    data = store.get_range(key, size_bytes - length, length)
    index = SegmentIndex(key, size_bytes, data)
    stored = keys_within(index, memoryview(data))
    return index, index.decode_keys(store.get_range(key, *index.key_span) if stored is None else stored)


def keys_within(index: SegmentIndex, end: memoryview) -> memoryview | None:
    """The stored key section of the object of ``index``, if ``end``, its last bytes, has all of it; else None."""
    offset, stored_bytes = index.key_span
    begin = offset - (index.size_bytes - len(end))
    return None if begin < 0 else end[begin : begin + stored_bytes]
