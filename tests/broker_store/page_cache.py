"""The page cache as the owner of a file sees and changes it."""

import os
from pathlib import Path

from tiered.residency import PAGE_BYTES, ResidentPages


def resident_bytes(path: Path) -> int:
    """Bytes of ``path`` in the page cache, in whole pages. Truthful only to the file's owner."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pages = ResidentPages(fd, os.fstat(fd).st_size)
        try:
            return int(pages.query(0, os.fstat(fd).st_size).sum()) * PAGE_BYTES
        finally:
            pages.close()
    finally:
        os.close(fd)


def evict(path: Path) -> None:
    """Write the file out, and let its pages go where the file system does."""
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
