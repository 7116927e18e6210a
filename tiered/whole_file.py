"""Replaces a local file as a whole: readers see the old or the new content, even after a power loss."""

import os
from collections.abc import Callable
from pathlib import Path

from tiered.errors import (
    DENIED_ERRNOS,
    FULL_ERRNOS,
    AccessDeniedError,
    StoreFullError,
    TieredError,
    UnavailableError,
    UsageError,
)


def replace_whole(path: Path, content: bytes | memoryview) -> None:
    """Replace the file ``path`` by ``content``, durably: it is written to another file, which is then renamed, so that
    readers never see a part of it. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a crashed process with this id; never opened: it may be a link
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def save_whole(path: Path, content: bytes | memoryview) -> None:
    """``replace_whole`` for a file that the user named. Raises what ``file_error`` returns."""
    try:
        replace_whole(path, content)
    except OSError as error:
        raise file_error(error, path) from error


def writer_of(path: Path) -> Callable[[bytes], None]:
    """A function that replaces the file ``path`` by the content that it is given. It raises UnavailableError if that
    fails."""

    def write(content: bytes) -> None:
        try:
            replace_whole(path, content)
        except OSError as error:
            raise UnavailableError(f"cannot write {path}: {error.strerror}") from error

    return write


def sync_directory(directory: str | Path) -> None:
    """Make the names in ``directory`` durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_error(error: OSError, path: Path) -> TieredError:
    """The error of tiered.errors for a failed write to the local file or directory ``path``, with what to do."""
    what = f"{path} cannot be written: {error.strerror}"
    if error.errno in FULL_ERRNOS:
        return StoreFullError(what, hint=f"free space on the disk of {path}")
    if error.errno in DENIED_ERRNOS:
        return AccessDeniedError(what, hint=f"give user {os.geteuid()} permission to write there")
    if isinstance(error, FileExistsError | NotADirectoryError | FileNotFoundError):
        return UsageError(what, hint="name another directory, which is new or empty")
    return UnavailableError(what)
