"""Index items of one file to be, brought into file order with a bounded number of them in memory.

More than that are put aside, sorted piece by piece, in a temporary file without a name, and merged when all are there.
How many keys a message has is its producer's choice: 32 KiB of them are 16,000 of one letter.

Owns the temporary file. Where items come from and where they go is the caller's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np

from tiered.errors import CorruptionError
from tiered.index.footer import Covered, IndexMeta
from tiered.index.items import ITEM_DTYPE, Widths, widest, widths_for
from tiered.index.layout import COVERED_DTYPE, Form, Shape, slot_bits_for
from tiered.index.merge import merged_items
from tiered.index.order import sorted_items
from tiered.index.writer import write_index
from tiered.model.tables import Table

SLICE_ITEMS = 65_536
"""What is written at once."""
_NO_META = IndexMeta(0, 0, 0, 0, 0, 0)
_NOTHING = Covered(np.zeros(0, COVERED_DTYPE), ())


class GatheredItems:
    """At most ``items_max`` are in memory, but for those of one larger row. To be closed."""

    def __init__(self, items_max: int, work_dir: str) -> None:
        self._items_max = items_max
        self._work_dir = work_dir
        self._waiting: list[Table] = []
        self._waiting_count = 0
        self._file: IO[bytes] | None = None
        self._aside: list[Shape] = []
        self._begins: dict[str, int] = {}
        self.count = 0
        """Of all that were added, equal ones too."""

    def add(self, items: Table) -> None:
        """Items in any order. Raises OSError when there is no place to put others aside."""
        if self._waiting_count and self._waiting_count + len(items) > self._items_max:
            self._put_aside()
        self._waiting.append(items)
        self._waiting_count += len(items)
        self.count += len(items)

    def add_all_or_none(self, pieces: Iterable[Table]) -> None:
        """As ``add``, of each; what ``pieces`` raises leaves none of them behind."""
        self._put_aside()
        mark, count = len(self._aside), self.count
        try:
            for piece in pieces:
                self.add(piece)
        except BaseException:
            del self._aside[mark:]
            self._waiting, self._waiting_count, self.count = [], 0, count
            raise

    def in_order(self) -> Iterator[Table]:
        """All, equal ones once. Nothing may be added any more."""
        if not self._aside:
            yield from _sliced(self._taken())
            return
        self._put_aside()
        yield from merged_items(self._read, self._aside, items_in_memory=self._items_max)

    def widths(self, span_ms: int) -> Widths:
        """Of a file whose times span ``span_ms``."""
        aside = (shape.widths for shape in self._aside)
        return widest((*aside, *(widths_for(items, 0) for items in self._waiting)), span_ms)

    def close(self) -> None:
        """Give the temporary file back."""
        self._waiting = []
        if self._file is not None:
            self._file.close()

    def _taken(self) -> Table:
        items = np.concatenate(self._waiting) if self._waiting else np.zeros(0, ITEM_DTYPE)
        self._waiting, self._waiting_count = [], 0
        return sorted_items(items)

    def _put_aside(self) -> None:
        if not self._waiting_count:
            return
        items = self._taken()
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._work_dir or None)  # noqa: SIM115 - closed by close
        times = items["store_timestamp"]
        begin_ms, end_ms = int(times.min()), int(times.max())
        form = Form(slot_bits_for(len(items)), widths_for(items, end_ms - begin_ms), begin_ms)
        key = f"piece {len(self._begins)}"
        self._begins[key] = self._file.seek(0, os.SEEK_END)
        self._aside.append(write_index(self._file, key, _sliced(items), _NO_META, _NOTHING, form))
        self._file.flush()

    def _read(self, key: str, offset: int, length: int) -> bytes:
        assert self._file is not None
        data = os.pread(self._file.fileno(), length, self._begins[key] + offset)
        if len(data) != length:
            raise CorruptionError(f"a temporary index file is cut short at {self._begins[key] + offset}")
        return data


def _sliced(items: Table) -> Iterator[Table]:
    return (items[at : at + SLICE_ITEMS] for at in range(0, len(items), SLICE_ITEMS))
