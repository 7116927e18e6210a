"""Directories and files that this process trusts: state, pins, caches; secrets and rules. No other user may change
them, or read what it makes.

A directory that belongs to another user or that others can write to is refused: what is in it may be planted. Root is
trusted.
"""

import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from tiered.errors import AccessDeniedError, UsageError

logger = logging.getLogger(__name__)

PRIVATE = 0o700
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(directory: Path, setting: str) -> None:
    """Make ``directory`` so that only this user can use it (mode 0700), with missing parents; an existing one of this
    user gets this mode. Raises AccessDeniedError if another user owns it or may write to it, naming the ``setting``
    that chooses another, and OSError."""
    _make(directory)
    fd = _open_checked(directory, setting)
    try:
        status = os.fstat(fd)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & ~PRIVATE & 0o777:
            os.fchmod(fd, PRIVATE)
    finally:
        os.close(fd)


def check_private(directory: Path, setting: str) -> None:
    """Like ``make_private``, for a directory with other contents: its mode stays, and others may read it."""
    os.close(_open_checked(directory, setting))


def private_temporary(parent: Path, prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A new directory below ``parent``, which is made if it is missing and may be shared, as /tmp. Raises OSError."""
    _make(parent)
    log_exposed_parent(parent / prefix)
    return tempfile.TemporaryDirectory(prefix=prefix, dir=parent)


def check_files(directory: Path, setting: str) -> None:
    """Check that all files below a private ``directory`` are of this user or root: others may have put files there
    before it was private. Raises AccessDeniedError for one that is not, and OSError."""
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = Path(parent, name)
            with suppress(FileNotFoundError):  # another process replaces it
                if not is_own(path.lstat()):
                    raise AccessDeniedError(
                        f"{path} may be written by another user, so that it is not used",
                        hint=f"remove {directory}, or set {setting} to another directory",
                    )


def is_own(status: os.stat_result) -> bool:
    """Whether only this user or root can have written a file; a symbolic link is none."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & stat.S_IWOTH


def check_trusted_file(path: Path, setting: str, *, is_secret: bool = True) -> None:
    """Check a file with secrets, rules or trusted certificates before it is read; a secret that other users can read is
    logged. Raises UsageError for one that they can write, or that is not a regular file, and OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{setting} = {path} is not a regular file", hint=f"set {setting} to a file")
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"{setting} = {path} can be written by other users ({mode})",
            hint=f"check its content, then run chmod 600 {path}",
        )
    if is_secret and status.st_mode & stat.S_IROTH:
        logger.warning(
            "the secret file %s = %s can be read by other users (%s): run chmod 600 %s",
            setting,
            path,
            mode,
            path,
        )


def log_exposed_parent(directory: Path) -> None:
    """Log it if another user could replace ``directory``, as a directory above it is open to others. If one does, its
    next opening is refused."""
    if exposed := exposed_parent(directory):
        logger.warning(
            "other users can write to %s, and so replace %s below it: forbid that, or use another directory",
            exposed,
            directory,
        )


def exposed_parent(directory: Path) -> Path | None:
    """The nearest parent in which another user could replace ``directory``, if there is one. A sticky one is none, as
    /tmp; groups are trusted here: the host's administrator chose them. Raises OSError."""
    real = Path(os.path.realpath(directory))
    return next((parent for parent in real.parents if not _keeps_entries(parent.stat())), None)


def _keeps_entries(status: os.stat_result) -> bool:
    is_open = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    return not is_open and status.st_uid in (0, os.geteuid())


def _make(directory: Path) -> None:
    """Make ``directory`` and those above it that do not exist, each with access for this user only."""
    try:
        os.mkdir(directory, PRIVATE)
    except FileNotFoundError:
        _make(directory.parent)
        with suppress(FileExistsError):  # another process was faster
            os.mkdir(directory, PRIVATE)
    except FileExistsError:
        return


def _open_checked(directory: Path, setting: str) -> int:
    """Open ``directory`` and return its descriptor. Raises AccessDeniedError if another user owns it, may write to it,
    or has made a symbolic link on its path, naming the ``setting`` that chooses another directory; and OSError."""
    user = os.geteuid()
    for step in (directory, *directory.parents):
        if step.is_symlink() and (owner := step.lstat().st_uid) not in (0, user):
            raise AccessDeniedError(
                f"{step} is a symbolic link of user {owner}, who can make it lead elsewhere",
                hint=f"remove the link, or set {setting} to another directory",
            )
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    refusal = _refusal(directory, os.fstat(fd), user, setting)
    if refusal is not None:
        os.close(fd)
        raise refusal
    return fd


def _refusal(directory: Path, status: os.stat_result, user: int, setting: str) -> AccessDeniedError | None:
    """The error for a directory that another user owns or may write to, with the command that helps; None if it may
    be used."""
    if status.st_uid not in (0, user):
        return AccessDeniedError(
            f"{directory} belongs to user {status.st_uid}, who can change the files in it",
            hint=f"check its files, then run chown {user} {directory}, or set {setting} to another directory",
        )
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return AccessDeniedError(
            f"{directory} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"check its files, then run chmod 700 {directory}, or set {setting} to another directory",
        )
    return None
