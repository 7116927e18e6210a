"""A local file that is replaced as a whole: a reader sees the old or the new content, also after a power loss.

Owns the order of the steps. Does not own what a failure means: errors are OSErrors.
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_whole(path: Path, content: bytes | memoryview) -> None:
    """Write ``content`` beside ``path``, have it on disk, then give it the name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)
