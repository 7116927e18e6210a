"""Replaces a local file as a whole: readers see the old or the new content, even after a power loss."""

from __future__ import annotations

import os
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
    """Write and sync ``content`` beside ``path``, then rename it. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a crashed process with this id; never opened: it may be a link
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)


def file_error(error: OSError, path: Path) -> TieredError:
    """The error of a failed write to ``path``."""
    what = f"{path} cannot be written: {error.strerror}"
    if error.errno in FULL_ERRNOS:
        return StoreFullError(what, hint="free space there")
    if error.errno in DENIED_ERRNOS:
        return AccessDeniedError(what, hint=f"user {os.geteuid()} needs access to it")
    if isinstance(error, FileExistsError | NotADirectoryError | FileNotFoundError):
        return UsageError(what, hint="name a new directory")
    return UnavailableError(what)
