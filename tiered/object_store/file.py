"""file://: a directory with the guarantees of an object store.

An object is written to an anonymous file (O_TMPFILE), synced, and then named by link(), which fails if the name
exists: one caller wins, and neither a crash nor a full disk leaves anything behind. Without anonymous files a named
one under ``.uploads/`` is used, without hard links renameat2(RENAME_NOREPLACE); never a plain rename. The directory is
synced before the call returns, and before AlreadyExistsError, so that the existing object is durable too.

Only directories and regular files below the root count: nothing is read, written, listed or deleted through a symbolic
link, and no pipe or device is waited for.
"""

import ctypes
import errno
import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

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
from tiered.object_store.interface import (
    GET_BYTES_MAX,
    Body,
    FileRange,
    ObjectInfo,
    ObjectRange,
    Piece,
    Upload,
    require_size,
)
from tiered.object_store.key import check_key, is_component
from tiered.object_store.part_plan import joined_pieces, piece_bytes
from tiered.whole_file import sync_directory

logger = logging.getLogger(__name__)

UPLOADS = ".uploads"
WRITE_BYTES_MAX = 8 * 1024 * 1024
PIECES_MAX = 512
CACHE_BYTES_MAX = 1024 * 1024
"""Larger objects are dropped from the page cache once durable: the broker needs it."""

LEFT_OVER_S = 24 * 3600.0
"""A named upload older than this belongs to a dead process: no PUT takes so long."""

MODES = {"owner": (0o700, 0o600), "group": (0o750, 0o640), "all": (0o755, 0o644)}
"""Who may read (``object_store.file_readers``) -> modes of directories and files."""

_NO_ANONYMOUS_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})
_NO_NOREPLACE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_MISSING = frozenset({errno.ENOENT})
_REFUSED = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP})
_IRREGULAR = frozenset({errno.ELOOP, errno.ENXIO})
"""Opening a link without following it; a socket, or a device without a driver."""
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NAMED_MAX = 100
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_MKDIR_ATTEMPTS_MAX = 10


class FileStore:
    """Objects as files below ``directory``, which the first PUT creates. ``readers``, a key of MODES: who may read what
    it creates, whatever the umask."""

    def __init__(self, directory: str | os.PathLike[str], *, readers: str = "owner") -> None:
        """No file is touched: the first PUT makes the directory. ``readers``: a key of MODES."""
        self._root = os.path.abspath(directory)
        self._directory_mode, self._file_mode = MODES[readers]
        self._upload_numbers = itertools.count()
        self.writes_anonymously = True
        """A file has no name until it is complete; False once the file system refused that."""
        self._has_swept = False
        self._named: set[str] = set()
        """Entries that are no objects, logged once each."""
        self._identity: tuple[int, int] | None = None
        """Device and inode of the directory at the first write: it is not recreated when its disk is unmounted."""

    @property
    def url(self) -> str:
        """``file:///directory``."""
        return Path(self._root).as_uri()

    def __repr__(self) -> str:
        return f"FileStore({self._root!r})"

    # -- writing -----------------------------------------

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self.compose_if_absent(key, body, timeout_s=timeout_s)

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        """Create an object of bytes and of ranges of objects and files, durably. The timeout is checked between writes;
        after it the object never gets its name. The kernel copies ranges, without moving bytes if the file system can
        share them."""
        check_object_key(key)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._typed_errors(key):
            self._require_root()
            with self._upload_file() as (descriptor, name):
                for are_bytes, group in itertools.groupby(joined_pieces(pieces), key=_is_buffer):
                    if are_bytes:
                        _write_all(descriptor, as_views(cast(Body, list(group))), deadline_s, key)
                    else:
                        for piece in group:
                            self._append_range(
                                descriptor, cast(ObjectRange | FileRange, piece), deadline_s, key
                            )
                os.fsync(descriptor)
                if sum(map(piece_bytes, pieces)) > CACHE_BYTES_MAX:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                _refuse_late(deadline_s, key)
                self._publish(descriptor, name, key)
            try:
                with self._directory_of(key) as directory:
                    sync_directory(directory)
            except FileNotFoundError:
                pass  # already deleted
            except OSError as error:
                # The object has its name, and may or may not keep it.
                raise UnansweredError(f"{self.url}/{key}: {error.strerror or error}") from error

    def _append_range(
        self, descriptor: int, piece: ObjectRange | FileRange, deadline_s: float | None, key: str
    ) -> None:
        """Append a range of another object or of a local file to the new object ``key``, whose file is open. Raises
        CorruptionError if the range exceeds its object."""
        if isinstance(piece, FileRange):
            source = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _copy_range(source, descriptor, piece, deadline_s, key)
            finally:
                os.close(source)
            return
        with self._opened(piece.key) as (source, size):
            if piece.offset < 0 or piece.offset + piece.length > size:
                raise CorruptionError(
                    f"{self.url}/{piece.key} has {size} bytes, so that there is no range "
                    f"[{piece.offset}, {piece.offset + piece.length})"
                )
            _copy_range(source, descriptor, piece, deadline_s, key)

    def _require_root(self) -> None:
        """Make the store's directory at the first write. Later raise ThrottledError if another directory is in its
        place: objects written into the mount point of an unmounted disk would be hidden once the disk is back."""
        if self._identity is None:
            self._make_directory(self._root)
        try:
            status = os.stat(self._root)
        except FileNotFoundError:
            is_there = False
        else:
            # Some file systems change one of the two: inodes of FUSE, devices of NFS after a remount.
            self._identity = self._identity or (status.st_dev, status.st_ino)
            is_there = status.st_dev == self._identity[0] or status.st_ino == self._identity[1]
        if not is_there:
            raise ThrottledError(
                f"{self.url} is missing, or another directory than this process wrote to before",
                hint="mount its disk again",
            )

    @contextmanager
    def _upload_file(self) -> Iterator[tuple[int, str | None]]:
        """Open a new file for an object's bytes and yield its descriptor and None, as it has no name until the object
        is complete. On a file system without such anonymous files it has a private name below ``.uploads/``, which is
        yielded instead of None and removed at the end."""
        if self.writes_anonymously:
            try:
                descriptor = self._readable(os.open(self._root, os.O_TMPFILE | os.O_RDWR, 0o600))
            except OSError as error:
                if error.errno not in _NO_ANONYMOUS_FILES:
                    raise
                self.writes_anonymously = False
            else:
                try:
                    yield descriptor, None
                finally:
                    os.close(descriptor)
                return
        unique = f"{os.getpid()}-{threading.get_native_id()}-{next(self._upload_numbers)}-{time.time_ns()}"
        with self._directory_of(f"{UPLOADS}/{unique}", is_made=True) as directory:
            name = os.path.join(directory, unique)
            descriptor = self._readable(os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            try:
                if not self._has_swept:  # what killed processes have left
                    self._has_swept = True
                    _remove_older(directory, os.fstat(descriptor).st_mtime - LEFT_OVER_S)
                yield descriptor, name
            finally:
                os.close(descriptor)
                with suppress(FileNotFoundError):  # renamed to its final name
                    os.unlink(name)

    def _readable(self, descriptor: int) -> int:
        """``descriptor``, of a file that its readers can read."""
        os.fchmod(descriptor, self._file_mode)
        return descriptor

    def _publish(self, descriptor: int, name: str | None, key: str) -> None:
        """Give a complete file the name of the object ``key``, and make the object's directory if needed. ``name``: the
        file's name so far, None if it has none. Raises FileExistsError if the object exists."""
        source = f"/proc/self/fd/{descriptor}" if name is None else name
        for _ in range(_MKDIR_ATTEMPTS_MAX):
            # A concurrent delete may remove the directory when it becomes empty.
            with suppress(FileNotFoundError):
                with self._directory_of(key, is_made=True) as directory:
                    self._name(source, os.path.join(directory, os.path.basename(key)), follow=name is None)
                return
        raise UnavailableError(
            f"{self.url}/{key} cannot be created, as its directory is removed again and again by deletes at the same "
            "time"
        )

    def _name(self, source: str, target: str, *, follow: bool) -> None:
        """Give the file ``source`` the name ``target`` by a hard link, or by a rename where there are none. Raises
        FileExistsError if there is such a file, once its name is durable too. ``follow``: ``source`` is the link of a
        descriptor in /proc, as the file has no name."""
        try:
            _link(source, target, follow=follow)
        except FileExistsError:
            with suppress(FileNotFoundError):  # the existing object is already deleted
                sync_directory(os.path.dirname(target))
            raise
        except FileNotFoundError:
            raise
        except OSError as error:
            if follow or error.errno not in _NO_HARD_LINKS:
                raise
            _rename_noreplace(source, target)

    def _make_directory(self, directory: str) -> None:
        """Create ``directory`` and its missing parents, so that they outlive a crash."""
        if os.path.isdir(directory):
            return
        parent = os.path.dirname(directory)
        if parent != directory:
            self._make_directory(parent)
        self._make_entry(parent, os.path.basename(directory))

    def _make_entry(self, parent: str, name: str) -> None:
        """Make the directory ``name`` in ``parent``, with the store's mode, so that it outlives a crash. It may exist
        already, as another process may have made it."""
        directory = os.path.join(parent, name)
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
            if self._directory_mode != 0o700:
                # A set-group-ID bit of the parent is inherited, and stays.
                os.chmod(directory, self._directory_mode | os.stat(directory).st_mode & stat.S_ISGID)
        sync_directory(parent)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, and the directories that become empty. An object that does not exist counts as deleted."""
        directories = set()
        for key in map(check_object_key, keys):
            with self._typed_errors(key), suppress(FileNotFoundError, NotADirectoryError):
                with self._directory_of(key) as directory:
                    path = os.path.join(directory, os.path.basename(key))
                    self._require_regular(key, os.lstat(path))
                    os.unlink(path)
                directories.add(os.path.dirname(key))
        for directory in sorted(directories, key=len, reverse=True):
            with self._typed_errors(directory):
                self._remove_empty(directory)

    def _remove_empty(self, directory: str) -> None:
        """Remove ``directory``, a path below the root, and its parents as far as they are empty, and make the removal
        durable by syncing the first directory that stays."""
        with suppress(FileNotFoundError):  # a concurrent delete was faster
            while directory:
                with self._directory_of(directory) as parent:
                    try:
                        os.rmdir(os.path.join(parent, os.path.basename(directory)))
                    except FileNotFoundError:
                        raise
                    except OSError:
                        break  # in use, or no permission: an empty directory is no object
                directory = os.path.dirname(directory)
            with self._directory_of(os.path.join(directory, "-")) as stays:
                sync_directory(stays)

    # -- reading -----------------------------------------

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        with self._opened(key) as (descriptor, size):
            require_size(size, max_bytes, f"{self.url}/{key}")
            return self._read(key, descriptor, 0, size)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        with self._opened(key) as (descriptor, size):
            if offset < 0 or length < 0 or offset + length > size:
                raise CorruptionError(
                    f"{self.url}/{key} has {size} bytes, so that there is no range [{offset}, {offset + length})"
                )
            return self._read(key, descriptor, offset, length)

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """Open the object ``key`` for reading inside the block, and yield its descriptor and its size in bytes. Raises
        NotFoundError if there is none, and RefusedRequestError for a link, pipe or device in its place."""
        check_object_key(key)
        with self._typed_errors(key):
            with self._directory_of(key) as directory:
                try:
                    # Without O_NONBLOCK opening a pipe would wait for a writer.
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    descriptor = os.open(os.path.join(directory, os.path.basename(key)), flags)
                except OSError as error:
                    if error.errno not in _IRREGULAR:
                        raise
                    raise self._irregular(key) from error
            try:
                status = os.fstat(descriptor)
                if stat.S_ISDIR(status.st_mode):
                    raise NotFoundError(f"{self.url}/{key} does not exist")
                self._require_regular(key, status)
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)

    def _read(self, key: str, descriptor: int, offset: int, length: int) -> bytes:
        """Read ``length`` bytes at ``offset`` of the open object ``key``, which its size covers. Raises CorruptionError
        if the file ends before, which is damage, as objects never change."""
        pieces = []
        while length > 0:
            piece = os.pread(descriptor, length, offset)
            if not piece:
                raise CorruptionError(
                    f"{self.url}/{key} ends at byte {offset}, {length} bytes before its end"
                )
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        """List objects. A missing directory is an empty store; objects deleted during the listing are skipped."""
        return itertools.islice(self._walk("", prefix, start_after), limit)

    def _walk(self, parent: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """List the objects below the directory ``parent`` whose keys begin with ``prefix`` and come after
        ``start_after``, in the order of keys. Only directories that may have such objects are entered; what is neither
        a directory nor a regular file is logged and skipped."""
        for name, is_directory in self._entries(parent):
            path = parent + name
            if is_directory is None:
                self._log_irregular(path)
                continue
            if is_directory:
                branch = path + "/"
                if not (branch.startswith(prefix) or prefix.startswith(branch)):
                    continue
                if start_after < branch or start_after.startswith(branch):
                    yield from self._walk(branch, prefix, start_after)
            elif path.startswith(prefix) and path > start_after:
                with self._typed_errors(path), suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(self._root, path))
                    yield ObjectInfo(path, status.st_size, status.st_mtime_ns // 1_000_000)

    def _entries(self, parent: str) -> Sequence[tuple[str, bool | None]]:
        """The names in the directory ``parent`` in the order of keys, each with whether it is a directory (None:
        neither that nor a regular file); none if the directory does not exist."""
        with (
            self._typed_errors(parent),
            suppress(FileNotFoundError, NotADirectoryError),
            self._directory_of(parent + "-") as directory,
        ):
            return _sorted_entries(directory, hidden="" if parent else UPLOADS)
        return ()

    def uploads(self, prefix: str) -> Iterator[Upload]:
        return iter(())

    def abort_upload(self, upload: Upload) -> None:
        """Nothing: no upload is ever unfinished."""

    def clock_ms(self, prefix: str = "") -> int:
        """The time of the file system in ms since the epoch: the timestamp of a file made for it. On a network file
        system that is the server's time."""
        with self._typed_errors(""):
            self._make_directory(self._root)
            with self._upload_file() as (descriptor, _):
                os.write(descriptor, b"\0")
                return os.fstat(descriptor).st_mtime_ns // 1_000_000

    def close(self) -> None:
        """Nothing to release."""

    # -- names and errors -----------------------------------------

    @contextmanager
    def _directory_of(self, key: str, *, is_made: bool = False) -> Iterator[str]:
        """A path to the directory of the object ``key`` for use inside the block. It goes through an open descriptor,
        so that no symbolic link can lead out of the archive. ``is_made``: make missing directories. Raises
        RefusedRequestError for a link in the key's path, and OSError."""
        descriptor = os.open(self._root, _DIRECTORY)
        try:
            for part in key.split("/")[:-1]:
                outer = descriptor
                descriptor = self._entered(outer, part, key, is_made=is_made)
                os.close(outer)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)

    def _entered(self, outer: int, part: str, key: str, *, is_made: bool) -> int:
        """Open the directory ``part`` inside the open directory ``outer`` and return its descriptor; with ``is_made``,
        make it if it is missing. ``key``: the object whose path it is on. Raises RefusedRequestError for a symbolic
        link, which may lead out of the archive."""
        try:
            return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
        except FileNotFoundError:
            if not is_made:
                raise
            self._make_entry(f"/proc/self/fd/{outer}", part)
            return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
        except NotADirectoryError:
            if not stat.S_ISLNK(os.stat(part, dir_fd=outer, follow_symlinks=False).st_mode):
                raise
            raise RefusedRequestError(
                f"{self.url}/{key}: {part} is a symbolic link",
                hint="replace the link by a directory: an archive is not read, listed or deleted through links",
            ) from None

    def _require_regular(self, key: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise self._irregular(key)

    def _irregular(self, key: str) -> RefusedRequestError:
        return RefusedRequestError(
            f"{self.url}/{key} is not a regular file, so that it cannot be an object", hint="remove it"
        )

    def _log_irregular(self, key: str) -> None:
        """Log once that there is something else than an object at ``key``, of up to a hundred keys."""
        if key not in self._named and len(self._named) < _NAMED_MAX:
            self._named.add(key)
            logger.warning(
                "%s/%s is neither a regular file nor a directory: it is neither read nor deleted",
                self.url,
                key,
            )

    @contextmanager
    def _typed_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise store_file_error(error, f"{self.url}/{key}") from error


def check_object_key(key: str) -> str:
    """``key``. Raises UsageError for an invalid one, RefusedRequestError for a reserved one."""
    if check_key(key).split("/", 1)[0] == UPLOADS:
        raise RefusedRequestError(
            f"key {key} is refused: the store keeps unfinished uploads below {UPLOADS}/"
        )
    return key


def store_file_error(error: OSError, where: str) -> TieredError:
    """The error of tiered.errors for a failed system call of a file store; ``where`` is the object's URL. An error that
    leaves open whether the call had an effect becomes UnansweredError."""
    what = f"{where}: {error.strerror or error}"
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(f"{where} exists")
    if error.errno in FULL_ERRNOS:
        return StoreFullError(what, hint="free space or grow the file system")
    if error.errno in DENIED_ERRNOS:
        is_read_only = error.errno == errno.EROFS
        hint = "mount the file system for writing" if is_read_only else f"give user {os.geteuid()} access"
        return AccessDeniedError(what, hint=hint)
    if error.errno in _MISSING:
        return NotFoundError(what)
    if error.errno == errno.EXDEV:
        return RefusedRequestError(
            what, hint="keep the archive on one file system, without mounts or links inside it"
        )
    if error.errno in _REFUSED:
        return RefusedRequestError(what)
    return UnansweredError(what)


def _write_all(descriptor: int, views: list[memoryview], deadline_s: float | None, key: str) -> None:
    """Write all bytes of ``views`` to a file, in few calls of bounded size. Raises UnansweredError if ``deadline_s``,
    of the monotonic clock, passes between two calls; ``key`` names the object in it."""
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
            if written < view.nbytes:  # the call wrote only a part of it
                pending[first] = view[written:]
                break
            written -= view.nbytes
            first += 1


def _copy_range(
    source: int, target: int, piece: ObjectRange | FileRange, deadline_s: float | None, key: str
) -> None:
    """Append the range ``piece`` of the open file ``source`` to the open file ``target`` of the object ``key``, in
    steps between which the deadline is checked. The kernel copies it where it can."""
    offset, end = piece.offset, piece.offset + piece.length
    by_kernel = True
    while offset < end:
        _refuse_late(deadline_s, key)
        length = min(end - offset, WRITE_BYTES_MAX)
        if by_kernel:
            try:
                copied = os.copy_file_range(source, target, length, offset)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                by_kernel = False
                continue
        else:
            copied = os.write(target, os.pread(source, length, offset))
        if copied == 0:
            raise CorruptionError(
                f"{piece[0]} ends at byte {offset}, {end - offset} bytes before the range's end"
            )
        offset += copied
    if piece.length > CACHE_BYTES_MAX:
        os.posix_fadvise(source, piece.offset, piece.length, os.POSIX_FADV_DONTNEED)


def _sorted_entries(directory: str, *, hidden: str) -> list[tuple[str, bool | None]]:
    """The entries of a directory whose names may be parts of keys, except ``hidden``, each with whether it is a
    directory (None: neither that nor a regular file). They are in the order of keys: a directory sorts like its name
    and a slash."""
    with os.scandir(directory) as entries:
        found = [
            (entry.name, _is_directory(entry))
            for entry in entries
            if entry.name != hidden and is_component(entry.name)  # not lost+found, which only root can read
        ]
    return sorted(found, key=lambda entry: entry[0] + "/" if entry[1] else entry[0])


def _is_directory(entry: os.DirEntry[str]) -> bool | None:
    if entry.is_dir(follow_symlinks=False):
        return True
    return False if entry.is_file(follow_symlinks=False) else None


def _remove_older(directory: str, than_s: float) -> None:
    """Remove files of ``directory`` that were last written before ``than_s``, seconds since the epoch. Failures are
    ignored: these files only take space."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < than_s:
                    os.unlink(entry.path)


def _refuse_late(deadline_s: float | None, key: str) -> None:
    if deadline_s is not None and time.monotonic() > deadline_s:
        raise UnansweredError(f"object {key} was not written in time, so that it was not created")


def _is_buffer(piece: Piece) -> bool:
    return not isinstance(piece, ObjectRange | FileRange)


def _link(source: str, target: str, *, follow: bool) -> None:
    """Give the file ``source`` the name ``target`` by a hard link. ``follow``: ``source`` is the link of a descriptor
    in /proc, as the file has no name."""
    if not follow:
        os.link(source, target)
        return
    # A directory descriptor makes Python call linkat() with AT_SYMLINK_FOLLOW, which names an anonymous file;
    # plain link() would link the /proc entry.
    directory = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(os.path.basename(source), target, src_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def _rename_noreplace(source: str, target: str) -> None:
    """Rename a file on a file system without hard links. Raises FileExistsError if ``target`` exists, and
    RefusedRequestError if the file system has no rename that fails then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        if number in _NO_NOREPLACE:
            raise RefusedRequestError(
                f"{target}: this file system has neither hard links nor renames that fail if the name exists, which "
                "keep two writers from replacing each other's objects",
                hint="use another file system, or S3",
            )
        raise OSError(number, os.strerror(number), target)
