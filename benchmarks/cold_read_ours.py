"""Reads an archive the ways the Java peer's benchmark does: ``python -m benchmarks.cold_read_ours READ URL``.

One process for each way of reading; prints one JSON line. Every message's queue offset is checked. Time and CPU are
those of the reads: opening the archive and loading the kernel, like the start of a JVM, come before. Owns the loops.
"""

import argparse
import asyncio
import json
import random
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import rocketmq_tiered
from benchmarks.cold_read_checks import WrongAnswerError, check_body, check_offsets, consecutive
from benchmarks.cold_read_parts import PIECE_BYTES, all_pieces, drop_directory
from benchmarks.report import Row
from fetcher.archive import Archive, Queue
from fetcher.io.waiting import gather, run_sync
from fetcher.queries.by_key import KeyKind
from fetcher.queries.queue_listing import QueueListing
from fetcher.queries.time_search import Boundary
from fetcher.rows.pull import PullRequest
from fetcher.walk import AsyncBatches, Span, Walk
from rocketmq_tiered.cli.arguments import add_archive, settings_of
from tiered.settings.sections import Settings

BATCH_MESSAGES = 32
BATCH_BYTES = 16 * 1024 * 1024
RANDOM_READS = 2000
SEARCHES = 500
COLD_READS = 50
SEED = 7
GIB = 1 << 30


@dataclass
class Tally:
    """What one consumer got."""

    messages: int = 0
    record_bytes: int = 0
    pulls: int = 0


# -- sequential -----------------------------------------------------------------------------------------------


async def consume(archive: Archive, queues: deque[QueueListing], group: str) -> Tally:
    """One consumer: queue after queue, pulls of 32 answered as ``tiered serve`` answers them, every offset checked.

    A coroutine of the core: it leaves its thread to other consumers where it waits, as in a server's event loop."""
    tally, reader = Tally(), archive.access.fetcher
    while True:
        try:
            queue = queues.popleft()
        except IndexError:
            return tally
        offset = queue.min_offset
        while offset < queue.max_offset:
            tally.pulls += 1
            request = PullRequest(queue.topic, queue.queue_id, offset, BATCH_MESSAGES, BATCH_BYTES, group)
            found = reader.pull_from_memory(request)
            if found is not None:
                check_body(found.body, found.records, offset)
                tally.messages += found.records
                tally.record_bytes += sum(map(len, found.body))
                offset = found.next_offset
                continue
            request.generation = queue.generation
            result = await reader.pull(request)
            batch = result.batch
            check_offsets(batch, offset)
            tally.messages += len(batch)
            tally.record_bytes += batch.record_bytes
            offset = result.next_offset


def consume_all(archive: Archive, queues: deque[QueueListing], consumers: int) -> list[Tally]:
    """So many consumers in one thread, as `tiered serve` has them."""
    return run_sync(gather([consume(archive, queues, "g") for _ in range(consumers)]))


def consume_all_by_threads(archive: Archive, queues: deque[QueueListing], consumers: int) -> list[Tally]:
    """A thread for each consumer; they take turns at the interpreter."""
    with ThreadPoolExecutor(consumers) as pool:
        running = [pool.submit(run_sync, consume(archive, queues, "g")) for _ in range(consumers)]
        return [future.result() for future in running]


def walk_all(archive: Archive, queues: deque[QueueListing], readers: int) -> list[Tally]:
    """A thread for each reader of the Python API, but for a single one."""
    if readers == 1:
        return [walk(archive, queues)]
    with ThreadPoolExecutor(readers) as pool:
        running = [pool.submit(walk, archive, queues) for _ in range(readers)]
        return [future.result() for future in running]


def walk(archive: Archive, queues: deque[QueueListing]) -> Tally:
    """One reader of the Python API: queue after queue in batches of its own, every offset checked."""
    tally = Tally()
    while True:
        try:
            queue = queues.popleft()
        except IndexError:
            return tally
        offset = queue.min_offset
        for batch in archive.queue(*queue.key[:2], generation=queue.generation).batches():
            check_body(batch.buffers(), len(batch), offset)
            tally.pulls += 1
            tally.messages += len(batch)
            tally.record_bytes += batch.record_bytes
            offset += len(batch)


def walk_in_loop(archive: Archive, queues: deque[QueueListing], readers: int) -> list[Tally]:
    """As ``walk_all``, by tasks of one event loop, as the asynchronous Python API has them."""

    async def read() -> list[Tally]:
        return await asyncio.gather(*(_walk_in_loop(archive, queues) for _ in range(readers)))

    return asyncio.run(read())


async def _walk_in_loop(archive: Archive, queues: deque[QueueListing]) -> Tally:
    tally = Tally()
    while queues:
        listing = queues.popleft()
        offset = listing.min_offset
        queue = archive.queue(*listing.key[:2], generation=listing.generation)

        async def begin(queue: Queue = queue) -> Walk:
            return queue.walk(Span())

        async for batch in AsyncBatches(begin):
            check_body(batch.buffers(), len(batch), offset)
            tally.pulls += 1
            tally.messages += len(batch)
            tally.record_bytes += batch.record_bytes
            offset += len(batch)
    return tally


Way = Callable[[Archive, deque[QueueListing], int], list[Tally]]
WAYS: dict[str, tuple[Way, int]] = {
    "walk-1": (walk_all, 1),
    "walk-16": (walk_all, 16),
    "seq-1": (consume_all, 1),
    "seq-16": (consume_all, 16),
    "seq-16-threads": (consume_all_by_threads, 16),
}
"""``walk``: the Python API. ``seq``: pulls of 32, as the peer's program and a RocketMQ consumer make them."""


def sequential(archive: Archive, way: Way, readers: int) -> Row:
    """All queues, by so many readers."""
    listings = archive.queues()
    expected = sum(listing.messages for listing in listings)
    queues = deque(listings)
    before = requests_of(archive)
    cpu, started = time.process_time(), time.perf_counter()
    tallies = way(archive, queues, readers)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    messages = sum(tally.messages for tally in tallies)
    if messages != expected:
        raise WrongAnswerError(f"{messages} messages came, not {expected}")
    record_bytes = sum(tally.record_bytes for tally in tallies)
    requests = requests_of(archive) - before
    work = all_pieces(archive.access.store, archive.access.state, PIECE_BYTES)
    ideal = len(work.pieces) + work.tails
    counters = archive.access.fetcher.counters
    statistics = archive.access.source.statistics()
    return {
        "messages": messages,
        "pulls": sum(tally.pulls for tally in tallies),
        "wall_s": round(wall_s, 4),
        "cpu_s": round(cpu_s, 4),
        "messages_per_s": round(messages / wall_s),
        "mb_per_s": round(record_bytes / 1e6 / wall_s, 1),
        "cpu_us_per_message": round(cpu_s * 1e6 / messages, 4),
        "peak_bytes": peak_bytes,
        "requests": requests,
        "requests_ideal": ideal,
        "requests_of_ideal": round(requests / ideal, 3),
        "requests_per_gib": round(requests * GIB / record_bytes, 1),
        "fetched_twice": round(statistics.bytes_fetched_twice / max(1, statistics.bytes_fetched), 5),
        "pulls_that_waited": counters.waited,
        "pulls_from_memory": counters.from_memory,
    }


def requests_of(archive: Archive) -> int:
    """Object requests for data so far: tails and blocks."""
    return archive.access.source.statistics().requests


# -- single answers -------------------------------------------------------------------------------------------

Ask = Callable[[Archive], None]
Open = Callable[[], Archive]


def random_offset(archive: Archive, listings: Sequence[QueueListing], chance: random.Random) -> Ask:
    """One message at a random offset of a random queue."""
    queue = chance.choice(listings)
    offset = chance.randrange(queue.min_offset, queue.max_offset)

    def ask(asked: Archive) -> None:
        result = run_sync(
            asked.access.fetcher.pull(
                PullRequest(
                    queue.topic, queue.queue_id, offset, count=1, max_bytes=BATCH_BYTES, group=f"one-{offset}"
                )
            )
        )
        check_offsets(result.batch, offset)

    return ask


def random_time(archive: Archive, listings: Sequence[QueueListing], chance: random.Random) -> Ask:
    """The offset of a random time of a random queue."""
    queue = chance.choice(listings)
    first_ms = archive.queue(*queue.key[:2]).earliest_time() or 0
    time_ms = chance.randint(first_ms, queue.newest_ms)

    def ask(asked: Archive) -> None:
        offset = run_sync(asked.access.offset_by_time(queue.key, time_ms, Boundary.LOWER))
        if not queue.min_offset <= offset < queue.max_offset:
            raise WrongAnswerError(f"{queue.key} at {time_ms}: {offset}")

    return ask


def random_key(archive: Archive, listings: Sequence[QueueListing], chance: random.Random) -> Ask:
    """The only message with the first key of a random message."""
    queue = chance.choice(listings)
    offset = chance.randrange(queue.min_offset, queue.max_offset)
    keys = list(next(iter(archive.queue(queue.topic, queue.queue_id).messages(offset))).keys)

    def ask(asked: Archive) -> None:
        found = run_sync(asked.access.find_by_key(queue.topic, keys[0], KeyKind.KEY, None, None, 32))
        if [list(message.keys) for message in found] != [keys]:
            raise WrongAnswerError(f"{keys[0]} of {queue.topic}: {found}")

    return ask


def single(
    open_archive: Open,
    choose: Callable[[Archive, Sequence[QueueListing], random.Random], Ask],
    count: int,
    drop: Path | None,
) -> Row:
    """Requests of ``COLD_READS`` answers of archives just opened and of the same again; then the time of ``count``
    answers of one archive, which learns as it goes."""
    chance = random.Random(SEED)
    cold: list[int] = []
    warm: list[int] = []
    took_ms: list[float] = []
    with open_archive() as archive:
        listings = archive.queues()
    for _ in range(COLD_READS):
        with open_archive() as archive:
            ask = choose(archive, listings, chance)
        with open_archive() as archive:
            for counts in (cold, warm):
                before = requests_of(archive)
                ask(archive)
                counts.append(requests_of(archive) - before)
    drop_directory(drop)
    with open_archive() as archive:
        asks = [choose(archive, listings, chance) for _ in range(count)]
    with open_archive() as archive:
        cpu, began = time.process_time(), time.perf_counter()
        for ask in asks:
            started = time.perf_counter()
            ask(archive)
            took_ms.append((time.perf_counter() - started) * 1000)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        requests = requests_of(archive)
    return {
        "messages": count,
        "wall_s": round(wall_s, 4),
        "cpu_us_per_message": round(cpu_s * 1e6 / count, 1),
        "p50_ms": round(float(np.percentile(took_ms, 50)), 3),
        "p99_ms": round(float(np.percentile(took_ms, 99)), 3),
        "cold_requests_max": max(cold),
        "warm_requests_max": max(warm),
        "requests": requests,
    }


def load_kernel() -> None:
    """Compile the check of answers, or read it from its cache: like the start of a JVM, not part of a read."""
    consecutive(np.frombuffer(bytes(4), np.uint8), 0)


READS = (*WAYS, "random", "time", "key")


def measure(read: str, open_archive: Open, drop: Path | None) -> Row:
    """One way of reading, from a cold page cache."""
    if read in WAYS:
        load_kernel()
        with open_archive() as archive:  # modules are imported
            listing = archive.queues()[0]
            for _ in archive.queue(*listing.key[:2]).batches(limit=1):
                break
        drop_directory(drop)
        with open_archive() as archive:
            return sequential(archive, *WAYS[read])
    chosen = {
        "random": (random_offset, RANDOM_READS),
        "time": (random_time, SEARCHES),
        "key": (random_key, SEARCHES),
    }
    choose, count = chosen[read]
    return single(open_archive, choose, count, drop)


def main() -> None:
    """Measure one way of reading one archive."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_read_ours", description=main.__doc__)
    parser.add_argument("read", choices=READS)
    add_archive(parser)
    parser.add_argument(
        "--drop", type=Path, metavar="DIR", help="forget these files' page cache before reading"
    )
    options = parser.parse_args()
    settings: Settings = settings_of(options).settings
    print(
        json.dumps(
            measure(options.read, lambda: rocketmq_tiered.open(options.url, settings=settings), options.drop)
        )
    )


if __name__ == "__main__":
    main()
