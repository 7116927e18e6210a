"""Makes glibc give freed memory back: many threads and buffers of megabytes otherwise leave a hundred MiB behind.

Owns three settings of malloc. Measured on a back-fill of 600 MB: 489 MiB at the peak without the first two, 439 with;
same CPU time. The third keeps what is wanted again at once: half as many page faults, the peak is the same.
"""

from __future__ import annotations

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
"""Numbers of malloc.h."""
ARENAS: Final = 2
MMAP_THRESHOLD_BYTES: Final = 4 << 20
"""Larger buffers are mapped, and so unmapped when freed; left alone, glibc moves this up to 32 MiB."""
KEPT_BYTES: Final = 6 << 20
"""Free memory at an arena's end that is kept: at the 128 KiB that setting the threshold above fixes, each block's
memory would be given back and faulted in again."""


def return_freed_memory() -> None:
    """For processes that archive, before their threads start. Does nothing where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
