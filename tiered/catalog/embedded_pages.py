"""Commits with embedded pages: layout of the object, and reading parts of it.

    stub 40 | pages | the commit's container | length of the container u64 | CRC32C of those 8 bytes u32 | magic 8

A page is named by the object and its range, so readers fetch just that range, and readers of commits the end. Commits
are never deleted, so embedded pages need no collection. The stub is a header that programs of major version 1 refuse.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import fastcrc

from tiered.errors import CorruptionError
from tiered.formats.container import HEADER, empty_container
from tiered.formats.keys import parse_part_key
from tiered.formats.memory_bound import require_stored_bytes, stored_bytes_max
from tiered.object_store.interface import Body, ObjectStore

PARTS_MAJOR = 2
"""Major version of commits and roots that refer to parts of objects."""
EMBEDDED_BEGIN = HEADER.size
"""Position of the first page in a commit."""
COMMIT_TAIL_BYTES = 256 * 1024
"""Size of the first request for a commit: most are smaller, and it skips most embedded pages of the others."""
TRAILER = struct.Struct("<QI8s")
MAGIC = b"RMQTCMTE"
OBJECT_BYTES_MAX = 1 << 31
"""Limit of a commit's container or a page, as stored."""


def with_embedded_pages(kind: bytes, pages: Sequence[bytes], container: bytes) -> Body:
    """The pieces of a commit object; just the container when there are no pages."""
    if not pages:
        return [container]
    length = len(container).to_bytes(8, "little")
    trailer = TRAILER.pack(len(container), fastcrc.crc32.iscsi(length), MAGIC)
    return [empty_container(kind, PARTS_MAJOR), *pages, container, trailer]


def container_in(data: bytes, *, source: str = "commit") -> bytes:
    """The container of a commit from its last (or all) bytes ``data``; needs as many as ``bytes_wanted`` returns.
    Raises CorruptionError naming ``source``."""
    length = _length_at_end(data, source)
    if length is None:
        return data
    end = len(data) - TRAILER.size
    if length > end:
        raise CorruptionError(f"{source}: an object of {end} bytes cannot hold a container of {length} bytes")
    return data[end - length : end]


def bytes_wanted(data: bytes, *, source: str = "commit") -> int | None:
    """Number of last bytes with the commit's container; None without embedded pages: all bytes."""
    length = _length_at_end(data, source)
    return None if length is None else length + TRAILER.size


def read_commit_bytes(store: ObjectStore, key: str) -> bytes:
    """A commit's container. One request unless it is larger than COMMIT_TAIL_BYTES."""
    source = f"{store.url}/{key}"
    data = store.get_tail(key, COMMIT_TAIL_BYTES)
    wanted = bytes_wanted(data, source=source)
    if wanted is None:
        is_whole = len(data) < COMMIT_TAIL_BYTES
        return data if is_whole else container_in(store.get(key, stored_bytes_max()), source=source)
    if wanted > len(data):
        require_stored_bytes(wanted, source)
        data = store.get_tail(key, wanted)
        if wanted > len(data):
            raise CorruptionError(f"{source}: commit is truncated")
    return container_in(data, source=source)


def read_page_bytes(store: ObjectStore, key: str) -> bytes:
    """A page by its key in the catalog: an object, or a part of one."""
    part = parse_part_key(key)
    require_stored_bytes(0 if part is None else part[2], f"{store.url}/{key}")
    return store.get(key, stored_bytes_max()) if part is None else store.get_range(*part)


def _length_at_end(data: bytes, source: str) -> int | None:
    if len(data) < TRAILER.size:
        return None
    length, crc, magic = TRAILER.unpack_from(data, len(data) - TRAILER.size)
    if magic != MAGIC or fastcrc.crc32.iscsi(length.to_bytes(8, "little")) != crc:
        return None
    if length > OBJECT_BYTES_MAX:
        raise CorruptionError(f"{source}: a container cannot have {length} bytes")
    return int(length)
