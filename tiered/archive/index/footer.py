"""The footer of an index file: its coverage, and the data objects by physical offset.

Read for offsetMsgId queries, verification and merging only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import fastcrc
import numpy as np

from tiered.archive.index.items import Widths
from tiered.archive.index.layout import COVERED_DTYPE, FOOTER_KIND, TRAILER_BYTES, Shape, decode_trailer
from tiered.archive.index.places import PAGE_DTYPE
from tiered.catalog.index_refs import IndexRef
from tiered.errors import CorruptionError
from tiered.formats.container import decode_container, encode_container
from tiered.model.tables import Table


@dataclass(frozen=True)
class Covered:
    """The data objects an index file covers, sorted by ``min_phys``; ``objects["key"]`` indexes ``keys``.

    ``pages`` (PAGE_DTYPE of places.py) name the queue of each record, which stays true when compaction replaces the
    objects.
    """

    objects: Table
    keys: tuple[str, ...]
    pages: Table = field(default_factory=lambda: np.zeros(0, PAGE_DTYPE))

    def page_range(self, shape: Shape, page: int) -> tuple[int, int]:
        """Offset and length of a page of places."""
        before = int(self.pages["stored_bytes"][:page].sum(dtype=np.int64))
        return shape.places_offset + before, int(self.pages["stored_bytes"][page])

    def at(self, phys: int) -> list[tuple[str, np.void]]:
        """Objects whose records may include the one at physical offset ``phys``, the largest first."""
        objects = self.objects
        found = np.flatnonzero((objects["min_phys"] <= phys) & (phys < objects["end_phys"]))
        order = found[np.argsort(-objects["raw_bytes"][found], kind="stable")]
        return [(self.keys[int(objects["key"][index])], objects[index]) for index in order.tolist()]


@dataclass(frozen=True)
class IndexMeta:
    """Coverage of a file: every key of every run that catalog versions [from, to] added. Times are ms since the
    epoch, [begin_phys, end_phys) is a range of the commitlog."""

    from_version: int
    to_version: int
    begin_ms: int
    end_ms: int
    begin_phys: int
    end_phys: int


def joined(parts: Sequence[Covered]) -> Covered:
    """The data objects of several index files as those of one, each once, by commitlog offset."""
    seen: dict[str, np.void] = {}
    for part in parts:
        for row in part.objects:
            seen.setdefault(part.keys[int(row["key"])], row)
    objects = np.array(list(seen.values()), COVERED_DTYPE) if seen else np.zeros(0, COVERED_DTYPE)
    objects["key"] = np.arange(len(objects))
    return Covered(objects[np.argsort(objects["min_phys"], kind="stable")], tuple(seen))


def encode_footer(meta: IndexMeta, covered: Covered) -> bytes:
    """The footer as a container."""
    header = {"meta": list(vars(meta).values()), "object_keys": list(covered.keys)}
    return encode_container(FOOTER_KIND, header, {"objects": covered.objects, "places": covered.pages})


def decode_tail(shape: Shape, tail: bytes) -> tuple[IndexMeta, Covered]:
    """What the end of an index file, ``tail``, says: which versions it covers, and which data objects. ``shape``: its
    sizes, by the catalog. Raises CorruptionError or UnsupportedFormatError."""
    stored, footer_crc = decode_trailer(shape.key, tail)
    if stored != shape or len(tail) != shape.tail_bytes:
        raise CorruptionError(
            f"{shape.key}: the trailer of the index file says {stored}, but the catalog says {shape}"
        )
    footer = memoryview(tail)[: len(tail) - TRAILER_BYTES]
    where = f"{shape.key} footer at {shape.footer_offset}"
    if fastcrc.crc32.iscsi(footer) != footer_crc:
        raise CorruptionError(f"the index file {where} fails its checksum")
    container = decode_container(footer, FOOTER_KIND, source=where)
    try:
        meta = IndexMeta(*map(int, container.header["meta"]))
        keys = tuple(map(str, container.header["object_keys"]))
        objects = container.table("objects", COVERED_DTYPE)
        if len(objects) and int(objects["key"].max()) >= len(keys):
            raise ValueError("a covered object refers to a key that the footer does not list")
        pages = container.table("places", PAGE_DTYPE)
        if int(pages["stored_bytes"].sum(dtype=np.int64)) != shape.footer_offset - shape.places_offset:
            raise ValueError("the pages of places have another length than recorded")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptionError(f"the index file {where} is damaged: {error!r}") from error
    return meta, Covered(objects, keys, pages)


def shape_of(ref: IndexRef) -> Shape:
    """Positions in the file; raises CorruptionError when the catalog contradicts itself."""
    return Shape(
        ref.key, ref.items, ref.slot_bits, Widths(*ref.widths), ref.begin_ms, ref.size_bytes, ref.tail_bytes
    )


def meta_of(ref: IndexRef) -> IndexMeta:
    """What the file covers, for its entry in the catalog."""
    return IndexMeta(ref.from_version, ref.to_version, ref.begin_ms, ref.end_ms, ref.begin_phys, ref.end_phys)
