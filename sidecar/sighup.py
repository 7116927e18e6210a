"""SIGHUP before a service listens for it: noted, and told to the service once it does.

Its default action ends the process; the settings may have been read already, so that what is to be reloaded is not in
force. Owns what came until then. Does not own what a service does about it.
"""

from __future__ import annotations

import signal


class EarlyHangUp:
    """The handler until there is another one."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, *_: object) -> None:
        """SIGHUP."""
        self.came = True


def note_hang_up() -> None:
    """From now on SIGHUP does not end the process. Main thread only."""
    signal.signal(signal.SIGHUP, EarlyHangUp())


def came_early(replaced: object) -> bool:
    """Whether SIGHUP came to the handler that was replaced."""
    return isinstance(replaced, EarlyHangUp) and replaced.came
