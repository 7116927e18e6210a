"""A control: ``python -m tests.soak.idle_counter`` counts with idle priority and touches nothing.

Prints like ``cold_reader``: ``READING``, and once its standard input closes ``READ 0 0 <seconds>``.
"""

import threading

from tests.soak.idle_reader import idle, wait_for_stop


def count(gone: threading.Event) -> None:
    """Count until ``gone``."""
    counted = 0
    while not gone.is_set():
        for _ in range(10_000):
            counted += 1


def main() -> None:
    """Count until standard input closes."""
    idle()
    gone = threading.Event()
    counter = threading.Thread(target=count, args=(gone,))
    counter.start()
    elapsed_s = wait_for_stop()
    gone.set()
    counter.join()
    print("READ", 0, 0, f"{elapsed_s:.3f}", flush=True)


if __name__ == "__main__":
    main()
