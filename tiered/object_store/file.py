"""file://: a directory with an object store's guarantees.

An object is written to an anonymous file (O_TMPFILE), synced, and only then given its name by link(), which
fails when the name exists: one winner, and neither a crash nor a full disk leaves anything behind. Where the
file system knows no anonymous files a named one under ``.uploads/`` is used, where it knows no hard links
renameat2(RENAME_NOREPLACE); a plain rename never. The directory is synced before the call returns, and before
AlreadyExistsError, so that what a loser sees is durable too.

Owns names, durability and order of listing. Does not own retries: a local disk's errors are not transient.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tiered.errors import (
    DENIED_ERRNOS,
    FULL_ERRNOS,
    AccessDeniedError,
    AlreadyExistsError,
    CorruptionError,
    NotFoundError,
    RefusedRequestError,
    StoreFullError,
    ThrottledError,
    TieredError,
    UnansweredError,
    UnavailableError,
)
from tiered.object_store.body import as_views
from tiered.object_store.interface import Body, ObjectInfo
from tiered.object_store.key import check_key, is_component

UPLOADS = ".uploads"
WRITE_BYTES_MAX = 8 * 1024 * 1024
PIECES_MAX = 512
CACHE_BYTES_MAX = 1024 * 1024
"""Larger objects are dropped from the page cache once durable: it belongs to the broker."""

LEFT_OVER_S = 24 * 3600.0
"""A named upload that is older by the file system's clock is of a process that was killed: no PUT takes so long."""

_NO_ANONYMOUS_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})
_MISSING = frozenset({errno.ENOENT})
_REFUSED = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP})
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_MKDIR_ATTEMPTS_MAX = 10


class FileStore:
    """Objects as files below ``directory``, which is made by the first PUT."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(directory)
        self._upload_numbers = itertools.count()
        self._anonymous = True
        self._has_swept = False
        self._identity: tuple[int, int] | None = None
        """Device and inode of the directory that was written to first: on a disk that is no longer mounted it is not
        made anew."""

    @property
    def url(self) -> str:
        """``file:///directory``."""
        return Path(self._root).as_uri()

    def __repr__(self) -> str:
        return f"FileStore({self._root!r})"

    # -- writing -----------------------------------------

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        """See ObjectStore. A time-out is noticed between writes; the object then never gets its name."""
        target = self._path(key)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        views = as_views(body)
        with self._translated(key):
            self._require_root()
            with self._upload_file() as (descriptor, name):
                _write_all(descriptor, views, deadline_s, key)
                os.fsync(descriptor)
                if sum(view.nbytes for view in views) > CACHE_BYTES_MAX:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                _refuse_late(deadline_s, key)
                self._publish(descriptor, name, target)
            try:
                _sync_directory(os.path.dirname(target))
            except FileNotFoundError:
                pass  # deleted again already
            except OSError as error:
                # Whatever the reason: the object has its name, and may or may not keep it.
                raise UnansweredError(f"{self.url}/{key}: {error.strerror or error}") from error

    def _require_root(self) -> None:
        """Raises ThrottledError when the directory is no longer the one that was written to before: what is put into
        another one, below the place where a disk was mounted, would be hidden when the disk is back."""
        if self._identity is None:
            self._make_directory(self._root)
        try:
            status = os.stat(self._root)
        except FileNotFoundError:
            is_there = False
        else:
            # Some file systems change one of the two by themselves: inodes of FUSE, devices of NFS mounted anew.
            self._identity = self._identity or (status.st_dev, status.st_ino)
            is_there = status.st_dev == self._identity[0] or status.st_ino == self._identity[1]
        if not is_there:
            raise ThrottledError(
                f"{self.url} is not the directory that was written to before", hint="is its disk mounted?"
            )

    @contextmanager
    def _upload_file(self) -> Iterator[tuple[int, str | None]]:
        """A file without a visible name: (descriptor, None), or with a private one, removed at the end."""
        descriptor, name = self._open_upload()
        try:
            yield descriptor, name
        finally:
            os.close(descriptor)
            if name is not None:
                with suppress(FileNotFoundError):  # renamed to its final name
                    os.unlink(name)

    def _open_upload(self) -> tuple[int, str | None]:
        if self._anonymous:
            try:
                return os.open(self._root, os.O_TMPFILE | os.O_RDWR, 0o644), None
            except OSError as error:
                if error.errno not in _NO_ANONYMOUS_FILES:
                    raise
                self._anonymous = False
        directory = os.path.join(self._root, UPLOADS)
        os.makedirs(directory, exist_ok=True)
        unique = f"{os.getpid()}-{threading.get_native_id()}-{next(self._upload_numbers)}-{time.time_ns()}"
        name = os.path.join(directory, unique)
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        if not self._has_swept:
            self._has_swept = True
            _remove_older(directory, os.fstat(descriptor).st_mtime - LEFT_OVER_S)
        return descriptor, name

    def _publish(self, descriptor: int, name: str | None, target: str) -> None:
        source = f"/proc/self/fd/{descriptor}" if name is None else name
        for _ in range(_MKDIR_ATTEMPTS_MAX):
            try:
                self._make_directory(os.path.dirname(target))
                _link(source, target, follow=name is None)
                return
            except FileExistsError:
                with suppress(FileNotFoundError):  # the winner is deleted already
                    _sync_directory(os.path.dirname(target))
                raise
            except FileNotFoundError:
                continue  # a concurrent delete removed the directory when it became empty
            except OSError as error:
                if name is None or error.errno not in _NO_HARD_LINKS:
                    raise
                _rename_noreplace(name, target)
                return
        raise UnavailableError(f"{self.url}: the directory of {target} is removed again and again")

    def _make_directory(self, directory: str) -> None:
        """Make ``directory`` and its parents durably."""
        if os.path.isdir(directory):
            return
        parent = os.path.dirname(directory)
        if parent != directory:
            self._make_directory(parent)
        with suppress(FileExistsError):
            os.mkdir(directory)
        _sync_directory(parent)

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore. Directories that became empty go too."""
        directories = set()
        for key in keys:
            path = self._path(key)
            with self._translated(key), suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
                directories.add(os.path.dirname(path))
        for directory in sorted(directories, key=len, reverse=True):
            with self._translated(os.path.relpath(directory, self._root)):
                self._remove_empty(directory)

    def _remove_empty(self, directory: str) -> None:
        """Remove ``directory`` and its parents while they are empty, and sync the first that stays."""
        with suppress(FileNotFoundError):  # a concurrent delete was faster
            while len(directory) > len(self._root):
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    raise
                except OSError:
                    break  # in use, or not ours to remove: an empty directory is no object
                directory = os.path.dirname(directory)
            _sync_directory(directory)

    # -- reading -----------------------------------------

    def get(self, key: str) -> bytes:
        """See ObjectStore."""
        with self._opened(key) as (descriptor, size):
            return self._read(key, descriptor, 0, size)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See ObjectStore."""
        with self._opened(key) as (descriptor, size):
            if offset < 0 or length < 0 or offset + length > size:
                raise CorruptionError(
                    f"{self.url}: {key} has {size} bytes, wanted [{offset}, {offset + length})"
                )
            return self._read(key, descriptor, offset, length)

    def get_tail(self, key: str, length: int) -> bytes:
        """See ObjectStore."""
        with self._opened(key) as (descriptor, size):
            taken = min(max(length, 0), size)
            return self._read(key, descriptor, size - taken, taken)

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        path = self._path(key)
        with self._translated(key):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise NotFoundError(f"{self.url}: no object {key}")
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)

    def _read(self, key: str, descriptor: int, offset: int, length: int) -> bytes:
        pieces = []
        while length > 0:
            piece = os.pread(descriptor, length, offset)
            if not piece:
                raise CorruptionError(f"{self.url}: {key} ends at {offset}, {length} bytes early")
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        """See ObjectStore. A missing directory is an empty store; what vanishes meanwhile is left out."""
        return itertools.islice(self._walk("", prefix, start_after), limit)

    def _walk(self, parent: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        for name, is_directory in self._entries(parent):
            path = parent + name
            if is_directory:
                branch = path + "/"
                if not (branch.startswith(prefix) or prefix.startswith(branch)):
                    continue
                if start_after < branch or start_after.startswith(branch):
                    yield from self._walk(branch, prefix, start_after)
            elif path.startswith(prefix) and path > start_after:
                with self._translated(path), suppress(FileNotFoundError):
                    status = os.stat(os.path.join(self._root, path))
                    yield ObjectInfo(path, status.st_size, status.st_mtime_ns // 1_000_000)

    def _entries(self, parent: str) -> Sequence[tuple[str, bool]]:
        with self._translated(parent), suppress(FileNotFoundError, NotADirectoryError):
            return _sorted_entries(os.path.join(self._root, parent), hidden="" if parent else UPLOADS)
        return ()

    def clock_ms(self) -> int:
        """The file system's clock: what it stamps on a new file (a server's, when it is a network's)."""
        with self._translated(""):
            self._make_directory(self._root)
            with self._upload_file() as (descriptor, _):
                os.write(descriptor, b"\0")
                return os.fstat(descriptor).st_mtime_ns // 1_000_000

    def close(self) -> None:
        """Nothing is held open between calls."""

    # -- names and errors -----------------------------------------

    def _path(self, key: str) -> str:
        if check_key(key).split("/", 1)[0] == UPLOADS:
            raise RefusedRequestError(f"{self.url}: {UPLOADS} is reserved")
        return os.path.join(self._root, key)

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise file_error(error, f"{self.url}/{key}") from error


def file_error(error: OSError, where: str) -> TieredError:
    """What a failed system call means. ``where`` names the object."""
    what = f"{where}: {error.strerror or error}"
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(f"{where} exists")
    if error.errno in FULL_ERRNOS:
        return StoreFullError(what, hint="free space or grow the file system")
    if error.errno in DENIED_ERRNOS:
        return AccessDeniedError(what, hint=f"user {os.geteuid()} needs access to it")
    if error.errno in _MISSING:
        return NotFoundError(what)
    if error.errno == errno.EXDEV:
        # Nothing was named, and never will be.
        return RefusedRequestError(
            what, hint="an archive lies on one file system: no mount and no link inside it"
        )
    if error.errno in _REFUSED:
        return RefusedRequestError(what)
    return UnansweredError(what)


def _write_all(descriptor: int, views: list[memoryview], deadline_s: float | None, key: str) -> None:
    pending = [
        view[at : at + WRITE_BYTES_MAX] for view in views for at in range(0, view.nbytes, WRITE_BYTES_MAX)
    ]
    first = 0
    while first < len(pending):
        _refuse_late(deadline_s, key)
        chunk: list[memoryview] = []
        chunk_bytes = 0
        for view in pending[first : first + PIECES_MAX]:
            if chunk and chunk_bytes + view.nbytes > WRITE_BYTES_MAX:
                break
            chunk.append(view)
            chunk_bytes += view.nbytes
        written = os.writev(descriptor, chunk)
        for view in chunk:
            if written < view.nbytes:
                pending[first] = view[written:]
                break
            written -= view.nbytes
            first += 1


def _sorted_entries(directory: str, *, hidden: str) -> list[tuple[str, bool]]:
    """(name, is a directory) in the order of the keys below: a directory sorts as its name and a slash."""
    with os.scandir(directory) as entries:
        found = [
            (entry.name, entry.is_dir())
            for entry in entries
            if entry.name != hidden
            and is_component(entry.name)  # not lost+found, which only root may look into
        ]
    return sorted(found, key=lambda entry: entry[0] + "/" if entry[1] else entry[0])


def _remove_older(directory: str, than_s: float) -> None:
    """Best effort: what cannot be removed takes space, and keeps nothing from being stored."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < than_s:
                    os.unlink(entry.path)


def _refuse_late(deadline_s: float | None, key: str) -> None:
    if deadline_s is not None and time.monotonic() > deadline_s:
        raise UnansweredError(f"writing {key} took longer than its time limit; nothing is visible")


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(source: str, target: str, *, follow: bool) -> None:
    if not follow:
        os.link(source, target)
        return
    # A directory descriptor makes Python call linkat() with AT_SYMLINK_FOLLOW, which names an anonymous file;
    # the plain link() it calls otherwise would try to link the /proc entry itself.
    directory = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(os.path.basename(source), target, src_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def _rename_noreplace(source: str, target: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)
