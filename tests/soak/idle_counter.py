"""A control: ``python -m tests.soak.idle_counter`` counts whenever nobody else wants the processor; it touches nothing.

Speaks as ``cold_reader`` does: ``READING``, and once its standard input closes ``READ 0 0 <seconds>``.
"""

from __future__ import annotations

import threading

from tests.soak.told_to_stop import idle, told_to_stop


def count(gone: threading.Event) -> None:
    """Count until ``gone``."""
    counted = 0
    while not gone.is_set():
        for _ in range(10_000):
            counted += 1


def main() -> None:
    """Count until told to stop."""
    idle()
    gone = threading.Event()
    counter = threading.Thread(target=count, args=(gone,))
    counter.start()
    elapsed_s = told_to_stop()
    gone.set()
    counter.join()
    print("READ", 0, 0, f"{elapsed_s:.3f}", flush=True)


if __name__ == "__main__":
    main()
