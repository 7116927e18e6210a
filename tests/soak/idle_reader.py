"""Common parts of the idle-priority processes of test_isolation.py.

Each prints ``READING`` when it starts and stops when its standard input closes.
"""

import os
import sys
import time


def idle() -> None:
    """Take idle priority, as deploy/README.md recommends on a broker's machine."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def wait_for_stop() -> float:
    """Wait for the end of standard input; returns the seconds until then."""
    started = time.monotonic()
    print("READING", flush=True)
    sys.stdin.read()
    return time.monotonic() - started
