"""LRU cache of decoded column pages, one for all segment indexes of the process, bounded in bytes.

Readers of many queues return to the same pages of an object. Pages of a deleted index are dropped.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from tiered.model.lru import Lru

PAGES_BYTES = 16 * 1024 * 1024
"""About 90 pages of 4,096 rows."""
PAGE_COST_BYTES = 1200
"""Memory of a page besides its values: arrays, their tuple, the cache entry."""
GONE_MAX = 1024

Columns = tuple[NDArray[Any], ...]
_numbers = itertools.count()


class PageCache:
    """Columns by owner and page. Thread-safe."""

    def __init__(self, bytes_max: int = PAGES_BYTES) -> None:
        self._lock = threading.Lock()
        self._pages: Lru[tuple[int, int], Columns] = Lru(bytes_max)
        self._gone: deque[int] = deque()
        """Deleted owners. Finalizers run in any thread at any moment, also while it holds the lock."""

    @property
    def held_bytes(self) -> int:
        """Memory of all pages, about."""
        return self._pages.held_bytes

    def __len__(self) -> int:
        return len(self._pages)

    def number_of(self, owner: object) -> int:
        """A unique number for ``owner``, a decoded object index, whose pages are cached under it. They are dropped some
        time after the owner was deleted."""
        if len(self._gone) >= GONE_MAX:
            with self._lock:
                self._forget_gone()
        number = next(_numbers)
        weakref.finalize(owner, self._gone.append, number).atexit = False
        return number

    def get(self, number: int, page: int, decode: Callable[[int], Columns]) -> Columns:
        """The columns of the page ``page`` of the owner ``number``: from the cache, else from ``decode``, which gets
        the page's number. A page that is larger than the cache is not kept."""
        key = number, page
        with self._lock:
            found = self._pages.get(key)
            if found is not None:
                return found
        columns = decode(page)
        with self._lock:
            self._forget_gone()
            self._pages.put(key, columns, cost_bytes(columns))
        return columns

    def _forget_gone(self) -> None:
        if not self._gone:
            return
        gone = {self._gone.popleft() for _ in range(len(self._gone))}
        for key in [key for key, _ in self._pages if key[0] in gone]:
            self._pages.pop(key)


def cost_bytes(columns: Columns) -> int:
    """Memory of a cached page, roughly."""
    return PAGE_COST_BYTES + sum(column.nbytes for column in columns)
