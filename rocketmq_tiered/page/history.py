"""Keeps the measurements of the last hour in memory, and the thread that takes them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

EVERY_S = 10.0
KEPT_S = 3600.0
COST_SHARE = 500
"""A measurement may take this part of the time between two, or the next one comes later."""
Measurement = Mapping[str, float | None]


class History:
    """Measurements by name. Thread-safe."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._kept: deque[tuple[float, Measurement]] = deque(maxlen=int(KEPT_S / EVERY_S))

    def add(self, measured: Measurement) -> None:
        """Keep ``measured`` as of now. A value of None is unknown."""
        self._kept.append((self._monotonic_s(), measured))

    def points(self, name: str) -> list[tuple[float, float]]:
        """(age in seconds, value) of one name, from old to new."""
        now_s = self._monotonic_s()
        return [
            (now_s - at_s, value)
            for at_s, measured in list(self._kept)
            if now_s - at_s <= KEPT_S and (value := measured.get(name)) is not None
        ]


class Sampler:
    """Adds ``measure()`` to ``history`` from the start on, every EVERY_S or less often if it takes long."""

    def __init__(self, history: History, measure: Callable[[], Measurement]) -> None:
        self._history, self._measure = history, measure
        self._stop = threading.Event()
        self._logged = ""
        threading.Thread(target=self._run, name="page-history", daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._stop.set()

    def _run(self) -> None:
        wait_s = 1.0
        while not self._stop.wait(wait_s):
            began_s = time.thread_time()
            self._sample()
            wait_s = max(EVERY_S, COST_SHARE * (time.thread_time() - began_s))

    def _sample(self) -> None:
        try:
            self._history.add(self._measure())
        except Exception as error:
            # The process may be starting or stopping: this measurement is missing then.
            if str(error) != self._logged:
                self._logged = str(error)
                logger.debug("the page has no values for this moment: %s", error)
