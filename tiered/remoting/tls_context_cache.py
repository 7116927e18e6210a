"""A TLS context for connections that are made now: loaded again when one of its files changes.

Certificates may live for days only, and nobody restarts anything for the next one. Files that do not load (one of two
has been written, say) are reported, and what was loaded before stays in use. Owns looking and that rule; not what a
context is made of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from tiered.errors import UsageError

logger = logging.getLogger(__name__)

Context = TypeVar("Context")


class KeptContext(Generic[Context]):
    """``load`` makes it of the files ``paths``, empty ones left out; ``purpose`` is for the log. Raises what ``load``
    raises. Not thread-safe."""

    def __init__(self, paths: Sequence[str], load: Callable[[], Context], purpose: str) -> None:
        self._paths = [Path(path) for path in paths if path]
        self._load, self._purpose = load, purpose
        self._seen = self._stamps()
        self._context = load()

    def now(self) -> Context:
        """For the connection that is made now."""
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen = stamps
            try:
                self._context = self._load()
            except UsageError as error:
                logger.warning(
                    "certificates for %s changed and cannot be used: the old ones stay",
                    self._purpose,
                    extra={"cause": str(error)},
                )
            else:
                logger.info("certificates for %s read anew", self._purpose)
        return self._context

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
