"""Marks in the state directory which archives have commits, so that an empty one is not started again.

An unmounted disk, an emptied bucket or a wrong one look like a new archive. A second archive started there would be
hidden once the disk is back. One file for each archive.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from tiered.errors import UnavailableError
from tiered.whole_file import replace_whole

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
            logger.warning("archive marker not written", extra={"problem": str(error)})

    def refuse_empty(self) -> None:
        """The archive has no commits. Raises UnavailableError if it is marked."""
        try:
            self.path.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnavailableError(f"{self.path}: {error.strerror or error}") from error
        raise UnavailableError(
            f"{self._url} is empty, but this sidecar has archived to it before",
            hint=f"check the disk's mount or the bucket's name; to start a new archive there, remove {self.path}",
        )
