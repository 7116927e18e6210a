"""Layout and coverage of an index file, from its entry in the catalog."""

from __future__ import annotations

from tiered.archive.index.footer import IndexMeta
from tiered.archive.index.items import Widths
from tiered.archive.index.layout import Shape
from tiered.catalog.index_refs import IndexRef


def shape_of(ref: IndexRef) -> Shape:
    """Positions in the file; raises CorruptionError when the catalog contradicts itself."""
    return Shape(
        ref.key, ref.items, ref.slot_bits, Widths(*ref.widths), ref.begin_ms, ref.size_bytes, ref.tail_bytes
    )


def meta_of(ref: IndexRef) -> IndexMeta:
    """Coverage of the file."""
    return IndexMeta(ref.from_version, ref.to_version, ref.begin_ms, ref.end_ms, ref.begin_phys, ref.end_phys)
