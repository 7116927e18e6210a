"""SIGHUP before a service listens for it: noted, and told to the service once it does.

Its default action ends the process; the settings may have been read already, so that what is to be reloaded is not in
force. Owns what came until then. Does not own what a service does about it.
"""

from __future__ import annotations

import signal


class EarlySighup:
    """The handler until there is another one."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, *_: object) -> None:
        """SIGHUP."""
        self.came = True


def catch_sighup() -> None:
    """From now on SIGHUP does not end the process. Main thread only."""
    signal.signal(signal.SIGHUP, EarlySighup())


def was_received(replaced: object) -> bool:
    """Whether SIGHUP came to the handler that was replaced."""
    return isinstance(replaced, EarlySighup) and replaced.came
