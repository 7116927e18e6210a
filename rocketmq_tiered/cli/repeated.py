"""``--every``: runs the work of a command as a task, again after each interval, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Callable

from tiered.archive.task import Due, TaskLoop
from tiered.catalog.state import CatalogState
from tiered.errors import UsageError
from tiered.settings.quantities import BadValueError, duration_ms

Work = Callable[[threading.Event], int]


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


def add_every(parser: argparse.ArgumentParser, verb: str) -> None:
    """``--apply`` and ``--every``: they ``verb``."""
    parser.add_argument("--apply", action="store_true", help=f"{verb} (default: list only)")
    parser.add_argument(
        "--every", metavar="DURATION", help=f"{verb} again after each DURATION, such as 24h, until stopped"
    )


def once_or_every(options: argparse.Namespace, what: str, work: Work) -> int:
    """Run ``work`` once, or with ``--every`` again and again until stopped; the event it gets is set then. Failures are
    logged, and the next run follows. Raises UsageError for a wrong duration, or without ``--apply``."""
    stopped = threading.Event()
    if options.every is None:
        return work(stopped)
    if not options.apply:
        raise UsageError(
            f"--every requires --apply: it repeats {what}",
            hint="add --apply, or remove --every",
        )
    loop = TaskLoop(_Command(what, _every_s(options.every), lambda: work(stopped)), CatalogState)

    def stop(*_: object) -> None:
        stopped.set()
        loop.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    loop.run()
    return 0


def _every_s(text: str) -> float:
    """The interval of ``--every`` in seconds; "forever" is a duration elsewhere, and an error here."""
    try:
        every_ms = duration_ms(text)
    except BadValueError as error:
        raise UsageError(f"--every {text} is not a duration", hint=str(error)) from None
    if every_ms is None:
        raise UsageError("--every forever never runs", hint='use a duration such as "24h"')
    return every_ms / 1000
