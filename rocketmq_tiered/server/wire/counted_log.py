"""Logs what clients can cause again and again: the first time at once, then a line an interval with its count."""

from __future__ import annotations

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
"""Of a text, which clients may choose. The log escapes control characters."""
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
        """Log ``text`` about ``client``, or count it."""
        text = shortened(text, TEXT_CHARS)
        kind = _NUMBER.sub("#", text)[:KIND_CHARS]
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            kind = OTHERS
        found = self._kinds.get(kind)
        if found is None:
            self._kinds[kind] = _Kind(level, text, client, self._clock.monotonic_s())
            self._logger.log(level, "%s", text, extra={"client": client})
        else:
            found.level, found.text, found.client = level, text, client
            found.count += 1

    def tick(self) -> None:
        """Called every few seconds: write the counts of past intervals."""
        now_s = self._clock.monotonic_s()
        for kind, found in list(self._kinds.items()):
            if now_s - found.written_s >= INTERVAL_S:
                self._write(kind, found, now_s)

    def close(self) -> None:
        """Write all counts."""
        for kind, found in list(self._kinds.items()):
            self._write(kind, found, self._clock.monotonic_s())

    def _write(self, kind: str, found: _Kind, now_s: float) -> None:
        if not found.count:
            del self._kinds[kind]
            return
        extra = {"client": found.client, "count": found.count}
        self._logger.log(found.level, "%s", found.text, extra=extra)
        found.count, found.written_s = 0, now_s
