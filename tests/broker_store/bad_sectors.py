"""A disk that does not give some places of files: reading there fails with EIO, under whatever name."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tiered.residency import PAGE_BYTES


class BadSectors:
    """Breaks and mends. ``code``: what the reads fail with. ``reads``: how often it was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bad: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.code = errno.EIO
        self.reads = 0
        self.may_give_the_front = True
        """Of a read that reaches into a bad place, as a read through the page cache does."""
        self._preadv, self._pread = os.preadv, os.pread
        monkeypatch.setattr(os, "preadv", self._patched_preadv)
        monkeypatch.setattr(os, "pread", self._patched_pread)

    def break_page(self, path: Path, at: int) -> int:
        """Break the page around ``at``; where it begins."""
        begin = at // PAGE_BYTES * PAGE_BYTES
        self.break_all(path, begin, begin + PAGE_BYTES)
        return begin

    def break_all(self, path: Path, begin: int = 0, end: int = 1 << 62) -> None:
        """Break [begin, end) of the file."""
        status = path.stat()
        self._bad.setdefault((status.st_dev, status.st_ino), []).append((begin, end))

    def mend(self) -> None:
        """Everything is given again."""
        self._bad.clear()

    def _given(self, fd: int, offset: int, length: int) -> int:
        """How many of ``length`` bytes. Raises OSError when that is none."""
        status = os.fstat(fd)
        places = self._bad.get((status.st_dev, status.st_ino), [])
        hit = [begin for begin, end in places if offset < end and offset + length > begin]
        if not hit or not length:
            return length
        begin = min(hit)
        self.reads += 1
        if offset >= begin or not self.may_give_the_front:
            raise OSError(self.code, os.strerror(self.code))
        return begin - offset

    def _patched_preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        (buffer,) = buffers
        given = self._given(fd, offset, memoryview(buffer).nbytes)
        return self._preadv(fd, [memoryview(buffer)[:given]], offset, flags)

    def _patched_pread(self, fd: int, length: int, offset: int) -> bytes:
        return self._pread(fd, self._given(fd, offset, length), offset)
