"""Marks in the state directory which archives have commits, so that another one is not begun by mistake.

An unmounted disk, an emptied bucket and a mistyped URL look like a new archive. Messages would be in two archives, and
one begun below a mount point would be hidden once the disk is back. One file for each archive.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from tiered.errors import UnavailableError, UsageError
from tiered.whole_file import replace_whole

NEW_ARCHIVE = "to begin a new archive there, start once with --new-archive"

logger = logging.getLogger(__name__)


class ArchiveMarker:
    """The marker of the archive at ``url``, which includes cluster and broker."""

    def __init__(self, state_dir: Path, url: str) -> None:
        self._url = url
        self.path = state_dir / f"begun-{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def create(self) -> None:
        """Mark the archive: it has commits."""
        try:
            if not self.path.exists():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_whole(self.path, f"{self._url}\n".encode())
        except OSError as error:  # archiving does not wait for that
            logger.warning(
                "state directory not written: a later start does not know that this archive exists",
                extra={"problem": str(error)},
            )

    def refuse_empty(self) -> None:
        """The archive has no commits. Raises UnavailableError if this state directory marks it: its disk may come
        back. Raises UsageError if it marks another one of the same broker."""
        try:
            marked = {path: path.read_text("utf-8").strip() for path in self.path.parent.glob("begun-*")}
        except OSError as error:
            raise UnavailableError(f"{self.path}: {error.strerror or error}") from error
        if self.path in marked:
            raise UnavailableError(
                f"{self._url} is empty, but this sidecar has archived to it before",
                hint=f"check the disk's mount or the bucket's name; {NEW_ARCHIVE}",
            )
        names = self._url.rsplit("/", 2)[1:]
        others = sorted(url for url in marked.values() if url.rsplit("/", 2)[1:] == names)
        if others:
            raise UsageError(
                f"{self._url} is empty, and this sidecar has archived to {others[0]} before",
                hint=f"check archive.url; {NEW_ARCHIVE}",
            )
