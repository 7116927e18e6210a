"""Whether bytes of a broker's file are in the page cache, checked with the kernel at every read.

cachestat(2) (Linux 6.5) needs no mapping of the file, and is refused without permission (6.14). mincore(2) reports "all
resident" to a process that neither owns nor may write the file: for such a process the result is UNKNOWN. The check
loads no page.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from fetcher.policy.read_policy import Residency
from tiered.residency import PAGE_BYTES, ResidencyProbe, ResidentPages, best_probe, open_failure

_SYS_CACHESTAT: Final = 451
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )  # fmt: skip


ByteRange = tuple[int, int]
"""[begin, end) in a file."""
CachedPages = Callable[[int, int, int], int]
"""(fd, begin, length) -> pages in the cache; OSError if it is unknown."""


def cached_pages(fd: int, begin: int, length: int) -> int:
    """Pages of [begin, begin + length) in the page cache, by cachestat(2). Raises OSError: ENOSYS, EPERM."""
    wanted, found = _Range(begin, length), _CacheStat()
    status = _libc.syscall(
        ctypes.c_long(_SYS_CACHESTAT),
        ctypes.c_int(fd),
        ctypes.byref(wanted),
        ctypes.byref(found),
        ctypes.c_uint(0),
    )
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found.cached)


class PageResidency:
    """Checks ranges of files. Thread-safe. Tests replace ``cached_pages``."""

    def __init__(self, cached_pages: CachedPages = cached_pages) -> None:
        self._cached_pages = cached_pages

    def of(self, path: Path, ranges: Sequence[ByteRange]) -> Residency:
        """Whether every page that ``ranges`` touch is resident. Raises NotFoundError and so on for ``path``."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise open_failure(path, error) from error
        try:
            return self._by_cachestat(fd, ranges)
        except OSError:
            # An old kernel, a sandbox, or no permission: mincore is still reliable for owners and writers.
            return self._by_mincore(path, fd, ranges)
        finally:
            os.close(fd)

    def _by_cachestat(self, fd: int, ranges: Sequence[ByteRange]) -> Residency:
        is_resident = all(
            self._cached_pages(fd, begin, end - begin) >= -(-end // PAGE_BYTES) - begin // PAGE_BYTES
            for begin, end in ranges
        )
        return Residency.RESIDENT if is_resident else Residency.COLD

    def _by_mincore(self, path: Path, fd: int, ranges: Sequence[ByteRange]) -> Residency:
        if best_probe(fd) is not ResidencyProbe.MINCORE:
            return Residency.UNKNOWN
        try:
            pages = ResidentPages(fd, os.fstat(fd).st_size)
            try:
                is_resident = all(bool(pages.query(begin, end).all()) for begin, end in ranges)
            finally:
                pages.close()
        except OSError as error:
            raise open_failure(path, error) from error
        return Residency.RESIDENT if is_resident else Residency.COLD
