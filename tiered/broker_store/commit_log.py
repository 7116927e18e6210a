"""The commitlog: list of files, and bytes by physical offset. Any file size, several directories.

Sizes come from the files. Files may be pre-allocated, blank at the tail, or missing in the middle. A file that the
broker has deleted is read from its pin, if there is one (pins.py). Reads only.

Source: org.apache.rocketmq.store.MappedFileQueue.
"""

import errno
import os
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from tiered.errors import EmptyCommitlogError, NotFoundError, UnavailableError, UnreadableError
from tiered.model.lru import Lru
from tiered.residency import NAME_DIGITS, PAGE_BYTES, ColdReadFile, open_failure

OPEN_FILES_MAX: Final = 4
"""Files that are open for reading at a time."""
BLANK_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes behind the last record that are checked for zeros: file systems allocate ahead."""
RECORD_MAGICS: Final = (0xDAA320A7, 0xDAA320AB)
"""Magic numbers of records: MessageVersion V1 (one byte of topic length) and V2 (two)."""
BLANK_MAGIC: Final = 0xCBD43194
"""Magic number of the mark at a file's end."""
_SIZE_MAGIC = struct.Struct(">iI")


@dataclass(frozen=True)
class LogFile:
    """One commitlog file: physical offsets [begin_phys, end_phys). ``is_pinned``: deleted by the broker."""

    begin_phys: int
    size_bytes: int
    path: Path
    is_pinned: bool = False

    @property
    def end_phys(self) -> int:
        """One past the last physical offset the file can hold."""
        return self.begin_phys + self.size_bytes


class LogGapReason(Enum):
    """Why physical offsets between two files are in no file."""

    MISSING_FILE = "file missing"
    TRUNCATED_FILE = "file shorter than its neighbours"


@dataclass(frozen=True)
class LogGap:
    """Physical offsets [begin_phys, end_phys) between two files that no file holds."""

    begin_phys: int
    end_phys: int
    reason: LogGapReason
    before: Path
    """The file that ends at ``begin_phys``."""


class CommitLog:
    """Reads one broker's commitlog. The file list changes only in ``refresh``. Thread-safe."""

    def __init__(
        self, dirs: Sequence[Path], *, pinned: Callable[[], Iterable[LogFile]] | None = None
    ) -> None:
        """``dirs``: the directories of the log's files; ``pinned`` returns files that hard links or open descriptors
        keep although the broker has deleted them. Lists the files, and raises as ``refresh``."""
        self.dirs = tuple(dirs)
        self._pinned = pinned or (lambda: ())
        self._lock = threading.Lock()
        self._files: tuple[LogFile, ...] = ()
        self._begins: tuple[int, ...] = ()
        self._empty_dirs: tuple[Path, ...] = ()
        self._open: Lru[LogFile, ColdReadFile] = Lru(OPEN_FILES_MAX)
        self.refresh()

    @property
    def files(self) -> tuple[LogFile, ...]:
        """All files by physical offset, including pinned ones."""
        return self._files

    @property
    def min_phys(self) -> int:
        """Oldest readable physical offset, including pins; 0 without files."""
        return self._files[0].begin_phys if self._files else 0

    @property
    def broker_min_phys(self) -> int:
        """Oldest physical offset of the broker's own files: units below it are expired."""
        return next((file.begin_phys for file in self._files if not file.is_pinned), self.max_file_end)

    @property
    def max_file_end(self) -> int:
        """End of the last file, written or not."""
        return self._files[-1].end_phys if self._files else 0

    @property
    def gaps(self) -> list[LogGap]:
        """The ranges of physical offsets between two files that no file holds."""
        gaps = []
        largest = max((file.size_bytes for file in self._files), default=0)
        for file, following in zip(self._files, self._files[1:], strict=False):
            if following.begin_phys > file.end_phys:
                truncated = file.size_bytes < largest and following.begin_phys - file.begin_phys <= largest
                reason = LogGapReason.TRUNCATED_FILE if truncated else LogGapReason.MISSING_FILE
                gaps.append(LogGap(file.end_phys, following.begin_phys, reason, file.path))
        return gaps

    def refuse_unmounted(self, *, is_short: bool = False) -> None:
        """Raise EmptyCommitlogError if files are missing and one of the log's directories is empty, as that of a disk
        that is not mounted. ``is_short``: the caller has found that files are missing at the log's end. Called before
        missing files are taken for deleted."""
        has_own = any(not file.is_pinned for file in self._files)
        is_missing = is_short or not has_own
        is_missing = is_missing or any(gap.reason is LogGapReason.MISSING_FILE for gap in self.gaps)
        if self._empty_dirs and is_missing:
            raise EmptyCommitlogError(
                f"{self._empty_dirs[0]} contains no commitlog file",
                hint="check that its disk is mounted; a new broker creates the first file with its first message",
            )

    def has_next_file(self) -> bool:
        """Whether the broker has made the file behind the last known one: a system call for each directory."""
        name = f"{self.max_file_end:020d}"
        return any(os.path.lexists(directory / name) for directory in self.dirs)

    def refresh(self) -> None:
        """List the files of the log again: those in its directories, and pinned ones that the broker has deleted.
        Raises NotFoundError or AccessDeniedError naming a directory."""
        found: dict[int, LogFile] = {}
        empty_dirs = []
        for directory in reversed(self.dirs):
            its_files = _list_files(directory)
            found |= {file.begin_phys: file for file in its_files}
            if not its_files:
                empty_dirs.append(directory)
        last = max(found, default=None)
        for pin in self._pinned():
            # A pin above the broker's last file belongs to a truncated or replaced log.
            if last is None or pin.begin_phys < last:
                found.setdefault(pin.begin_phys, pin)
        files = tuple(found[begin] for begin in sorted(found))
        with self._lock:
            self._files, self._begins = files, tuple(file.begin_phys for file in files)
            self._empty_dirs = tuple(empty_dirs)
            for file, opened in self._open:
                # The descriptor of a deleted file would keep its disk space allocated, and that of a
                # recreated file would never show new bytes.
                if file not in files or not opened.is_current():
                    self._open.pop(file)
                    opened.close()

    def file_at(self, phys: int) -> LogFile | None:
        """The file that holds physical offset ``phys``, or None."""
        files, begins = self._files, self._begins
        i = bisect_right(begins, phys) - 1
        return files[i] if i >= 0 and phys < files[i].end_phys else None

    def read_into(self, dest: memoryview, phys: int) -> int:
        """Read bytes from physical offset ``phys`` into ``dest``, at most to the end of the file there, and return how
        many.

        Returns 0 if no file contains ``phys``. A file that the broker has deleted since the last listing is read from
        its pin, if it has one. Raises AccessDeniedError or UnavailableError naming the file."""
        file = self.file_at(phys)
        if file is None:
            return 0
        try:
            return self._read_file(file, dest, phys)
        except NotFoundError:
            # The broker deleted it after the last listing; its pin, if any, is in the next listing.
            self.refresh()
            file = self.file_at(phys)
            return self._read_file(file, dest, phys) if file is not None else 0

    def read_readable_part(self, dest: memoryview, phys: int) -> tuple[int, UnreadableError | None]:
        """Read bytes from physical offset ``phys`` into ``dest`` up to the first that the disk cannot read. Returns how
        many, and the disk's error, None without one. After an error it reads page by page, so that the unreadable page
        is read only once more."""
        file = self.file_at(phys)
        try:
            return self.read_into(dest, phys), None
        except UnreadableError as error:
            if file is None:
                return 0, error
        filled, dest = 0, dest[: file.end_phys - phys]
        while filled < len(dest):
            in_page = (phys + filled - file.begin_phys) % PAGE_BYTES
            try:
                got = self.read_into(dest[filled : filled + PAGE_BYTES - in_page], phys + filled)
            except UnreadableError as error:
                return filled, error
            if got == 0:
                break
            filled += got
        return filled, None

    def is_broken_pin(self, file: LogFile) -> bool:
        """Whether bytes of ``file`` that could not be read are lost for good: the broker has deleted the file, so that
        only its pin is left, and other bytes of it are readable. If none are, the disk may be away for a time only."""
        self.refresh()
        if not file.is_pinned or file not in self._files:
            return False
        try:
            with ColdReadFile(file.path) as opened:
                return opened.is_given_in_part()
        except (NotFoundError, UnavailableError):
            return False  # pin released since

    def read(self, phys: int, size_bytes: int) -> bytes:
        """The ``size_bytes`` bytes from physical offset ``phys`` on; fewer at the end of a file. Raises as
        ``read_into``."""
        file = self.file_at(phys)
        data = bytearray(min(size_bytes, file.end_phys - phys) if file else 0)
        return bytes(data[: self.read_into(memoryview(data), phys)])

    def record_size_at(self, phys: int) -> int | None:
        """Size in bytes of the record whose header is at ``phys``; None without a record header."""
        header = self.read(phys, _SIZE_MAGIC.size)
        if len(header) < _SIZE_MAGIC.size:
            return None
        size, magic = _SIZE_MAGIC.unpack(header)
        return size if magic in RECORD_MAGICS and size > 0 else None

    def is_end_marker(self, phys: int) -> bool:
        """Whether the broker's end-of-file marker is at ``phys``."""
        header, file = self.read(phys, _SIZE_MAGIC.size), self.file_at(phys)
        if len(header) < _SIZE_MAGIC.size or file is None:
            return False
        return _SIZE_MAGIC.unpack(header) == (file.end_phys - phys, BLANK_MAGIC)

    def is_blank_from(self, phys: int) -> bool:
        """Whether nothing was ever written at or above physical offset ``phys``, as the holes of the files show.

        False also if that would be expensive to find out, as a file has no holes. Raises what reading raises.
        """
        return all(
            self._is_blank(file, max(phys, file.begin_phys)) for file in self._files if file.end_phys > phys
        )

    def data_end_phys(self) -> int:
        """About where the log's written bytes end, as the holes of its files show; for estimates. A file without a hole
        counts as written to its end."""
        for file in reversed(self._files):
            if (end_bytes := _data_end(file)) > 0:
                return file.begin_phys + end_bytes
        return self.min_phys

    def close(self) -> None:
        """Close all descriptors. Later reads open them again."""
        with self._lock:
            for opened in self._open.evict(len(self._open)):
                opened.close()

    def _is_blank(self, file: LogFile, phys: int) -> bool:
        """Whether ``file`` has nothing but zeros from physical offset ``phys`` on: at most a few allocated bytes, which
        are read, then a hole to its end. False for more allocated bytes, which would be expensive to check."""
        offset = phys - file.begin_phys
        try:
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            hole = os.lseek(fd, offset, os.SEEK_HOLE)
            is_last = hole >= file.size_bytes or not _has_data(fd, hole)
        except OSError:
            return False
        finally:
            os.close(fd)
        allocated_bytes = hole - offset
        if not is_last or allocated_bytes > BLANK_BYTES_MAX:
            return False
        return self.read(phys, allocated_bytes).count(0) == allocated_bytes

    def _read_file(self, file: LogFile, dest: memoryview, phys: int) -> int:
        """Read bytes of ``file`` from physical offset ``phys`` into ``dest``, at most to the file's end, and return how
        many. The file stays open for the next read; if too many are open, the oldest is closed."""
        room = dest[: file.end_phys - phys]
        with self._lock:
            opened = self._open.get(file)
            if opened is None:
                opened = ColdReadFile(file.path)
                for oldest in self._open.add(file, opened):
                    oldest.close()
            return opened.read_into(room, phys - file.begin_phys)


def _data_end(file: LogFile) -> int:
    """How many bytes ``file`` has before the hole at its end; its size if it has none, or if that cannot be found
    out."""
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return file.size_bytes
    try:
        if not _has_data(fd, 0):
            return 0
        hole = os.lseek(fd, 0, os.SEEK_HOLE)
        return file.size_bytes if _has_data(fd, hole) else hole
    except OSError:
        return file.size_bytes
    finally:
        os.close(fd)


def _has_data(fd: int, offset: int) -> bool:
    """Whether an open file has bytes at or above ``offset`` that are not in a hole."""
    try:
        os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data up to the end
            return False
        raise
    return True


def _list_files(directory: Path) -> list[LogFile]:
    """The commitlog files in ``directory``, named by physical offsets; empty ones, which the broker is making, are
    skipped. Raises NotFoundError or AccessDeniedError if it cannot be listed."""
    files = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if len(entry.name) == NAME_DIGITS and entry.name.isdecimal() and entry.is_file():
                    size = _size_bytes(entry)
                    if size > 0:
                        files.append(LogFile(int(entry.name), size, Path(entry.path)))
    except OSError as error:
        raise open_failure(directory, error) from error
    return files


def _size_bytes(entry: os.DirEntry[str]) -> int:
    """The size of a file; 0 if it was removed since its directory was listed."""
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0
