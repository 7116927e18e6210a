"""Caches a TLS context and reloads it when one of its files changes.

Certificates may live for days only, and a renewal must not require a restart. If files do not load (half
replaced, say), this is logged and the previous context stays in use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from tiered.errors import UsageError

logger = logging.getLogger(__name__)

Context = TypeVar("Context")


class TlsContextCache(Generic[Context]):
    """``load`` makes the context from the files ``paths``, empty ones skipped; ``purpose`` is for the log;
    ``on_reload`` is called after each reload with whether it succeeded. Raises what ``load`` raises. Not
    thread-safe."""

    def __init__(
        self,
        paths: Sequence[str],
        load: Callable[[], Context],
        purpose: str,
        on_reload: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._paths = [Path(path) for path in paths if path]
        self._load, self._purpose, self._on_reload = load, purpose, on_reload
        self._seen = self._stamps()
        self._context = load()

    def now(self) -> Context:
        """The context for a connection that is made now."""
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen = stamps
            try:
                self._context = self._load()
            except UsageError as error:
                logger.warning(
                    "changed certificates for %s do not load: the old ones stay in use",
                    self._purpose,
                    extra={"cause": str(error)},
                )
                self._on_reload(False)
            else:
                logger.info("certificates for %s reloaded", self._purpose)
                self._on_reload(True)
        return self._context

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
