"""Catches SIGHUP between the start of a process and the service's own handler.

The default action ends the process. The settings may have been read already, so an early SIGHUP must still reload them.
"""

from __future__ import annotations

import signal


class EarlySighup:
    """The handler before the service's own; counts as received once called."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, *_: object) -> None:
        """Note the signal."""
        self.received = True


def catch_sighup() -> None:
    """Install the early handler. Main thread only."""
    signal.signal(signal.SIGHUP, EarlySighup())


def was_received(replaced: object) -> bool:
    """Whether the handler that was replaced has received SIGHUP."""
    return isinstance(replaced, EarlySighup) and replaced.received
