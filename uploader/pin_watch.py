"""Pins keep to the limits of the disk also while a writer cannot start (the archive is another's, or away) or end.

Beside a running writer the dispatch loop looks after them (follow_loop.py). Owns the thread that does before and after.
Before, what is archived is not known yet, so nothing is released for that, and no pin is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.pins import PinKeeper
from tiered.errors import TieredError


@contextmanager
def watched_pins(
    pins: PinKeeper | None, log: CommitLog, every_s: float, say: Callable[[str, dict[str, object]], None]
) -> Iterator[None]:
    """Of a writer that starts; see ``kept_up``."""
    if pins is None:
        yield
        return

    def look() -> None:
        log.refresh()
        pins.let_go([file for file in log.files if not file.is_pinned])

    with kept_up(look, every_s, say):
        yield


@contextmanager
def kept_up(
    look: Callable[[], None], every_s: float, say: Callable[[str, dict[str, object]], None]
) -> Iterator[None]:
    """``look`` at once and every ``every_s`` seconds while the block runs; nobody else may look meanwhile. ``say``
    takes a line for the log."""
    ended = threading.Event()

    def try_to_look() -> None:
        try:
            look()
        except (TieredError, OSError) as error:
            say("pins not looked at this time", {"error": str(error)})

    def watch() -> None:
        while not ended.wait(every_s):
            try_to_look()

    try_to_look()
    thread = threading.Thread(target=watch, name="pins", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
