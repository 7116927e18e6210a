"""Layout of an index file: header, pages of items, slots, footer, trailer; and the checks of each.

    header 16 | pages of 256 items, each with its CRC32C | slots | pages of places (places.py) |
    footer (container RMQTIDXF) | trailer 60

Items are sorted, so those of a slot lie together. All positions follow from the numbers of items and slots and the
widths of an item's columns, which are in the catalog: one read of a slot and one of its items answer a query. Every
checksum begins with the file's identity (XXH64 of its key), so bytes of another file never pass.
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import fastcrc
import numpy as np

from tiered.archive.index.items import WIDTHS_MAX, Widths, decode_items
from tiered.archive.index.key_hash import xxh64
from tiered.errors import CorruptionError
from tiered.formats.memory_bound import memory_contained
from tiered.formats.version import FORMAT_MAJOR, FORMAT_MINOR, require_major
from tiered.model.tables import Table

MAGIC = b"RMQTIDX\n"
TRAILER_MAGIC = b"RMQTIDXE"
FOOTER_KIND = b"RMQTIDXF"
HEADER = struct.Struct("<8sHHI")
HEADER_BYTES = HEADER.size
TRAILER = struct.Struct("<QQqIHHIBBBBB3x8sQ")
TRAILER_BYTES = TRAILER.size

COVERED_DTYPE = np.dtype([
    ("key", "<u4"),                # index into the footer's ``object_keys``
    ("tail_crc32c", "<u4"),
    ("size_bytes", "<i8"),
    ("tail_bytes", "<i8"),
    ("min_phys", "<i8"), ("end_phys", "<i8"),
    ("raw_bytes", "<i8"),
])  # fmt: skip
"""A covered data object, sorted by ``min_phys``: for finding a physical offset."""

PAGE_ITEMS = 256
SLOT_ITEMS = 64
"""Items a slot holds on average."""
SLOT = struct.Struct("<QII")
"""first item, items, CRC32C of (file identity, slot, first item, items)."""
SLOT_BITS_MAX = 32
_SLOT_CHECKED = struct.Struct("<QQQI")
_PAGE_CHECKED = struct.Struct("<QQ")


@dataclass(frozen=True)
class Shape:
    """The numbers from which all positions in the index file ``key`` follow. ``size_bytes``: the whole file;
    ``tail_bytes``: its last part, from the footer on. Times are stored as distances from ``base_ms``."""

    key: str
    items: int
    slot_bits: int
    widths: Widths
    base_ms: int
    size_bytes: int
    tail_bytes: int

    def __post_init__(self) -> None:
        """Raises CorruptionError for numbers and widths that no file of ``size_bytes`` can have."""
        if not 0 <= self.slot_bits <= SLOT_BITS_MAX or self.items < 0 or self.tail_bytes < TRAILER_BYTES:
            raise CorruptionError(
                f"{self.key} is damaged: an index file cannot have {self.items} items, 2^{self.slot_bits} slots and a "
                f"footer of {self.tail_bytes} bytes"
            )
        if not all(0 <= width <= most for width, most in zip(self.widths, WIDTHS_MAX, strict=True)):
            raise CorruptionError(
                f"{self.key} is damaged: an index file cannot have columns of {tuple(self.widths)} bytes"
            )
        if self.places_offset > self.footer_offset:
            raise CorruptionError(
                f"{self.key} is damaged: {self.items} items and 2^{self.slot_bits} slots do not fit in an index file "
                f"of {self.size_bytes} bytes"
            )

    @cached_property
    def identity(self) -> int:
        """A hash of the file's key, with which every checksum in it begins, so that bytes of another file fail."""
        return xxh64(self.key.encode())

    @property
    def slots_offset(self) -> int:
        """Begin of the slots, end of the pages."""
        return HEADER_BYTES + self.items * self.widths.item_bytes + 4 * self.pages

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next."""
        return PAGE_ITEMS * self.widths.item_bytes + 4

    @property
    def places_offset(self) -> int:
        """Begin of the pages of places, end of the slots."""
        return self.slots_offset + (SLOT.size << self.slot_bits)

    @property
    def footer_offset(self) -> int:
        """Begin of the tail."""
        return self.size_bytes - self.tail_bytes

    @property
    def pages(self) -> int:
        """Pages of items; the last may be shorter."""
        return -(-self.items // PAGE_ITEMS)

    def slot_of(self, hash_: int) -> int:
        """The slot of a hash: its highest bits."""
        return hash_ >> (64 - self.slot_bits) if self.slot_bits else 0

    def slot_range(self, slot: int) -> tuple[int, int]:
        """Offset and length of one slot."""
        return self.slots_offset + SLOT.size * slot, SLOT.size

    def page_range(self, first_page: int, end_page: int) -> tuple[int, int]:
        """Offset and length of consecutive pages."""
        begin = HEADER_BYTES + self.page_stride * first_page
        end = min(HEADER_BYTES + self.page_stride * end_page, self.slots_offset)
        return begin, end - begin

    @property
    def tail_range(self) -> tuple[int, int]:
        """Offset and length of footer and trailer."""
        return self.footer_offset, self.tail_bytes


def slot_bits_for(items: int) -> int:
    """log2 of the number of slots for so many items."""
    return min(SLOT_BITS_MAX, max(0, (items // SLOT_ITEMS).bit_length() - 1))


def encode_header() -> bytes:
    """The first 16 bytes of an index file, which say that it is one, and in which version of the format."""
    return HEADER.pack(MAGIC, FORMAT_MAJOR, FORMAT_MINOR, 0)


def check_header(key: str, data: bytes) -> None:
    """Raise CorruptionError unless ``data`` is the header of an index file of a version read here."""
    if data[:10] != encode_header()[:10] or len(data) != HEADER_BYTES:
        raise CorruptionError(f"{key}: the first {HEADER_BYTES} bytes are not the header of an index file")


def encode_slot(identity: int, slot: int, first_item: int, count: int) -> bytes:
    """The stored form of one slot."""
    crc = fastcrc.crc32.iscsi(_SLOT_CHECKED.pack(identity, slot, first_item, count))
    return SLOT.pack(first_item, count, crc)


def decode_slot(shape: Shape, slot: int, data: bytes) -> tuple[int, int]:
    """The number of the first item of ``slot`` (a range of hashes) and how many items it has, from its stored bytes
    ``data``. Raises CorruptionError."""
    offset, length = shape.slot_range(slot)
    where = f"{shape.key}: slot {slot} of the index file, [{offset}, {offset + length}),"
    if len(data) != length:
        raise CorruptionError(f"{where} was read as {len(data)} bytes, not {length}")
    first_item, count, crc = SLOT.unpack(data)
    if crc != fastcrc.crc32.iscsi(_SLOT_CHECKED.pack(shape.identity, slot, first_item, count)):
        raise CorruptionError(f"{where} fails its checksum")
    if first_item + count > shape.items:
        raise CorruptionError(f"{where} refers to items beyond the last one, {shape.items}")
    return first_item, count


def page_crc(identity: int, page: int, content: bytes | memoryview) -> int:
    """Checksum of a page's items."""
    begun: int = fastcrc.crc32.iscsi(_PAGE_CHECKED.pack(identity, page))
    crc: int = fastcrc.crc32.iscsi(content, begun)
    return crc


def decode_pages(shape: Shape, first_page: int, end_page: int, data: bytes) -> Table:
    """The items (ITEM_DTYPE, read-only) of the pages from ``first_page`` up to, but not including, ``end_page`` of an
    index file, from their stored bytes ``data``. Raises CorruptionError if one fails its checksum."""
    offset, length = shape.page_range(first_page, end_page)
    if len(data) != length:
        raise CorruptionError(
            f"{shape.key}: only {len(data)} of the {length} bytes from byte {offset} of the index file on could be read"
        )
    identity, view, stride = shape.identity, memoryview(data), shape.page_stride
    parts: list[memoryview] = []
    for page in range(first_page, end_page):
        begin = stride * (page - first_page)
        end = min(begin + stride, length)
        content, stored = view[begin : end - 4], bytes(view[end - 4 : end])
        if int.from_bytes(stored, "little") != page_crc(identity, page, content):
            raise CorruptionError(
                f"{shape.key}: page {page} of the index file, [{offset + begin}, {offset + end}), fails its checksum"
            )
        parts.append(content)
    with memory_contained(f"the pages {first_page} to {end_page - 1} of the index file {shape.key}"):
        return decode_items(b"".join(parts), shape.widths, shape.base_ms)


class Form(NamedTuple):
    """The layout of a file, decided before its items are written."""

    slot_bits: int
    widths: Widths
    base_ms: int


def encode_trailer(footer_offset: int, items: int, footer: bytes, form: Form) -> bytes:
    """The last bytes of a file whose footer begins at ``footer_offset``."""
    total = footer_offset + len(footer) + TRAILER_BYTES
    crc = fastcrc.crc32.iscsi(footer)
    first = (footer_offset, items, form.base_ms, crc, FORMAT_MAJOR, FORMAT_MINOR)
    rest = (form.slot_bits, *form.widths, TRAILER_MAGIC, total)
    return TRAILER.pack(*first, fastcrc.crc32.iscsi(TRAILER.pack(*first, 0, *rest)), *rest)


def decode_trailer(key: str, data: bytes) -> tuple[Shape, int]:
    """The sizes of the index file ``key`` and the checksum of its footer, from its last bytes ``data``.

    Raises CorruptionError, or UnsupportedFormatError when another major version wrote it.
    """
    if len(data) < TRAILER_BYTES:
        raise CorruptionError(f"{key}: an index file cannot have only {len(data)} bytes")
    raw = bytes(data[len(data) - TRAILER_BYTES :])
    fields = TRAILER.unpack(raw)
    footer_offset, items, base_ms, footer_crc, major, minor, own_crc, slot_bits, *widths, magic, total = (
        fields
    )
    if magic != TRAILER_MAGIC:
        raise CorruptionError(f"{key}: the last {TRAILER_BYTES} bytes are not the trailer of an index file")
    # The trailer's own checksum is of its bytes with a 0 in the checksum's place.
    if raw != TRAILER.pack(*fields) or own_crc != fastcrc.crc32.iscsi(
        TRAILER.pack(*fields[:6], 0, *fields[7:])
    ):
        raise CorruptionError(f"{key}: the trailer of the index file fails its checksum")
    require_major(major, minor, f"{key}: index file")
    return Shape(key, items, slot_bits, Widths(*widths), base_ms, total, total - footer_offset), footer_crc
