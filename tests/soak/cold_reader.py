"""A reader at full speed: ``python -m tests.soak.cold_reader URL THREADS BYTES_PER_S`` reads all queues
continuously with idle priority.

The archive must be larger than the caches, so that every block comes from the store. When its standard input closes it
prints ``READ <record bytes> <stored bytes> <seconds>`` and ends. Owns the loop; the environment says how to reach the
store.
"""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import rocketmq_tiered
from fetcher.archive import Archive
from tests.soak.idle_reader import idle, wait_for_stop
from tiered.settings.load import load_settings
from tiered.settings.sections import Settings


def settings(bytes_per_s: int) -> Settings:
    """The environment's, with the cap."""
    loaded = load_settings(environment=os.environ).settings
    return replace(loaded, fetch=replace(loaded.fetch, bytes_per_s=bytes_per_s))


def read_share(archive: Archive, gone: threading.Event, share: int, shares: int) -> int:
    """Read every ``shares``-th queue over and over until ``gone``; bytes of all records read."""
    total = 0
    while not gone.is_set():
        for queue in archive.queues()[share::shares]:
            for batch in archive.queue(queue.topic, queue.queue_id, generation=queue.generation).batches():
                total += batch.record_bytes
                if gone.is_set():
                    return total
    return total


def main() -> None:
    """Read until standard input closes."""
    url = sys.argv[1]
    threads, bytes_per_s = map(int, sys.argv[2:])
    idle()
    gone = threading.Event()
    with (
        rocketmq_tiered.open(url, settings=settings(bytes_per_s)) as archive,
        ThreadPoolExecutor(threads) as pool,
    ):
        before = archive.access.source.statistics().bytes_fetched
        sums = [pool.submit(read_share, archive, gone, share, threads) for share in range(threads)]
        elapsed_s = wait_for_stop()
        fetched = archive.access.source.statistics().bytes_fetched - before
        gone.set()
        print("READ", sum(future.result() for future in sums), fetched, f"{elapsed_s:.3f}", flush=True)


if __name__ == "__main__":
    main()
