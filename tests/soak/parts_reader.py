"""A control: ``python -m tests.soak.parts_reader URL THREADS`` runs the parts of a cold read continuously with idle
priority: ranged GETs, CRC32C, decompression. Any reader costs the broker at least as much.

Prints like ``cold_reader``: ``READING``, and once its standard input closes ``READ <raw bytes> <stored bytes>
<seconds>``.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

from benchmarks.cold_read_parts import Piece, all_pieces, fetch_and_expand
from rocketmq_tiered.process.loaded_archive import open_for_reading
from tests.soak.idle_reader import idle, wait_for_stop
from tiered.object_store.interface import ObjectStore
from tiered.settings.load import load_settings


def read(store: ObjectStore, pieces: Iterator[Piece], gone: threading.Event) -> tuple[int, int]:
    """One thread, until ``gone``; raw and stored bytes."""
    raw_bytes = stored_bytes = 0
    while not gone.is_set():
        piece = next(pieces)
        raw_bytes += fetch_and_expand(store, deque([piece]))
        stored_bytes += piece.span.length
    return raw_bytes, stored_bytes


def main() -> None:
    """Read until standard input closes."""
    url, threads = sys.argv[1], int(sys.argv[2])
    idle()
    gone = threading.Event()
    settings = load_settings(environment=os.environ).settings
    with open_for_reading(url, settings) as archive, ThreadPoolExecutor(threads) as pool:
        pieces = cycle(all_pieces(archive.store, archive.state).pieces)
        reading = [pool.submit(read, archive.store, pieces, gone) for _ in range(threads)]
        elapsed_s = wait_for_stop()
        gone.set()
        raw_bytes, stored_bytes = map(sum, zip(*(future.result() for future in reading), strict=True))
    print("READ", raw_bytes, stored_bytes, f"{elapsed_s:.3f}", flush=True)


if __name__ == "__main__":
    main()
