"""That an archive was begun, remembered in the state directory: an archive that is empty then is none to begin.

Below the mount point of a disk that is not mounted everything looks as on the first day, and so does a bucket that was
emptied, or is another one by mistake. What were begun there would be a second archive, hidden when the disk is back.

Owns one file for each archive. Does not own when it is looked at (uploader/archive_owner.py).
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from tiered.errors import UnavailableError
from tiered.whole_file import replace_whole

logger = logging.getLogger(__name__)


class ArchiveMarker:
    """The archive at ``url``, which names cluster and broker too."""

    def __init__(self, state_dir: Path, url: str) -> None:
        self._url = url
        self.path = state_dir / f"begun-{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def create(self) -> None:
        """It has commits."""
        try:
            if not self.path.exists():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_whole(self.path, f"{self._url}\n".encode())
        except OSError as error:  # archiving does not wait for that
            logger.warning("not remembered that the archive was begun", extra={"problem": str(error)})

    def refuse_empty(self) -> None:
        """It has no commits. Raises UnavailableError when it had."""
        try:
            self.path.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnavailableError(f"{self.path}: {error.strerror or error}") from error
        raise UnavailableError(
            f"{self._url} is empty, but this sidecar has archived there before",
            hint="is its disk mounted, or its bucket another one? "
            f"To begin a new archive there all the same, remove {self.path}",
        )
