"""Retries requests while the object store is unavailable, with exponential backoff, until aborted.

Reports the reason: a store may accept data but no commits. The caller handles unanswered PUTs.
"""

import logging
import random as random_module
import threading
from collections.abc import Callable
from typing import TypeVar

from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StoreRetry:
    """The retries of one actor. ``wait`` is for tests; ``random`` gives the jitter."""

    def __init__(
        self,
        limits: CatalogLimits,
        random: random_module.Random,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """``wait`` sleeps for seconds between tries; the default one ends at once when the retries are aborted."""
        self._limits = limits
        self._random = random
        self.retry_reason = ""
        """The last error; empty when nothing is retried."""
        self._aborted = threading.Event()
        self._wait = wait or self._aborted.wait

    def abort(self) -> None:
        """Stop all retries, now and from now on. May be called from any thread."""
        self._aborted.set()

    def call(self, request: Callable[[], T]) -> T:
        """The result of ``request``, which is repeated while the store is unavailable and must be idempotent. Raises
        UnavailableError once ``abort`` was called, and every other error at once."""
        failures = 0
        while True:
            try:
                result = request()
            except UnavailableError as error:
                failures += 1
                self.back_off(failures, error)
            else:
                self.retry_reason = ""
                return result

    def back_off(self, failures: int, cause: UnavailableError) -> None:
        """Log ``cause``, and wait before the next try: longer, and with jitter, the more ``failures`` (1 or more) there
        were in a row. Raises ``cause`` instead once ``abort`` was called."""
        if self._aborted.is_set():
            raise cause
        self.retry_reason = str(cause)
        logger.warning(
            "a request to the object store for the catalog failed and is tried again",
            extra={"error": str(cause), "failures": failures},
        )
        ceiling_s = min(self._limits.backoff_s_max, self._limits.backoff_s_first * 2 ** min(failures - 1, 16))
        self._wait(ceiling_s * (0.5 + self._random.random() / 2))
        if self._aborted.is_set():
            raise cause
