"""Decoded column pages of all indexes of the process: one bound, however many are open; the least recently used go.

Readers of many queues side by side come back to as many pages of an object; a walk leaves nothing behind in thousands
of indexes. Owns which pages are kept. Does not own decoding (segment_index.py).
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

PAGES_BYTES = 16 * 1024 * 1024
"""About 90 pages of 4,096 rows."""

Columns = tuple[NDArray[Any], ...]
_numbers = itertools.count()


class PageCache:
    """Columns by owner and page. Thread-safe."""

    def __init__(self, bytes_max: int = PAGES_BYTES) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._pages: OrderedDict[tuple[int, int], Columns] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def new_owner(self) -> int:
        """A number for one index: no other ever has it."""
        return next(_numbers)

    def get(self, owner: int, page: int, decode: Callable[[int], Columns]) -> Columns:
        """The page, decoded if it is not there. One larger than all that is kept is not kept."""
        key = owner, page
        with self._lock:
            found = self._pages.get(key)
            if found is not None:
                self._pages.move_to_end(key)
                return found
        columns = decode(page)
        with self._lock:
            self._remove(key)
            self._pages[key] = columns
            self.held_bytes += _bytes_of(columns)
            while self.held_bytes > self._bytes_max:
                self._remove(next(iter(self._pages)))
        return columns

    def _remove(self, key: tuple[int, int]) -> None:
        columns = self._pages.pop(key, None)
        if columns is not None:
            self.held_bytes -= _bytes_of(columns)


def _bytes_of(columns: Columns) -> int:
    return sum(column.nbytes for column in columns)
