"""What admin pages of servers on an event loop share: its beat, findings in the log, and metrics.

Owns health.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import Metric

from rocketmq_tiered.process.findings import Finding
from rocketmq_tiered.process.metrics import registry_of
from tiered.clock import Clock

logger = logging.getLogger(__name__)

BEAT_S: Final = 1.0
STALLED_S: Final = 10.0
"""Without a beat for so long, the event loop is held up or has ended."""


class EventLoopSource:
    """The admin pages of an event loop. ``beat`` runs on the event loop, the pages in the admin server's threads."""

    def __init__(self, clock: Clock, *families: Callable[[], Iterable[Metric]]) -> None:
        """``families`` make the metrics of the server, which are shown beside those of the process (memory, CPU)."""
        self._clock = clock
        self._beaten_s = clock.monotonic_s()
        self._logged: set[str] = set()
        self._registry = registry_of(*families)

    def findings(self) -> list[Finding]:
        """What an operator should look at."""
        raise NotImplementedError

    def is_serving(self) -> bool:
        """Whether it has started."""
        return True

    async def beat(self) -> None:
        """Run on the event loop until cancelled: note each second that the loop runs, which ``health`` looks at from
        another thread, and log each problem of ``findings`` when it appears."""
        while True:
            self._beaten_s = self._clock.monotonic_s()
            findings = {finding.what: finding for finding in self.findings()}
            for what in findings.keys() - self._logged:
                logger.error("attention: %s", what, extra={"about": findings[what].about})
            self._logged = set(findings)
            await asyncio.sleep(BEAT_S)

    def health(self) -> tuple[bool, str]:
        """The answer of /health: whether the event loop has run lately, and a text that says so."""
        silent_s = self._clock.monotonic_s() - self._beaten_s
        if silent_s > STALLED_S:
            return False, f"no request has been served for {silent_s:.0f} s: the event loop is held up"
        return True, "serving" if self.is_serving() else "starting"

    def metrics(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
