"""Reads a page of the catalog: an object, or a range of one that holds several."""

from tiered.formats.keys import parse_part_key
from tiered.formats.memory_bound import require_stored_bytes, stored_bytes_max
from tiered.object_store.interface import ObjectStore


def read_page_bytes(store: ObjectStore, key: str) -> bytes:
    """The page that ``key`` names."""
    part = parse_part_key(key)
    if part is None:
        return store.get(key, stored_bytes_max())
    require_stored_bytes(part.length, f"{store.url}/{key}")
    return store.get_range(*part)
