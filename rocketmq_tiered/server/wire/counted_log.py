"""Logs what clients can cause again and again: the first time at once, then a line an interval with its count."""

import logging
import re
from dataclasses import dataclass
from typing import Final

from tiered.clock import MACHINE_CLOCK, Clock
from tiered.model.topic_names import shortened

INTERVAL_S: Final = 60.0
KINDS_MAX: Final = 20
"""Different texts, numbers aside, in one interval; further ones count as one."""
KIND_CHARS: Final = 80
TEXT_CHARS: Final = 400
"""The longest logged text, which clients may choose. The log escapes control characters."""
OTHERS: Final = "others"
_NUMBER: Final = re.compile(r"[0-9][0-9a-fA-F.:]*")


@dataclass
class _Kind:
    """The last text of a kind, and how many came since it was written."""

    level: int
    text: str
    client: str
    written_s: float
    count: int = 0


class CountedLog:
    """Belongs to one event loop."""

    def __init__(self, logger: logging.Logger, clock: Clock = MACHINE_CLOCK) -> None:
        self._logger, self._clock = logger, clock
        self._kinds: dict[str, _Kind] = {}

    def note(self, level: int, text: str, client: str) -> None:
        """Log ``text`` about ``client`` if none of its kind was logged in this interval, else count it. Texts are of
        one kind if they differ in numbers only."""
        text = shortened(text, TEXT_CHARS)
        name = _NUMBER.sub("#", text)[:KIND_CHARS]
        if name not in self._kinds and len(self._kinds) >= KINDS_MAX:
            name = OTHERS
        kind = self._kinds.get(name)
        if kind is None:
            self._kinds[name] = _Kind(level, text, client, self._clock.monotonic_s())
            self._logger.log(level, "%s", text, extra={"client": client})
        else:
            kind.level, kind.text, kind.client = level, text, client
            kind.count += 1

    def tick(self) -> None:
        """Called every few seconds: write the counts of past intervals."""
        now_s = self._clock.monotonic_s()
        for name, kind in list(self._kinds.items()):
            if now_s - kind.written_s >= INTERVAL_S:
                self._write(name, kind, now_s)

    def close(self) -> None:
        """Write all counts."""
        for name, kind in list(self._kinds.items()):
            self._write(name, kind, self._clock.monotonic_s())

    def _write(self, name: str, kind: _Kind, now_s: float) -> None:
        """Log the last text of a kind with the number of those that came since it was logged; a kind of which none came
        is dropped."""
        if not kind.count:
            del self._kinds[name]
            return
        extra = {"client": kind.client, "count": kind.count}
        self._logger.log(kind.level, "%s", kind.text, extra=extra)
        kind.count, kind.written_s = 0, now_s
