"""Opens a segment that is not in the catalog: its trailer has the sizes."""

from tiered.archive.segment_reader import SegmentReader
from tiered.errors import CorruptionError
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import TRAILER_BYTES, decode_trailer
from tiered.object_store.interface import ObjectStore


def open_uncataloged(store: ObjectStore, key: str) -> SegmentReader:
    data = store.get(key)
    if len(data) < TRAILER_BYTES:
        raise CorruptionError(f"{key}: {len(data)} bytes are too few for a segment")
    tail_offset = decode_trailer(data, len(data), source=key).tail_offset
    return SegmentReader(store, SegmentIndex(key, len(data), data[tail_offset:]))
