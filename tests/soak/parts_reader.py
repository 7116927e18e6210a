"""A control: ``python -m tests.soak.parts_reader URL THREADS`` does the parts of a cold read over and over, whenever
nobody else wants the processor: ranged GETs, CRC32C, decompression. What it costs the broker, any reader would.

Speaks as ``cold_reader`` does: ``READING``, and once its standard input closes ``READ <raw bytes> <stored bytes>
<seconds>``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from benchmarks.cold_read_parts import Piece, Work, all_pieces, fetch_and_expand
from sidecar.archive import open_for_reading
from tiered.object_store.protocol import ObjectStore
from tiered.settings.load import load_settings


class Loop:
    """Pieces without an end, until ``gone``; counts what they bring."""

    def __init__(self, work: Work, gone: threading.Event) -> None:
        self._pieces, self._gone = work.pieces, gone
        self._left: deque[Piece] = deque()
        self._lock = threading.Lock()
        self.raw_bytes = 0
        self.stored_bytes = 0

    def run(self, store: ObjectStore) -> None:
        """One thread."""
        while not self._gone.is_set():
            with self._lock:
                if not self._left:
                    self._left.extend(self._pieces)
                piece = self._left.popleft()
            raw_bytes = fetch_and_expand(store, deque([piece]))
            with self._lock:
                self.raw_bytes += raw_bytes
                self.stored_bytes += piece.span.length


def main() -> None:
    """Read until told to stop."""
    url, threads = sys.argv[1], int(sys.argv[2])
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    settings = load_settings(environment=os.environ).settings
    with open_for_reading(url, settings) as archive:
        gone = threading.Event()
        loop = Loop(all_pieces(archive.store, archive.state), gone)
        with ThreadPoolExecutor(threads) as pool:
            started = time.monotonic()
            running = [pool.submit(loop.run, archive.store) for _ in range(threads)]
            print("READING", flush=True)
            sys.stdin.read()
            elapsed_s = time.monotonic() - started
            gone.set()
            for future in running:
                future.result()
        print("READ", loop.raw_bytes, loop.stored_bytes, f"{elapsed_s:.3f}", flush=True)


if __name__ == "__main__":
    main()
