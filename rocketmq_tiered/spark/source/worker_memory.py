"""Settings of malloc that keep freed buffers in a worker process.

Buffers of megabytes are otherwise mapped and unmapped one by one, and touching fresh pages took a quarter of the CPU
time of a scan. The memory kept is bounded.
"""

from __future__ import annotations

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
"""Numbers of malloc.h."""
ARENAS: Final = 2
KEPT_BYTES: Final = 64 << 20
"""Free memory kept at the end of the heap."""
MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""Larger buffers are still mapped. glibc accepts no higher value."""


def keep_freed_memory() -> None:
    """Apply the settings, in processes that only read partitions. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
