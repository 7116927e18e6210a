"""The state directory of one running instance: its lock, its identity, its admin address.

Owns the files `lock`, `instance.id` and `instance.json`. Deleting the directory, which also holds pins and archive
markers, loses nothing of the archive; the new identity must take the archive over.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType

import orjson

from tiered.errors import (
    AccessDeniedError,
    CatalogLostError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from tiered.private_directory import is_own, log_exposed_parent, make_private
from tiered.whole_file import replace_whole, save_whole

NEW_ARCHIVE = "to begin a new archive there, start once with --new-archive"

logger = logging.getLogger(__name__)


class ArchiveMarker:
    """The marker of the archive at ``url``, which includes cluster and broker."""

    def __init__(self, state_dir: Path, url: str) -> None:
        self._url = url
        # A file name for each URL; the URL itself is the file's content.
        self.path = state_dir / f"begun-{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def create(self) -> None:
        """Note in the state directory that this archive has commits, so that a later start does not take an empty
        bucket for a new archive. A failure is only logged: archiving continues without the note."""
        try:
            if not self.path.exists():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_whole(self.path, f"{self._url}\n".encode())
        except OSError as error:
            logger.warning(
                "%s cannot be written, so a later start will not know that archive %s exists: %s",
                self.path,
                self._url,
                error,
            )

    def refuse_empty(self) -> None:
        """Called when the archive has neither commits nor objects. Raises CatalogLostError if this instance has
        archived to it before, as its disk may come back, and UsageError if this instance has archived the same broker
        to another URL, as the new one may be a mistake. Returns if a new archive may begin."""
        try:
            url_by_marker = {
                path: path.read_text("utf-8").strip() for path in self.path.parent.glob("begun-*")
            }
        except OSError as error:
            raise UnavailableError(
                f"cannot read {self.path.parent}: {error.strerror or error}",
                hint="let this user read the directory, or set process.state_dir to another one",
            ) from error
        if self.path in url_by_marker:
            raise CatalogLostError(
                f"{self._url} is empty, without catalog and objects, but this sidecar has archived to it before",
                hint="mount its disk, correct archive.url, or restore the bucket's earlier versions; there is nothing "
                f"for tiered repair; {NEW_ARCHIVE}",
            )
        names = self._url.rsplit("/", 2)[1:]  # the URL ends in cluster and broker
        others = sorted(url for url in url_by_marker.values() if url.rsplit("/", 2)[1:] == names)
        if others:
            raise UsageError(
                f"{self._url} is empty, and this sidecar has archived to {others[0]} before",
                hint=f"check archive.url; {NEW_ARCHIVE}",
            )


LOCK_FILE = "lock"
IDENTITY_FILE = "instance.id"
DESCRIPTION_FILE = "instance.json"
LINKS = "elsewhere"
"""Links to other state directories."""


@dataclass(frozen=True)
class InstanceDescription:
    """The description of a running instance."""

    pid: int
    admin_url: str
    archive_url: str
    cluster: str
    broker: str
    store_path: str
    started_ms: int
    state_dir: str = field(default="", compare=False)
    """Where it was found; empty in the directory itself."""


class StateDirectory:
    """A locked state directory, as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # errors of its files name them so, wherever this process was started
        self._lock_fd = -1
        self._link: Path | None = None

    def __enter__(self) -> StateDirectory:
        """Make the directory, and lock it for this process: a second instance with the same directory would use the
        same id and the same hard links to commitlog files. Raises UsageError if another process has the lock, and
        AccessDeniedError if the directory cannot be used."""
        try:
            make_private(self.path, "process.state_dir")
            log_exposed_parent(self.path)
            self._lock_fd = _open_lock(self.path / LOCK_FILE)
        except OSError as error:
            raise AccessDeniedError(
                f"cannot create state directory {self.path}: {error.strerror}",
                hint="set process.state_dir to a directory that this user can write",
            ) from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise UsageError(
                f"another instance uses state directory {self.path}",
                hint="stop the other instance, or set process.state_dir to another directory",
            ) from None
        except OSError as error:  # a network file system without locks
            os.close(self._lock_fd)
            raise AccessDeniedError(
                f"cannot lock state directory {self.path}: {error.strerror}",
                hint="set process.state_dir to a local disk",
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the description file and its link, so that no command looks for this instance any more. The lock is
        released in any case."""
        try:
            (self.path / DESCRIPTION_FILE).unlink(missing_ok=True)
            if self._link is not None:
                self._link.unlink(missing_ok=True)
        except OSError as failure:  # a disk that became read-only; without the lock the file is ignored
            logger.warning("%s cannot be removed at the end of this process: %s", DESCRIPTION_FILE, failure)
        finally:
            os.close(self._lock_fd)

    def identity(self) -> str:
        """The id of this instance, made at its first start and kept in a file of the state directory, so that it is
        the same after a restart. Raises AccessDeniedError if the file cannot be read or written."""
        path = self.path / IDENTITY_FILE
        try:
            known = path.read_bytes().decode("ascii").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            known = ""
        except OSError as error:
            raise AccessDeniedError(f"cannot read {path}: {error.strerror}") from None
        if known and known.isprintable():  # a file system that lost power may leave zeros
            return known
        fresh = secrets.token_hex(8)
        save_whole(path, fresh.encode())
        return fresh

    def describe(self, description: InstanceDescription, root: Path | None = None) -> None:
        """Write the description of this instance into its state directory, for commands on this host. They search
        below ``root``; a state directory that is elsewhere gets a symbolic link there."""
        save_whole(self.path / DESCRIPTION_FILE, orjson.dumps(asdict(description)))
        own = self.path.resolve()
        if root is None or own.is_relative_to(root.resolve()):
            return
        link = root / LINKS / hashlib.sha256(os.fsencode(own)).hexdigest()[:16]
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(own)
            self._link = link
        except OSError as error:
            # Commands can still be given the directory.
            logger.debug("state directory %s is not linked below %s: %s", own, root, error)


def backfill_instance(store: str) -> str:
    """The id of a backfill of ``store``: stable on one host, so that a killed backfill can be repeated at once."""
    place = f"{os.uname().nodename}\0{Path(store).absolute()}"
    return f"backfill-{hashlib.sha256(place.encode()).hexdigest()[:16]}"


def default_state_dir(environment: Mapping[str, str], cluster: str, broker: str) -> Path:
    """``$XDG_STATE_HOME/rocketmq-tiered/<cluster>/<broker>``."""
    return state_root(environment) / _path_component(cluster) / _path_component(broker)


def state_root(environment: Mapping[str, str]) -> Path:
    """The directory below which default state directories are."""
    base = environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "rocketmq-tiered"


def running_instance(path: Path) -> InstanceDescription:
    """The description of the running instance whose state directory is ``path``. Raises NotFoundError when none runs
    there, which the lock file tells: a running instance holds its lock."""
    none_runs = NotFoundError(f"no instance uses state directory {path}", hint="start one with tiered run")
    try:
        with (path / LOCK_FILE).open("rb") as lock:
            if _can_lock(lock.fileno()):
                raise none_runs
        description = InstanceDescription(**orjson.loads((path / DESCRIPTION_FILE).read_bytes()))
        return replace(description, state_dir=str(path.resolve()))
    except (FileNotFoundError, NotADirectoryError):
        raise none_runs from None
    except PermissionError as error:
        raise AccessDeniedError(
            f"cannot read {error.filename}", hint="run this command as the user of the instance"
        ) from None


def running_instances(root: Path) -> list[InstanceDescription]:
    """The descriptions of all running instances whose state directory is below ``root`` or linked there, except for
    those that this user may not read."""
    found = []
    for description in sorted(root.glob(f"*/*/{DESCRIPTION_FILE}")):
        try:
            found.append(running_instance(description.parent))
        except (NotFoundError, AccessDeniedError):
            continue
    return found


def _open_lock(path: Path) -> int:
    """Open the lock file, or create it so that only this user can open it, and return its descriptor. Raises
    AccessDeniedError if something else is in its place: a link planted by another user could make this process
    change a file elsewhere. Other failures raise OSError."""
    # Without O_NONBLOCK opening a named pipe would wait.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):  # a symbolic link, a directory
            raise
        raise _not_a_lock(path) from None
    status = os.fstat(fd)
    has_other_names = status.st_nlink != 1
    if not stat.S_ISREG(status.st_mode) or has_other_names or not is_own(status):
        os.close(fd)
        raise _not_a_lock(path)
    os.fchmod(fd, 0o600)
    return fd


def _not_a_lock(path: Path) -> AccessDeniedError:
    return AccessDeniedError(
        f"lock file {path} is a link, no regular file, or another user's file", hint="remove it"
    )


def _can_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _path_component(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):02x}" for c in name) or "%"
