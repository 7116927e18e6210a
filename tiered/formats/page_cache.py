"""Decoded column pages of all indexes of the process: one bound, however many are open; the least recently used go.

Readers of many queues side by side come back to as many pages of an object; a walk leaves nothing behind in thousands
of indexes, and an index nothing once it is gone. Owns which pages are kept. Does not own decoding (segment_index.py).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

PAGES_BYTES = 16 * 1024 * 1024
"""About 90 pages of 4,096 rows."""
PAGE_COST_BYTES = 1200
"""Of a page besides its values: arrays, their tuple, its place here."""
GONE_MAX = 1024

Columns = tuple[NDArray[Any], ...]
_numbers = itertools.count()


class PageCache:
    """Columns by owner and page. Thread-safe."""

    def __init__(self, bytes_max: int = PAGES_BYTES) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._pages: OrderedDict[tuple[int, int], Columns] = OrderedDict()
        self._gone: deque[int] = deque()
        """Owners that are no more. Their end comes in any thread at any moment, also while it holds the lock."""
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def number_of(self, owner: object) -> int:
        """A number for ``owner``, an index: no other ever has it. What is kept for it goes some time after it."""
        if len(self._gone) >= GONE_MAX:
            with self._lock:
                self._forget_gone()
        number = next(_numbers)
        weakref.finalize(owner, self._gone.append, number).atexit = False
        return number

    def get(self, number: int, page: int, decode: Callable[[int], Columns]) -> Columns:
        """The page, decoded if it is not there. One larger than all that is kept is not kept."""
        key = number, page
        with self._lock:
            found = self._pages.get(key)
            if found is not None:
                self._pages.move_to_end(key)
                return found
        columns = decode(page)
        with self._lock:
            self._forget_gone()
            self._remove(key)
            self._pages[key] = columns
            self.held_bytes += cost_bytes(columns)
            while self.held_bytes > self._bytes_max:
                self._remove(next(iter(self._pages)))
        return columns

    def _forget_gone(self) -> None:
        if not self._gone:
            return
        gone = {self._gone.popleft() for _ in range(len(self._gone))}
        for key in [key for key in self._pages if key[0] in gone]:
            self._remove(key)

    def _remove(self, key: tuple[int, int]) -> None:
        columns = self._pages.pop(key, None)
        if columns is not None:
            self.held_bytes -= cost_bytes(columns)


def cost_bytes(columns: Columns) -> int:
    """Memory of a page that is kept, about."""
    return PAGE_COST_BYTES + sum(column.nbytes for column in columns)
