"""``--every``: runs the work of a command as a task, again after each interval, until SIGTERM or SIGINT."""

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
    """The work of a command as a task of a TaskLoop. The work opens the archive itself, so that the loop's state is not
    used."""

    problem = ""

    def __init__(self, name: str, every_s: float, work: Callable[[], object]) -> None:
        self.name, self.due, self._work = name, Due(every_s), work

    def plan(self, state: CatalogState) -> CatalogState:
        return state

    def step(self, _state: CatalogState, _plan: CatalogState) -> bool:
        self._work()
        return False


def add_every(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add ``--apply`` and ``--every``. ``verb`` says in the help what the command does with them."""
    parser.add_argument(
        "--apply", action="store_true", help=f"{verb} (default: only print what would be done)"
    )
    parser.add_argument(
        "--every",
        metavar="DURATION",
        help=f"with --apply: {verb} again after each DURATION, such as 24h, until SIGTERM or Ctrl-C",
    )


def once_or_every(options: argparse.Namespace, what: str, work: Work) -> int:
    """Run ``work`` once and return its exit code; with ``--every`` run it after each interval, until SIGTERM or SIGINT,
    and return 0. A signal sets the event that ``work`` gets. With ``--every`` a failure is logged, and ``work`` runs
    again after the next interval. ``what`` names the work in the log. Raises UsageError for ``--every`` without
    ``--apply``, or with a wrong duration."""
    stopped = threading.Event()
    if options.every is None:
        return work(stopped)
    if not options.apply:
        raise UsageError(
            f"--every requires --apply, as it repeats the {what}",
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
    """The interval of ``--every`` in seconds. Raises UsageError for a text that is no duration, and for "forever",
    which is one in settings."""
    try:
        every_ms = duration_ms(text)
    except BadValueError as error:
        raise UsageError(f"--every {text} is not a duration", hint=str(error)) from None
    if every_ms is None:
        raise UsageError("--every forever would never run again", hint='use a duration such as "24h"')
    return every_ms / 1000
