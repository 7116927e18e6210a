"""Reads broker files without changing the page cache.

A page that was resident before a read stays; a page that only the read loaded is dropped after it. Kernel read-ahead
is disabled on our descriptors: its pages would look resident to the next read and stay. The kernel never drops pages
that the broker has mapped.

Residency comes from mincore(2), which is exact but only truthful to the file's owner or to users with write access;
for others from preadv2(RWF_NOWAIT), which reads a stride only if the cache holds it. Where neither works, nothing is
dropped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered.errors import AccessDeniedError, MissingBrokerFileError, UnavailableError, UnreadableError

PAGE_BYTES: Final = mmap.PAGESIZE
NAME_DIGITS: Final = 20
"""Digits of the names of a broker's files: the offset of their first byte."""
NOWAIT_STRIDE_BYTES: Final = 16 * PAGE_BYTES
"""Granularity of residency without mincore."""
SAMPLED_PLACES: Final = 8
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_PROT_READ: Final = 1
_MAP_SHARED: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class ResidencyProbe(Enum):
    """Method that finds a file's resident pages."""

    MINCORE = "mincore"
    NOWAIT = "nowait"
    NONE = "none"


class ResidentPages:
    """Finds the resident pages of one open file. Maps the file but touches no page of it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the open file ``fd`` of ``size_bytes`` into memory, without reading it. Raises OSError."""
        self._size_bytes = size_bytes
        self._address: int | None = None
        if size_bytes > 0:
            address = _libc.mmap(None, size_bytes, _PROT_READ, _MAP_SHARED, fd, 0)
            if address == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), "mmap")
            self._address = address

    def query(self, begin_byte: int, end_byte: int) -> NDArray[np.bool_]:
        """For each page of the file that the bytes [begin_byte, end_byte) touch, whether it is in the page cache, as an
        array of booleans."""
        first = begin_byte // PAGE_BYTES * PAGE_BYTES
        length = min(end_byte, self._size_bytes) - first
        if self._address is None or length <= 0:
            return np.zeros(0, np.bool_)
        pages = np.zeros(-(-length // PAGE_BYTES), np.uint8)
        if _libc.mincore(self._address + first, length, pages.ctypes.data) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return (pages & 1).astype(np.bool_)

    def close(self) -> None:
        """Unmap."""
        if self._address is not None:
            _libc.munmap(self._address, self._size_bytes)
            self._address = None


class ColdReadFile:
    """One broker file, read without changing the page cache. Not thread-safe."""

    def __init__(self, path: Path, *, probe: ResidencyProbe | None = None) -> None:
        """Open the file. ``probe``: how to find out which pages are in the page cache; None: the best way for this
        process. Raises NotFoundError, AccessDeniedError or UnavailableError, all naming ``path``."""
        self.path = path
        self._pages: ResidentPages | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise open_failure(path, error) from error
        try:
            self.size_bytes = os.fstat(self._fd).st_size
            self._advise(0, 0, os.POSIX_FADV_RANDOM)
            self.probe = probe or best_probe(self._fd)
            if self.probe is ResidencyProbe.MINCORE:
                self._pages = ResidentPages(self._fd, self.size_bytes)
        except OSError as error:
            os.close(self._fd)
            raise open_failure(path, error) from error

    def read_into(self, dest: memoryview, offset: int) -> int:
        """Fill ``dest`` from ``offset``; returns the bytes read, fewer only at the end of the file."""
        want = min(len(dest), self.size_bytes - offset)
        if want <= 0:
            return 0
        dest = dest[:want]
        try:
            if self.probe is ResidencyProbe.NOWAIT:
                return self._read_by_strides(dest, offset)
            resident = self._pages.query(offset, offset + want) if self._pages is not None else None
            got = self._read_fully(dest, offset)
            if resident is not None:
                self._drop_pages(~resident, offset // PAGE_BYTES)
        except OSError as error:
            raise open_failure(self.path, error) from error
        return got

    def is_current(self) -> bool:
        """Whether ``path`` still names the file that is open."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False

    def first_hole(self) -> int:
        """Offset of the first hole if the file system reports holes; else the end of the file."""
        try:
            return os.lseek(self._fd, 0, os.SEEK_HOLE) if self.size_bytes else 0
        except OSError:
            # Without holes the whole file counts as written.
            return self.size_bytes

    def is_given_in_part(self) -> bool:
        """Whether the file can be read at one of a few positions: then the disk works, and bytes that cannot be read
        are lost.

        The file's pages are dropped from the page cache first, as they would hide a missing disk; so this is only for a
        file that the broker has deleted.
        """
        self._advise(0, 0, os.POSIX_FADV_DONTNEED)
        for sample in range(SAMPLED_PLACES):
            offset = self.size_bytes * sample // SAMPLED_PLACES // PAGE_BYTES * PAGE_BYTES
            try:
                if self.read_into(memoryview(bytearray(PAGE_BYTES)), offset):
                    return True
            except UnreadableError:
                continue
        return False

    def close(self) -> None:
        """Close the file, which cannot be read any more then."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ColdReadFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_fully(self, dest: memoryview, offset: int) -> int:
        """Read from ``offset`` until ``dest`` is full or the file ends. Returns the number of bytes."""
        filled = 0
        while filled < len(dest):
            got = os.preadv(self._fd, [dest[filled:]], offset + filled)
            if got == 0:
                break
            filled += got
        return filled

    def _read_by_strides(self, dest: memoryview, offset: int) -> int:
        """Fill ``dest`` from ``offset`` in steps of some pages: of each step what the page cache has, then the rest
        from the disk, whose pages are dropped from the page cache again. Returns the number of bytes: fewer than
        requested at the end of the file."""
        filled = 0
        while filled < len(dest):
            position = offset + filled
            stride_end = (position // NOWAIT_STRIDE_BYTES + 1) * NOWAIT_STRIDE_BYTES
            part = dest[filled : filled + stride_end - position]
            cached = self._read_nowait(part, position)
            if cached < len(part):
                cold_begin = position + cached
                got = self._read_fully(part[cached:], cold_begin)
                self._drop(cold_begin, cold_begin + got)
                cached += got
            filled += cached
            if cached < len(part):
                break
        return filled

    def _read_nowait(self, dest: memoryview, offset: int) -> int:
        """Read into ``dest`` what the page cache has from ``offset`` on, and return the number of bytes. On a file
        system without RWF_NOWAIT it reads from the disk too, and later reads do not distinguish any more."""
        try:
            return os.preadv(self._fd, [dest], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self.probe = ResidencyProbe.NONE
            return self._read_fully(dest, offset)

    def _drop_pages(self, cold: NDArray[np.bool_], first_page: int) -> None:
        """Drop those pages from ``first_page`` on from the page cache for which ``cold`` is true."""
        if not cold.any():
            return
        edges = np.flatnonzero(np.diff(np.concatenate([[False], cold, [False]]).astype(np.int8)))
        for begin, end in edges.reshape(-1, 2).tolist():
            self._drop((first_page + begin) * PAGE_BYTES, (first_page + end) * PAGE_BYTES)

    def _drop(self, begin: int, end: int) -> None:
        """Drop all pages that [begin, end) touches; the kernel would keep partly covered ones."""
        first, last = begin // PAGE_BYTES, -(-end // PAGE_BYTES)
        if last > first:
            self._advise(first * PAGE_BYTES, (last - first) * PAGE_BYTES, os.POSIX_FADV_DONTNEED)

    def _advise(self, offset: int, length: int, advice: int) -> None:
        try:
            os.posix_fadvise(self._fd, offset, length, advice)
        except OSError as error:
            # Some file systems do not support fadvise; reading still works.
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESPIPE):
                raise


def open_failure(path: Path, error: OSError) -> MissingBrokerFileError | AccessDeniedError | UnavailableError:
    """The error of tiered.errors for a failed open or read of the broker's file ``path``."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return MissingBrokerFileError(f"{path} does not exist")
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessDeniedError(
            f"{path} cannot be read: permission denied",
            hint="run as a user with read access to the broker's files",
        )
    if error.errno == errno.EIO:
        return UnreadableError(
            path, f"{path} cannot be read: {os.strerror(errno.EIO)}", hint="check the disk for bad sectors"
        )
    return UnavailableError(f"{path} cannot be read: {os.strerror(error.errno or 0)}")


def best_probe(fd: int) -> ResidencyProbe:
    """How this process finds out which pages of the open file are in the page cache. Mincore is best, but since Linux
    5.2 it tells the truth only to users who own the file or may write to it."""
    status: Any = os.fstat(fd)
    if os.geteuid() in (0, status.st_uid) or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True):
        return ResidencyProbe.MINCORE
    return ResidencyProbe.NOWAIT if hasattr(os, "RWF_NOWAIT") else ResidencyProbe.NONE
