"""Reads the last units of 10,000 queues and more at once.

Reads only the bytes before the first hole of each queue's last file; where these do not suffice, the queue needs a
search (unit_files.py). Reads in parallel, because cold pages cost a disk access each, and restores the page cache.
"""

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np

from tiered.model.tables import Table
from tiered.residency import NAME_DIGITS, PAGE_BYTES

FIRST_FILE: Final = "0" * NAME_DIGITS
PLAIN_UNIT: Final = struct.Struct(">qiq")
PLAIN_FILE_BYTES: Final = 300_000 * PLAIN_UNIT.size
"""Default of mappedFileSizeConsumeQueue."""
STAT_BLOCK_BYTES: Final = 512
"""The unit in which stat counts the allocated blocks of a file."""
THREADS: Final = 4
CHUNK_QUEUES: Final = 1024
"""Queues that a thread reads at a time."""
THREADS_FROM_QUEUES: Final = 512
"""For fewer queues, threads cost more than they save."""
_Place = TypeVar("_Place")
_Result = TypeVar("_Result")


def last_valid_units(directories: Sequence[str], dtype: np.dtype[Any]) -> list[Table | None]:
    """The last valid unit in each of ``directories``, those of queues, as a table of one row of ``dtype``; None where a
    search is needed to find it."""
    return _in_threads(lambda chunk: _tails(chunk, dtype), directories)


def may_end_elsewhere(places: Sequence[tuple[str, int]]) -> list[bool]:
    """For each (directory, index) of a plain queue, whether the queue may end elsewhere than at that index: the unit
    before it is not there, or one is at it. True also if two units cannot tell, and a search is needed.

    This is one small read for each queue whose files have the default size, or that has only one file.
    """
    return _in_threads(lambda chunk: [_may_end_elsewhere(*place) for place in chunk], places)


def _in_threads(look: Callable[[Sequence[_Place]], list[_Result]], places: Sequence[_Place]) -> list[_Result]:
    """The results of ``look`` for all of ``places``, in their order; if they are many, threads share them."""
    if len(places) < THREADS_FROM_QUEUES:
        return look(places)
    chunks = [places[at : at + CHUNK_QUEUES] for at in range(0, len(places), CHUNK_QUEUES)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="queue-tails") as pool:
        return list(chain.from_iterable(pool.map(look, chunks)))


def surely_written(directory: str) -> bool:
    """Whether files of the queue in ``directory`` contain units for certain, as the file system tells without reading
    them: a file with both data and a hole was written.

    False if only the bytes can tell: nothing is written, or the file has no hole, as it is full, was copied, or the
    file system has no holes. The filler before a queue's first unit counts as a unit: a broker that died between the
    two shows the queue after its recovery."""
    if _has_data_and_holes(f"{directory}/{FIRST_FILE}"):
        return True  # most queues have one file: one call instead of many
    fd = _open_last(directory)
    if fd is None:
        return False
    try:
        return 0 < os.lseek(fd, 0, os.SEEK_HOLE) < os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        return False
    finally:
        os.close(fd)


def _has_data_and_holes(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False  # expired, or never created
    return 0 < status.st_blocks * STAT_BLOCK_BYTES < status.st_size


def _may_end_elsewhere(directory: str, index: int) -> bool:
    """Whether the plain queue in ``directory`` may end elsewhere than at ``index``: False only if the unit before it is
    valid and the one at it is not."""
    if index == 0:
        return True
    at = (index - 1) * PLAIN_UNIT.size
    first = at // PLAIN_FILE_BYTES * PLAIN_FILE_BYTES
    try:
        fd = os.open(f"{directory}/{first:0{NAME_DIGITS}d}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        data = _read(fd, at - first, 2 * PLAIN_UNIT.size)
        (phys, size, _), (next_phys, next_size, _) = PLAIN_UNIT.iter_unpack(data)
    except (OSError, ValueError, struct.error):
        return True
    finally:
        os.close(fd)
    has_last, has_next = phys >= 0 and size > 0, next_phys >= 0 and next_size > 0
    return has_next or not has_last


def _tails(directories: Iterable[str], dtype: np.dtype[Any]) -> list[Table | None]:
    """``last_valid_units`` in one thread."""
    return [_last_valid(_bytes_before_hole(path, dtype.itemsize), dtype) for path in directories]


def _last_valid(data: bytes, dtype: np.dtype[Any]) -> Table | None:
    """The last of the valid units that ``data`` begins with, as a table of one row; None if the first is not valid."""
    units = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    valid = (units["phys"] >= 0) & (units["size"] > 0)
    count = len(units) if valid.all() else int(np.argmin(valid))
    # A copy: a view would keep a page for each of many queues.
    return units[count - 1 : count].copy() if count else None


def _bytes_before_hole(directory: str, unit_bytes: int) -> bytes:
    """The last page of whole units before the first hole of a queue's last file; empty if there is none or it cannot be
    read, which a search then reports."""
    fd = _open_last(directory)
    if fd is None:
        return b""
    try:
        end = -(-os.lseek(fd, 0, os.SEEK_HOLE) // unit_bytes) * unit_bytes
        begin = max(0, (end - PAGE_BYTES) // unit_bytes * unit_bytes)
        return _read(fd, begin, end - begin)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _open_last(directory: str) -> int | None:
    """A descriptor of the queue's last file; None if there is none or it cannot be opened, which a search then
    reports."""
    try:
        names = [name for name in os.listdir(directory) if len(name) == NAME_DIGITS and name.isdecimal()]
        return os.open(f"{directory}/{max(names)}", os.O_RDONLY | os.O_CLOEXEC) if names else None
    except OSError:
        return None


def _read(fd: int, begin: int, length: int) -> bytes:
    """Read ``length`` bytes at ``begin`` of an open file; fewer at its end. What was not in the page cache is dropped
    from it afterwards, so that the broker's own pages stay there."""
    buffer = bytearray(length)
    try:
        got = os.preadv(fd, [buffer], begin, os.RWF_NOWAIT)
    except BlockingIOError:
        got = 0
    if got < length:
        # Not resident: no read-ahead, and dropped again.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        cold = begin + got
        rest = os.pread(fd, length - got, cold)
        buffer[got : got + len(rest)] = rest
        first = cold // PAGE_BYTES * PAGE_BYTES
        os.posix_fadvise(fd, first, begin + length - first, os.POSIX_FADV_DONTNEED)
        got += len(rest)
    return bytes(memoryview(buffer)[:got])
