"""Keeps the last figures of a report that were known, in memory and in the state directory.

During an outage, before the first look at the archive, and while a log diverges, lag, retention margin and the counts
of the catalog are not known. Status, page and metrics then show the last ones with their age, never zeros.
"""

import contextlib
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson

from rocketmq_tiered.process.report import StatusReport, decode_report, encode_report
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.whole_file import replace_whole

logger = logging.getLogger(__name__)

FILE: Final = "figures.json"
SAVED_EVERY_MS: Final = 30_000
KEPT: Final = (
    "archive_url",
    "cluster",
    "broker",
    "committed_phys",
    "bound_phys",
    "bound_reason",
    "lag_messages",
    "is_lag_estimated",
    "lag_bytes",
    "lag_seconds",
    "retention_margin_seconds",
    "deletion_zone",
    "short_retention_margin_seconds",
    "gaps",
    "set_aside_messages",
    "unindexed_objects",
    "pending_deletions",
    "oldest_pending_deletion_seconds",
    "garbage_overdue_seconds",
    "gc_interval_seconds",
    "diverged_objects",
    "hidden_messages",
)
"""Members of a report that are known together."""


class KnownFigures:
    """The last known figures of the archive ``place``: its URL, cluster and broker. Thread-safe."""

    def __init__(self, directory: Path, place: tuple[str, str, str], *, clock: Clock = MACHINE_CLOCK) -> None:
        """Load the figures that an earlier process left in ``directory``; without any if the file is missing,
        unreadable or of another archive."""
        self._path, self._clock = directory / FILE, clock
        self._lock = threading.Lock()
        self._last, self._known_ms = StatusReport(), 0
        self._saved_ms = 0
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            document = orjson.loads(self._path.read_bytes())
            found = decode_report(document["report"])
            if (found.archive_url, found.cluster, found.broker) == place:
                self._last, self._known_ms = found, int(document["knownMs"])

    def completed(self, report: StatusReport) -> StatusReport:
        """``report`` as it is if its lag is known: its figures are then the last known ones, saved every half minute.
        Otherwise ``report`` with the last known figures and their age, if there are any."""
        now_ms = self._clock.wall_ms()
        with self._lock:
            if report.lag_bytes is not None:
                self._last, self._known_ms = report, now_ms - round(report.measured_seconds * 1000)
                if abs(now_ms - self._saved_ms) >= SAVED_EVERY_MS:
                    self._saved_ms = now_ms
                    self._save()
                return report
            if not self._known_ms:
                return report
            return replace(report, **self._aged(max(0, now_ms - self._known_ms) / 1000))

    def _aged(self, age_s: float) -> dict[str, Any]:
        """The last known members of a report as they are ``age_s`` later: messages that were not archived are older,
        and the time until the broker deletes them is shorter."""
        found = {name: getattr(self._last, name) for name in KEPT} | {"measured_seconds": age_s}
        if self._last.lag_bytes and self._last.lag_seconds is not None:
            found["lag_seconds"] = self._last.lag_seconds + age_s
        if self._last.retention_margin_seconds is not None:
            found["retention_margin_seconds"] = max(0.0, self._last.retention_margin_seconds - age_s)
        return found

    def _save(self) -> None:
        head = StatusReport(**{name: getattr(self._last, name) for name in KEPT})
        content = b'{"knownMs":%d,"report":%s}' % (self._known_ms, encode_report(head).strip())
        try:
            replace_whole(self._path, content)
        except OSError as error:  # a full disk: they are known in memory
            logger.debug("the last figures are not saved in %s: %s", self._path, error)
