"""Detects changes of a directory's entries with one stat.

Queues are directories, and a broker may have 100,000: listing all of them repeatedly would cost more than following
the log. A directory's mtime changes whenever an entry is added or removed, but only as fine as the kernel's clock
ticks; so one that changed a moment ago counts as changed until it has been quiet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

QUIET_NS: Final = 2_000_000_000

_Token = tuple[int, int, int] | None


class DirectoryChanges:
    """State of every directory at the last check. ``now_ns``: the wall clock, as on file timestamps."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._seen: dict[Path, _Token] = {}

    def has_changed(self, directory: Path) -> bool:
        """Whether it may have changed since the last call; True on the first. A directory missing both times has not
        changed."""
        token = _token(directory)
        is_known = directory in self._seen and self._seen[directory] == token
        if token is not None and self._now_ns() - token[2] < QUIET_NS:
            self._seen.pop(directory, None)
        else:
            self._seen[directory] = token
        return not is_known


def _token(directory: Path) -> _Token:
    try:
        status = os.stat(directory)
    except OSError:
        # Listing it reports the error.
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns
