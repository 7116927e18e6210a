"""Builds index files in memory from a list of items."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiered.archive.index.footer import Covered, IndexMeta
from tiered.archive.index.items import ITEM_DTYPE, widths_for
from tiered.archive.index.layout import COVERED_DTYPE, Form, Shape, slot_bits_for
from tiered.archive.index.order import sorted_items
from tiered.archive.index.writer import write_index
from tiered.model.tables import Table

META = IndexMeta(1, 9, 1_700_000_000_000, 1_700_000_060_000, 0, 1 << 30)
NOTHING = Covered(np.zeros(0, COVERED_DTYPE), ())
KEY = "index/1700000000000-1700000060000-1_a.idx"


@dataclass
class IndexBytes:
    """An index file in memory, counting how it is read."""

    shape: Shape
    data: bytes
    reads: int = 0

    async def read(self, key: str, offset: int, length: int) -> bytes:
        """As an object store would."""
        return self.read_now(key, offset, length)

    def read_now(self, key: str, offset: int, length: int) -> bytes:
        """The same without waiting."""
        assert key == self.shape.key
        assert 0 <= offset <= offset + length <= len(self.data)
        self.reads += 1
        return self.data[offset : offset + length]


def items_of(rows: Sequence[tuple[int, int, int, int, int]]) -> Table:
    """(hash, queue offset, store timestamp, queue id, generation) as ITEM_DTYPE."""
    return np.array(list(rows), ITEM_DTYPE)


def build(
    items: Table,
    *,
    key: str = KEY,
    covered: Covered = NOTHING,
    items_expected: int | None = None,
    chunk: int = 1000,
) -> IndexBytes:
    """An index file of ``items`` in any order."""
    ordered = sorted_items(items)
    sink = io.BytesIO()
    expected = len(ordered) if items_expected is None else items_expected
    base_ms = int(ordered["store_timestamp"].min(initial=META.begin_ms))
    span_ms = int(ordered["store_timestamp"].max(initial=META.end_ms)) - base_ms
    form = Form(slot_bits_for(expected), widths_for(ordered, span_ms), base_ms)
    chunks = (ordered[at : at + chunk] for at in range(0, len(ordered), chunk))
    return IndexBytes(write_index(sink, key, chunks, META, covered, form), sink.getvalue())
