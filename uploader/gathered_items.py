"""Sorts the items of one index file with a bounded number of them in memory.

More are spilled, sorted piece by piece, to an unnamed temporary file, and merged at the end. A producer chooses the
number of keys of a message: 32 KiB of one-letter keys are 16,000.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np

from tiered.archive.index.footer import Covered, IndexMeta
from tiered.archive.index.items import ITEM_DTYPE, Widths, widest, widths_for
from tiered.archive.index.layout import COVERED_DTYPE, Form, Shape, slot_bits_for
from tiered.archive.index.merge import merged_items
from tiered.archive.index.order import sorted_items
from tiered.archive.index.writer import write_index
from tiered.errors import CorruptionError
from tiered.model.tables import Table

SLICE_ITEMS = 65_536
"""Items written at once."""
_NO_META = IndexMeta(0, 0, 0, 0, 0, 0)
_NOTHING = Covered(np.zeros(0, COVERED_DTYPE), ())


class GatheredItems:
    """At most ``items_max`` are in memory, except those of one larger row. Must be closed."""

    def __init__(self, items_max: int) -> None:
        self._items_max = items_max
        self._waiting: list[Table] = []
        self._waiting_count = 0
        self._file: IO[bytes] | None = None
        self._spilled: list[Shape] = []
        self._begins: dict[str, int] = {}
        self.count = 0
        """Items added, duplicates included."""

    def add(self, items: Table) -> None:
        """Add items in any order. Raises OSError when spilling fails."""
        if self._waiting_count and self._waiting_count + len(items) > self._items_max:
            self._spill()
        self._waiting.append(items)
        self._waiting_count += len(items)
        self.count += len(items)

    def add_all_or_none(self, pieces: Iterable[Table]) -> None:
        """Add all pieces; if ``pieces`` raises, none is added."""
        self._spill()
        mark, count = len(self._spilled), self.count
        try:
            for piece in pieces:
                self.add(piece)
        except BaseException:
            del self._spilled[mark:]
            self._waiting, self._waiting_count, self.count = [], 0, count
            raise

    def in_order(self) -> Iterator[Table]:
        """All items in file order, without duplicates. Nothing may be added afterwards."""
        if not self._spilled:
            yield from _sliced(self._taken())
            return
        self._spill()
        yield from merged_items(self._read, self._spilled, items_in_memory=self._items_max)

    def widths(self, span_ms: int) -> Widths:
        """Field widths of a file whose times span ``span_ms``."""
        spilled = (shape.widths for shape in self._spilled)
        return widest((*spilled, *(widths_for(items, 0) for items in self._waiting)), span_ms)

    def close(self) -> None:
        """Close the temporary file."""
        self._waiting = []
        if self._file is not None:
            self._file.close()

    def _taken(self) -> Table:
        items = np.concatenate(self._waiting) if self._waiting else np.zeros(0, ITEM_DTYPE)
        self._waiting, self._waiting_count = [], 0
        return sorted_items(items)

    def _spill(self) -> None:
        if not self._waiting_count:
            return
        items = self._taken()
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        times = items["store_timestamp"]
        begin_ms, end_ms = int(times.min()), int(times.max())
        form = Form(slot_bits_for(len(items)), widths_for(items, end_ms - begin_ms), begin_ms)
        key = f"piece {len(self._begins)}"
        self._begins[key] = self._file.seek(0, os.SEEK_END)
        self._spilled.append(write_index(self._file, key, _sliced(items), _NO_META, _NOTHING, form))
        self._file.flush()

    def _read(self, key: str, offset: int, length: int) -> bytes:
        assert self._file is not None
        data = os.pread(self._file.fileno(), length, self._begins[key] + offset)
        if len(data) != length:
            raise CorruptionError(f"a temporary index file is cut short at {self._begins[key] + offset}")
        return data


def _sliced(items: Table) -> Iterator[Table]:
    return (items[at : at + SLICE_ITEMS] for at in range(0, len(items), SLICE_ITEMS))
