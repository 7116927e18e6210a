"""``--every``: runs the work of a command as a task, again after each interval, until SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from tiered.archive.task import Due, TaskLoop
from tiered.catalog.state import CatalogState
from tiered.errors import UsageError
from tiered.settings.quantities import BadValueError, duration_ms

Work = Callable[[threading.Event], object]


class _Command:
    """Opens the archive itself: its state is not the loop's."""

    problem = ""

    def __init__(self, name: str, every_s: float, work: Callable[[], object]) -> None:
        self.name, self.due, self._work = name, Due(every_s), work

    def plan(self, state: CatalogState) -> CatalogState:
        return state

    def step(self, _state: CatalogState, _plan: CatalogState) -> bool:
        self._work()
        return False


def repeat(every: str, what: str, work: Work) -> int:
    """Run ``work`` every ``every``, such as 24h, until stopped; the event it gets is set then. Failures are logged, and
    the next run follows. Raises UsageError for a wrong duration."""
    stopped = threading.Event()
    loop = TaskLoop(_Command(what, _every_s(every), lambda: work(stopped)), CatalogState)

    def stop(*_: object) -> None:
        stopped.set()
        loop.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    loop.run()
    return 0


def _every_s(text: str) -> float:
    try:
        every_ms = duration_ms(text)
    except BadValueError as error:
        raise UsageError(f"--every {text} is not a duration", hint=str(error)) from None
    if every_ms is None:
        raise UsageError("--every forever never runs", hint='use a duration such as "24h"')
    return every_ms / 1000
