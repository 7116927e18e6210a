"""Keeps pins within the disk limits while the dispatch loop does not run: before a writer has started, and during its
drain. Before the start the archived offset is unknown: nothing is released as archived, and nothing is pinned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.pins import PinKeeper
from tiered.errors import TieredError

Log = Callable[[str, dict[str, object]], None]


@contextmanager
def released_when_full(pins: PinKeeper | None, log: CommitLog, every_s: float, say: Log) -> Iterator[None]:
    """Release pins above the disk limits while the block runs; see ``maintained``."""
    if pins is None:
        yield
        return

    def step() -> None:
        log.refresh()
        pins.let_go([file for file in log.files if not file.is_pinned])

    with maintained(step, every_s, say):
        yield


@contextmanager
def maintained(step: Callable[[], None], every_s: float, say: Log) -> Iterator[None]:
    """Call ``step`` at once, then every ``every_s`` seconds while the block runs; failures go to ``say``."""
    ended = threading.Event()

    def try_step() -> None:
        try:
            step()
        except (TieredError, OSError) as error:
            say("pins not checked; the next check follows", {"error": str(error)})

    def watch() -> None:
        while not ended.wait(every_s):
            try_step()

    try_step()
    thread = threading.Thread(target=watch, name="pins", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
