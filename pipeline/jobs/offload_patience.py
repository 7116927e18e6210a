"""How long a bulk back-fill goes on against an object store that takes nothing: as long as ``tiered backfill`` does.

A catalog commit is tried until it is known what became of it, for ever if need be, as suits a process that follows a
broker; a job has somebody who waits for its exit code. Owns that bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tiered.errors import UnavailableError

POLL_S = 0.2
AGAIN = "the same command continues where it stopped"


def nothing_stored(patience_s: float, why: str) -> UnavailableError:
    """What is said in the end."""
    return UnavailableError(f"nothing stored for {patience_s:g} s: {why}", hint=AGAIN)


@contextmanager
def bounded(
    patience_s: float, waits_for: Callable[[], str], give_up: Callable[[UnavailableError], None]
) -> Iterator[None]:
    """Run the block, but not longer than ``patience_s`` after the object store began to refuse everything.

    ``waits_for``: what the block waits out, empty if nothing. ``give_up`` makes the block end. Raises UnavailableError
    when it did.
    """
    over = threading.Event()
    given_up: list[UnavailableError] = []

    def watch() -> None:
        since_s: float | None = None
        while not over.wait(POLL_S):
            why, now_s = waits_for(), time.monotonic()
            since_s = None if not why else now_s if since_s is None else since_s
            if since_s is not None and now_s - since_s >= patience_s:
                given_up.append(nothing_stored(patience_s, why))
                give_up(given_up[0])
                return

    watching = threading.Thread(target=watch, name="patience", daemon=True)
    watching.start()
    try:
        yield
    except UnavailableError as error:
        raise given_up[0] if given_up else error from None
    finally:
        over.set()
        watching.join()
