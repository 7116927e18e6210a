"""Keeps a reading process from giving its buffers back to the system after every batch, and from asking anew.

Owns three settings of malloc. Buffers of megabytes are mapped and unmapped one by one otherwise, and touching fresh
pages took a quarter of the CPU time of a scan. What is kept is bounded. Sidecars want the opposite.
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
"""Free memory at the end of the heap that stays."""
MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""Larger buffers are still mapped; the largest glibc takes."""


def keep_freed_memory() -> None:
    """For processes that only read partitions. Does nothing where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
