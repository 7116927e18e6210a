"""Values made of files, which are loaded again when one of the files changes: certificates and access rules."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from tiered.errors import UsageError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ReloadedFiles(Generic[T]):
    """A value that is loaded from files, and again when one of them has changed, because certificates may live for days
    only and a renewal must not require a restart. Files that do not load, such as half replaced ones, are logged, and
    the previous value stays in use. Not thread-safe."""

    def __init__(
        self,
        paths: Sequence[str],
        load: Callable[[], T],
        what: str,
        on_reload: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Load the value at once, so that wrong files are an error at the start. ``load`` makes it from the files
        ``paths``, empty ones skipped; ``what`` names it in the log; ``on_reload`` is called after each reload with
        whether it succeeded. Raises what ``load`` raises."""
        self._paths = [Path(path) for path in paths if path]
        self._load, self._what, self._on_reload = load, what, on_reload
        self._seen = self._stamps()
        self._value = load()

    def now(self) -> T:
        """The value at this moment, loaded again if a file has changed. If changed files do not load, that is logged
        and the value stays as it was."""
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen = stamps
            try:
                self._value = self._load()
            except UsageError as error:
                logger.error(
                    "the changed %s cannot be loaded, so that the old ones stay in use: %s", self._what, error
                )
                self._on_reload(False)
            else:
                logger.info("%s reloaded", self._what)
                self._on_reload(True)
        return self._value

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
