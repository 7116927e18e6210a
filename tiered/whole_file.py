"""Replaces a local file as a whole: readers see the old or the new content, even after a power loss. Raises OSError."""

from __future__ import annotations

import os
from pathlib import Path


def replace_whole(path: Path, content: bytes | memoryview) -> None:
    """Write and sync ``content`` beside ``path``, then rename it."""
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
