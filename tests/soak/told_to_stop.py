"""What the processes that read, or count, beside a broker have in common: they take the processor only when nobody else
wants it, print ``READING`` when they have begun, and stop when their standard input closes.

Owns that; test_isolation.py is who starts them.
"""

from __future__ import annotations

import os
import sys
import time


def idle() -> None:
    """Be scheduled as deploy/README.md says for a broker's machine."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def told_to_stop() -> float:
    """Return when told; the seconds it took."""
    started = time.monotonic()
    print("READING", flush=True)
    sys.stdin.read()
    return time.monotonic() - started
