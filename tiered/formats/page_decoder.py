"""Decodes column pages: by numpy at once, by the kernel when a thread has loaded it because pages are many.

Loading the kernel takes 0.4 s, as long as numpy takes for 1,000 pages, or 2 s where it is not in the cache yet. A
command that reads a few messages ends before, and a server must not wait for it (docs/decisions/0051).
"""

import logging
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.formats.column_pages import decode_page as decode_by_numpy
from tiered.kernels.columns import LENGTHS_BYTES, decode_page

logger = logging.getLogger(__name__)

PAGES_BY_NUMPY = 512
COLUMN_KINDS = (np.int32, np.int64, np.int64, np.int64, np.int32, np.int32, np.int64)
"""Types of the columns of a page, in their order."""


class PageDecoder:
    """Called as ``column_pages.decode_page``. Thread-safe; no call waits for the kernel."""

    def __init__(self, pages_by_numpy: int = PAGES_BY_NUMPY) -> None:
        """``pages_by_numpy``: after so many pages the compiled kernel is loaded, as it pays off only for many."""
        self._left = pages_by_numpy
        self._is_loaded = False
        self.may_load = True
        """False: never. Numba takes 100 MiB, which a process with a memory limit may not have."""
        self._lock = threading.Lock()
        self.loading: threading.Thread | None = None
        """Loads the kernel; started by the page after ``pages_by_numpy``, by the first one if numba is imported."""

    def __call__(self, data: NDArray[np.uint8], *arguments: Any) -> bool:
        """Decode a page of column values into the arrays among ``arguments``, which are those of
        ``column_pages.decode_page``, by the compiled kernel once it is loaded, else by numpy. Returns False if the page
        is malformed."""
        if self._is_loaded:
            return decode_page(data, *arguments)
        with self._lock:
            self._left -= 1
            if self.may_load and self.loading is None and (self._left < 0 or "numba" in sys.modules):
                # Not a daemon: an interpreter that ends would take LLVM down while it compiles.
                self.loading = threading.Thread(target=self.load, name="load-page-kernel", daemon=False)
                self.loading.start()
        return decode_by_numpy(data, *arguments)

    def load(self) -> None:
        """Compile the kernel that decodes pages, or load it from numba's cache. A failure is only logged, as numpy
        decodes them too."""
        columns: list[Any] = [np.empty(0, kind) for kind in COLUMN_KINDS]
        no_ints, no_longs = np.zeros(0, np.int32), np.zeros(0, np.int64)
        # numba compiles for types, and what was read is read-only.
        page = np.frombuffer(bytes(LENGTHS_BYTES), np.uint8)
        try:
            decode_page(page, 0, 0, 0, np.zeros(1, np.int64), no_ints, no_longs, no_longs, *columns)
        except Exception as error:
            logger.warning(
                "the compiled function that decodes column pages cannot be loaded, so that reading takes more CPU: %r",
                error,
            )
        else:
            self._is_loaded = True


decode_column_page = PageDecoder()
"""The decoder of this process."""
