"""A control: ``python -m tests.soak.idle_counter`` counts whenever nobody else wants the processor; it touches nothing.

Speaks as ``cold_reader`` does: ``READING``, and once its standard input closes ``READ 0 0 <seconds>``.
"""

from __future__ import annotations

import os
import sys
import threading
import time


def count(gone: threading.Event) -> None:
    """Count until ``gone``."""
    counted = 0
    while not gone.is_set():
        for _ in range(10_000):
            counted += 1


def main() -> None:
    """Count until told to stop."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    gone = threading.Event()
    started = time.monotonic()
    counter = threading.Thread(target=count, args=(gone,))
    counter.start()
    print("READING", flush=True)
    sys.stdin.read()
    gone.set()
    counter.join()
    print("READ", 0, 0, f"{time.monotonic() - started:.3f}", flush=True)


if __name__ == "__main__":
    main()
