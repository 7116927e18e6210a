"""``--every``: runs the work of a command again after each interval, until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

from tiered.errors import TieredError, UsageError
from tiered.settings.quantities import BadValueError, duration_ms

logger = logging.getLogger(__name__)


def repeat(every: str, what: str, work: Callable[[threading.Event], object]) -> int:
    """Run ``work`` every ``every``, such as 24h, until stopped; the event it gets is set then. A TieredError is logged
    as a failure of ``what``, and the next run follows. Raises UsageError for a wrong duration."""
    every_s = _every_s(every)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    while not stopped.is_set():
        try:
            work(stopped)
        except TieredError as error:
            logger.error("%s failed, the next one is in %s: %s", what, every, error)
        stopped.wait(every_s)
    return 0


def _every_s(text: str) -> float:
    try:
        every_ms = duration_ms(text)
    except BadValueError as error:
        raise UsageError(f"--every {text} is not a duration", hint=str(error)) from None
    if every_ms is None:
        raise UsageError("--every forever never runs", hint='use a duration such as "24h"')
    return every_ms / 1000
