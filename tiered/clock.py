"""The clocks that a part of the program reads: one object, so that a simulation gives all of them its own time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tiered.timestamps import wall_ms


@dataclass(frozen=True)
class Clock:
    """What time it is and how to wait. Each function may be replaced alone; the others stay this machine's.

    ``wall_ms``: milliseconds since the epoch. ``monotonic_s``: seconds that never go back. ``cpu_s``: processor seconds
    of the current thread. ``sleep``: blocks the current thread for so many seconds.
    """

    wall_ms: Callable[[], int] = wall_ms
    monotonic_s: Callable[[], float] = time.monotonic
    cpu_s: Callable[[], float] = time.thread_time
    sleep: Callable[[float], None] = time.sleep


MACHINE_CLOCK: Final = Clock()
