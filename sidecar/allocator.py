"""Makes glibc give freed memory back: many threads and buffers of megabytes otherwise leave a hundred MiB behind.

Owns two settings of malloc. Measured on a back-fill of 600 MB: 489 MiB at the peak without, 439 with; same CPU time.
"""

from __future__ import annotations

import ctypes
from typing import Final

M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
"""Numbers of malloc.h."""
ARENAS: Final = 2
MMAP_THRESHOLD_BYTES: Final = 4 << 20
"""Larger buffers are mapped, and so unmapped when freed; left alone, glibc moves this up to 32 MiB."""


def return_freed_memory() -> None:
    """For processes that archive, before their threads start. Does nothing where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
