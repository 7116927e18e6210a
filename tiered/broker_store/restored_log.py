"""A commitlog that is written from its records: each at its place, then everything between them.

    write   records, in any order, side by side
    seal    file by file: fillers where records are missing, the mark at a file's end, sync

What is missing is found by reading the files again, so that an interrupted restore needs no notes of it.

A filler is a record of a system topic in place of log bytes that a store does not have. A broker skips it and
dispatches it to no consume queue and no index, as its flags say that it is a rolled-back message. Source:
org.apache.rocketmq.store.CommitLog.checkMessageAndReturnSize.
"""

import ctypes
import errno
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import fastcrc
import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.commit_log import BLANK_MAGIC
from tiered.errors import CorruptionError, UsageError
from tiered.formats.record import MAGIC_V1
from tiered.kernels.log_records import (
    HEAD_BYTES,
    end_of_records,
    next_record,
    record_sizes,
    stored_ms_at,
    write_rows,
)
from tiered.kernels.record_checks import END_OF_FILE_BYTES, RECORD_BYTES_MIN, RESERVED_CRC_BYTES
from tiered.whole_file import file_error, sync_directory

FILLER_TOPIC: Final = "rmq_sys_filler"
FILLER_BYTES_MAX: Final = 1 << 20
"""A broker allocates as much memory as a filler has bytes to read it."""
FIRST_BYTES: Final = 128
"""Size of the filler in a file that has no records, as a file must begin with a record."""
_ROLLED_BACK = 0xC
"""The flags (sysFlag) of a rolled-back message."""
_HEAD = struct.Struct(">iIIiiqqiq8sq8siqi")
_HOST = bytes((127, 0, 0, 1)) + (10911).to_bytes(4, "big")
_ZEROS = bytes(FILLER_BYTES_MAX)
_BLANK = struct.Struct(">iI")


class Patch(NamedTuple):
    """``data`` at physical offset ``phys``; what is between patches is zeros."""

    phys: int
    data: bytes


def filler_bytes_min(*, has_crc: bool) -> int:
    """Size of the smallest filler."""
    return RECORD_BYTES_MIN + len(FILLER_TOPIC) + (RESERVED_CRC_BYTES if has_crc else 0)


def filled(begin_phys: int, end_phys: int, stored_ms: int, *, has_crc: bool) -> Iterator[Patch]:
    """The bytes of fillers, records without a message that a broker reads over, for [begin_phys, end_phys) of one file
    of a restored commitlog. ``has_crc``: they end in a checksum, as the log's records do. Raises ValueError for fewer
    bytes than a filler has."""
    least = filler_bytes_min(has_crc=has_crc)
    while begin_phys < end_phys:
        left = end_phys - begin_phys
        size = min(left, FILLER_BYTES_MAX)
        if 0 < left - size < least:  # leave enough for one more
            size -= least
        if size < least:
            raise ValueError(
                f"the gap of {size} bytes at commitlog offset {begin_phys} is smaller than a filler"
            )
        yield from _filler(begin_phys, size, stored_ms, has_crc=has_crc)
        begin_phys += size


def ended(
    begin_phys: int, end_phys: int, stored_ms: int, *, is_empty: bool, has_crc: bool
) -> Iterator[Patch]:
    """The bytes that end a commitlog file after its last record, at ``begin_phys``: the broker's mark that the rest of
    the file is blank. A file without records (``is_empty``) gets a filler before it, as a file begins with a record.
    Raises ValueError if there is too little room."""
    if is_empty:
        yield from _filler(begin_phys, FIRST_BYTES, stored_ms, has_crc=has_crc)
        begin_phys += FIRST_BYTES
    if end_phys - begin_phys < END_OF_FILE_BYTES:
        raise ValueError(
            f"the {end_phys - begin_phys} bytes at commitlog offset {begin_phys} are too few for the mark of a file's "
            "end"
        )
    yield Patch(begin_phys, _BLANK.pack(end_phys - begin_phys, BLANK_MAGIC))


def _filler(phys: int, size: int, stored_ms: int, *, has_crc: bool) -> Iterator[Patch]:
    """The writes that make one filler, a record of a system topic of exactly ``size`` bytes at ``phys``. Its body is
    zeros, which are not written: they are a hole in the file."""
    topic = FILLER_TOPIC.encode()
    body = size - filler_bytes_min(has_crc=has_crc)
    tail = bytes((len(topic),)) + topic + (RESERVED_CRC_BYTES if has_crc else 0).to_bytes(2, "big")
    head = _HEAD.pack(
        size,
        MAGIC_V1,
        _zeros_crc(body),
        0,
        0,
        0,
        phys,
        _ROLLED_BACK,
        stored_ms,
        _HOST,
        stored_ms,
        _HOST,
        0,
        0,
        body,
    )
    if has_crc:
        tail += crc_property(zlib.crc32(tail, zlib.crc32(memoryview(_ZEROS)[:body], zlib.crc32(head))))
    # The head is written last: a filler that has it is whole, wherever a restore was interrupted.
    yield Patch(phys + size - len(tail), tail)
    yield Patch(phys, head)


@lru_cache(64)
def _zeros_crc(count: int) -> int:
    return zlib.crc32(memoryview(_ZEROS)[:count]) & 0x7FFFFFFF if count else 0


def crc_property(crc: int) -> bytes:
    """The property ``__CRC32#`` that ends a record, of the checksum of all bytes before it."""
    return b"__CRC32#\x01" + f"{crc & 0x7FFFFFFF:010d}"[::-1].encode() + b"\x02"


WINDOW_BYTES: Final = 8 << 20
SYNC_THREADS: Final = 2
_CRC_NAME = b"__CRC32#\x01"


class Extent(NamedTuple):
    """Records without anything between them, and the store timestamps of the first and the last."""

    begin_phys: int
    end_phys: int
    first_ms: int
    last_ms: int


class Piece(NamedTuple):
    """Records ``data[starts[i] : starts[i] + sizes[i]]``, of physical offset ``phys[i]``."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int32]
    phys: NDArray[np.int64]


class RecordBatch(NamedTuple):
    """Records ``data[starts[i] : starts[i] + sizes[i]]``, back to back from physical offset ``phys`` on."""

    phys: int
    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int32]


class RestoredLog:
    """The files of a commitlog below ``directory``. ``write`` from any thread."""

    def __init__(self, directory: Path, file_bytes: int) -> None:
        """Make ``directory`` if it is missing; files that an interrupted restore has left there are continued.
        ``file_bytes``: the size of each file, as at the broker."""
        self.directory, self.file_bytes = directory, file_bytes
        self.has_crc = False
        """Whether the log's records end in ``__CRC32#``, so that fillers must, too."""
        self._lock = threading.Lock()
        self._unsynced: set[int] = set()
        """The physical offsets at which files begin that were written and not synced yet."""
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, begin_phys: int) -> Path:
        """The file that begins at ``begin_phys``."""
        return self.directory / f"{begin_phys:020d}"

    def begins(self) -> list[int]:
        """The physical offsets at which the log's files begin, ascending."""
        return sorted(int(path.name) for path in self.directory.iterdir())

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write the records of ``pieces`` to the log's files at their physical offsets. Raises StoreFullError if the
        disk is full, and UsageError for a record that crosses the end of a file, as files of the broker have another
        size."""
        pieces = [piece for piece in pieces if len(piece.sizes)]
        if not pieces:
            return
        addresses = np.concatenate([piece.starts + piece.data.ctypes.data for piece in pieces])
        sizes = np.concatenate([piece.sizes for piece in pieces])
        phys = np.concatenate([piece.phys for piece in pieces])
        number = phys // self.file_bytes
        crossing = np.flatnonzero((phys + sizes + END_OF_FILE_BYTES - 1) // self.file_bytes != number)
        if len(crossing):
            raise UsageError(
                f"the record at commitlog offset {int(phys[crossing[0]])} would cross the end of a commitlog file of "
                f"{self.file_bytes} bytes",
                hint="give --broker-conf FILE with the mappedFileSizeCommitLog of the broker that wrote it",
            )
        self.has_crc = self.has_crc or _has_crc(pieces[-1])
        for file_number in np.unique(number).tolist():
            in_file, begin = number == file_number, file_number * self.file_bytes
            with self._opened(begin) as file:
                _write_all(file, addresses[in_file], sizes[in_file], phys[in_file] - begin)
            with self._lock:
                self._unsynced.add(begin)

    def sync(self) -> None:
        """Make durable what was written."""
        with self._lock:
            unsynced, self._unsynced = self._unsynced, set()
        for begin in sorted(unsynced):
            self._sync(begin)
        sync_directory(self.directory)

    def seal(
        self,
        begin_phys: int,
        end_phys: int,
        empty_ms: int,
        sealed: Callable[[int], object] = lambda phys: None,
    ) -> int:
        """Complete the log from ``begin_phys``, where a file begins, to ``end_phys``: where it has no records, write
        fillers, which a broker reads over, and make everything durable.

        ``empty_ms``: store timestamp of fillers if the log has no record at all; ``sealed`` is called with the end of
        each completed file, for progress. Returns the last record's store timestamp. Raises CorruptionError for a gap
        that is too small for a filler, and StoreFullError."""
        stored_ms = next(
            (found.first_ms for begin in self.begins() for found in self.extents(begin)), empty_ms
        )
        with ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="sync") as pool:
            syncs = []
            for begin in range(begin_phys, end_phys, self.file_bytes):
                stored_ms = self._seal_file(begin, end_phys, stored_ms)
                syncs.append(pool.submit(self._sync, begin))
                sealed(begin + self.file_bytes)
            for sync in syncs:
                sync.result()
        sync_directory(self.directory)
        return stored_ms

    def extents(self, begin_phys: int) -> Iterator[Extent]:
        """The records of the file that begins at ``begin_phys``."""
        with self._opened(begin_phys) as file:
            yield from _extents(file, begin_phys, self.file_bytes)

    def batches(self) -> Iterator[RecordBatch]:
        """All records by physical offset, some at a time."""
        for begin in self.begins():
            with self._opened(begin) as file:
                for extent in _extents(file, begin, self.file_bytes):
                    yield from _batches(file, begin, extent)

    def crc32c(self, begin_phys: int, end_phys: int) -> int:
        """CRC32C of the bytes [begin_phys, end_phys), which are in one file."""
        with self._opened(begin_phys // self.file_bytes * self.file_bytes) as file:
            return int(
                fastcrc.crc32.iscsi(os.pread(file, end_phys - begin_phys, begin_phys % self.file_bytes))
            )

    def _seal_file(self, begin: int, end_phys: int, stored_ms: int) -> int:
        """Complete the file that begins at physical offset ``begin``, up to ``end_phys``: write fillers into the gaps
        between its records, and the mark of its end. ``stored_ms``: store timestamp of the last record before it.
        Returns that of the last record in or before it."""
        file_end, has_crc = begin + self.file_bytes, self.has_crc
        with self._opened(begin) as file:
            phys = begin

            def put(patches: Iterator[Patch]) -> None:
                """Write the bytes of fillers or of the end mark. Raises CorruptionError for a gap that is too small for
                them, which a layout without gaps does not have."""
                try:
                    for patch in patches:
                        os.pwrite(file, patch.data, patch.phys - begin)
                except ValueError as error:
                    raise CorruptionError(
                        f"{self.path(begin)}: {error}", hint="use --layout compact"
                    ) from error

            for extent in _extents(file, begin, self.file_bytes):
                put(filled(phys, extent.begin_phys, stored_ms, has_crc=has_crc))
                phys, stored_ms = extent.end_phys, extent.last_ms
            if end_phys < file_end:
                put(filled(phys, end_phys, stored_ms, has_crc=has_crc))
            elif phys < file_end:
                put(ended(phys, file_end, stored_ms, is_empty=phys == begin, has_crc=has_crc))
        return stored_ms

    def _sync(self, begin: int) -> None:
        with self._opened(begin) as file:
            os.fsync(file)

    @contextmanager
    def _opened(self, begin_phys: int) -> Iterator[int]:
        """Open the log's file that begins at ``begin_phys`` inside the block, and yield its descriptor. It is made if
        it is missing, and has its full size."""
        path = self.path(begin_phys)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if os.fstat(file).st_size != self.file_bytes:
                    os.ftruncate(file, self.file_bytes)
                yield file
            finally:
                os.close(file)
        except OSError as error:
            raise file_error(error, path) from error


def _has_crc(piece: Piece) -> bool:
    end = int(piece.starts[-1] + piece.sizes[-1])
    return piece.data[end - RESERVED_CRC_BYTES : end].tobytes().startswith(_CRC_NAME)


def _write_all(
    file: int, addresses: NDArray[np.int64], sizes: NDArray[np.int32], at: NDArray[np.int64]
) -> None:
    """Write the records in memory at ``addresses``, of ``sizes`` bytes, to the open ``file`` at the positions
    ``at``."""
    done = 0
    while (done := write_rows(file, 0, addresses, sizes, at, done)) < len(sizes):
        # The write inside write_rows failed or was partial: this one raises the reason, or completes it.
        data = memoryview(ctypes.string_at(int(addresses[done]), int(sizes[done])))
        written = 0
        while written < len(data):
            written += os.pwrite(file, data[written:], int(at[done]) + written)
        done += 1


def _extents(file: int, begin_phys: int, file_bytes: int) -> Iterator[Extent]:
    """The extents of records, each without a gap inside, of the open commitlog ``file`` that begins at ``begin_phys``.
    The file is read in windows of some MiB, and holes are skipped."""
    window = np.empty(min(WINDOW_BYTES, file_bytes), np.uint8)
    address, extent = window.ctypes.data, None
    at: int | None = 0
    while at is not None and at < file_bytes:
        length, position = os.preadv(file, [window.data], at), 0
        while position + HEAD_BYTES <= length:
            phys = begin_phys + at
            end, last_ms = end_of_records(address, length, phys, position)
            if end == position:  # no record there
                if extent is not None:
                    yield extent
                extent, position = None, next_record(address, length, phys, position)
                continue
            if extent is None:
                extent = Extent(phys + position, 0, stored_ms_at(address, position), 0)
            extent, position = extent._replace(end_phys=phys + end, last_ms=last_ms), end
        if at + length >= file_bytes:
            break
        at = at + position if extent is not None else _next_data(file, at + position)
    if extent is not None:
        yield extent


def _batches(file: int, begin_phys: int, extent: Extent) -> Iterator[RecordBatch]:
    """The records of ``extent`` in the open commitlog ``file`` that begins at ``begin_phys``, as many at a time as fit
    into a window of some MiB."""
    phys, length = extent.begin_phys, WINDOW_BYTES
    while phys < extent.end_phys:
        data = np.empty(min(length, extent.end_phys - phys), np.uint8)
        os.preadv(file, [data.data], phys - begin_phys)
        sizes = np.empty(len(data) // RECORD_BYTES_MIN, np.int32)
        sizes = sizes[: record_sizes(data.ctypes.data, len(data), sizes)]
        if not len(sizes):  # the next record is larger than a window
            length = int.from_bytes(data[:4].tobytes(), "big")
            continue
        ends = np.cumsum(sizes, dtype=np.int64)
        yield RecordBatch(phys, data, ends - sizes, sizes)
        phys, length = phys + int(ends[-1]), WINDOW_BYTES


def _next_data(file: int, at: int) -> int | None:
    """The first position at or after ``at`` of the open ``file`` that is not in a hole; None if there is none."""
    try:
        return os.lseek(file, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise
