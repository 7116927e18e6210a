"""Commits that carry pages: how the object is laid out, and reading parts of objects.

    stub 40 | pages, one behind the other | the commit's container | length of the container u64 | CRC32C of those 8
    bytes u32 | magic 8

A page is named by the object and the range it lies in, so a reader of pages fetches just that, and a reader of commits
the end. Commits are never deleted: what they carry needs no collecting. The stub is a header that programs of major
version 1 refuse by name. Does not know what a page or a commit says.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import fastcrc

from tiered.errors import CorruptionError
from tiered.formats.container import HEADER, empty_container
from tiered.formats.keys import parse_part_key
from tiered.object_store.interface import Body, ObjectStore

PARTS_MAJOR = 2
"""Major version of commits and roots that name parts of objects."""
EMBEDDED_BEGIN = HEADER.size
"""Where the first page lies in a commit."""
COMMIT_TAIL_BYTES = 256 * 1024
"""The first request for a commit: most are smaller, and of those that carry pages it leaves out most of these."""
TRAILER = struct.Struct("<QI8s")
MAGIC = b"RMQTCMTE"


def with_embedded_pages(kind: bytes, pages: Sequence[bytes], container: bytes) -> Body:
    """The pieces of a commit object; just the container when there are no pages."""
    if not pages:
        return [container]
    length = len(container).to_bytes(8, "little")
    trailer = TRAILER.pack(len(container), fastcrc.crc32.iscsi(length), MAGIC)
    return [empty_container(kind, PARTS_MAJOR), *pages, container, trailer]


def container_in(data: bytes) -> bytes:
    """The container of the commit whose last (or all) bytes ``data`` are; needs as many as ``bytes_wanted`` says."""
    length = _length_at_end(data)
    return data if length is None else data[len(data) - TRAILER.size - length : len(data) - TRAILER.size]


def bytes_wanted(data: bytes) -> int | None:
    """How many last bytes of a commit hold its container; None: it carries nothing, all of it is."""
    length = _length_at_end(data)
    return None if length is None else length + TRAILER.size


def read_commit_bytes(store: ObjectStore, key: str) -> bytes:
    """A commit's container. One request unless it is larger than COMMIT_TAIL_BYTES."""
    data = store.get_tail(key, COMMIT_TAIL_BYTES)
    wanted = bytes_wanted(data)
    if wanted is None:
        return data if len(data) < COMMIT_TAIL_BYTES else container_in(store.get(key))
    if wanted > len(data):
        data = store.get_tail(key, wanted)
        if wanted > len(data):
            raise CorruptionError(f"{store.url}/{key}: the commit is cut short")
    return container_in(data)


def read_page_bytes(store: ObjectStore, key: str) -> bytes:
    """A page by the name the catalog gives it: an object, or a part of one."""
    part = parse_part_key(key)
    return store.get(key) if part is None else store.get_range(*part)


def _length_at_end(data: bytes) -> int | None:
    if len(data) < TRAILER.size:
        return None
    length, crc, magic = TRAILER.unpack_from(data, len(data) - TRAILER.size)
    if magic != MAGIC or fastcrc.crc32.iscsi(length.to_bytes(8, "little")) != crc:
        return None
    return int(length)
