"""A broker that only writes: ``python -m benchmarks.live_store DIR`` appends to a synthetic store at a steady rate.

Shows what is visible of a running broker without the network: the lock on its ``lock`` file, a growing commitlog with
consume queues close behind, and the end of its log in a file. Runs until its standard
input closes; stops writing after ``--seconds`` but stays alive, as an idle broker does.
"""

import argparse
import fcntl
import mmap
import struct
import sys
import threading
import time
from pathlib import Path

from benchmarks.synthetic_store import StoreSpec, StoreWriter

WORD_NAME = "end_of_log"
TICK_S = 0.01
_WORD = struct.Struct("<q")


def read_word(directory: Path) -> int:
    """The end of the log last reported by the writer."""
    return int(_WORD.unpack((directory / WORD_NAME).read_bytes())[0])


def main() -> None:
    """Write a live store."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_store", description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rate", type=int, default=20_000, help="messages per second, a multiple of 1,000")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--topics", type=int, default=4)
    parser.add_argument("--queues", type=int, default=4, help="queues of each topic")
    parser.add_argument("--body-bytes", type=int, default=256)
    parser.add_argument("--start-ms", type=int, required=True, help="store timestamp of the first message")
    options = parser.parse_args()
    spec = StoreSpec(
        topics=options.topics,
        queues_per_topic=options.queues,
        body_bytes=options.body_bytes,
        start_ms=options.start_ms,
        messages_per_ms=options.rate // 1000,
    )
    gone = threading.Event()
    threading.Thread(target=_await_end_of_input, args=(gone,), daemon=True).start()
    options.directory.mkdir(parents=True)
    writer = StoreWriter(options.directory, spec)
    with (options.directory / "lock").open("r+b") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        _write(writer, options.directory, options.rate, options.seconds, gone)
        gone.wait()
        writer.close()


def _await_end_of_input(gone: threading.Event) -> None:
    sys.stdin.read()
    gone.set()


def _write(writer: StoreWriter, directory: Path, rate: int, seconds: float, gone: threading.Event) -> None:
    """Keep up with the clock: every tick, what is due since the start."""
    path = directory / WORD_NAME
    path.write_bytes(_WORD.pack(0))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), _WORD.size) as word:
        while not gone.is_set():
            elapsed_s = time.time() - writer.spec.start_ms / 1000
            due = int(min(max(0.0, elapsed_s), seconds) * rate)
            if due > writer.totals.messages:
                writer.append(due - writer.totals.messages)
                writer.flush()
                word[:] = _WORD.pack(writer.totals.end_phys)
            if elapsed_s >= seconds:
                return
            time.sleep(TICK_S)


if __name__ == "__main__":
    main()
