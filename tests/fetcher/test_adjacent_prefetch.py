"""Blocks that come along with the requested ones: only where small runs are read in order, and never without bound."""

import contextlib
import random
from functools import lru_cache

import numpy as np
import pytest

from fetcher.blocks.adjacent_prefetch import MOST_BYTES, PROOFS, RUN_BYTES_MAX, AdjacentPrefetch
from fetcher.blocks.block_cache import BlockKey
from fetcher.io.request_scheduler import Priority
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.fetcher.reading_simulation import Consumer, Simulation
from tests.fetcher.segments import Segment, segment
from tests.fetcher.source_bench import SourceBench
from tiered.errors import UnansweredError
from tiered.formats.segment import BlockCodec
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import FetchSettings

QUEUES = [QueueKey("small", number, 0) for number in range(400)]
KIB = 1024


@lru_cache
def archive() -> ArchiveBuilder:
    """400 queues of two runs each, 10 messages a run; a block holds about two runs."""
    rand = random.Random(9)
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=4 * KIB))
    for _ in range(2):
        builder.commit([Sent(queue, rand.randbytes(150)) for queue in QUEUES for _ in range(10)])
    return builder


@lru_cache
def index(name: str = "") -> SegmentIndex:
    """The first object's tail, as that of object ``name``."""
    key = archive().keys[0]
    content = archive().store.get(key)
    return SegmentIndex(name or key, len(content), content)


def in_order(subject: AdjacentPrefetch, count: int) -> list[range]:
    """Ask for ``count`` blocks, each behind what is there."""
    at, found = 0, []
    for _ in range(count):
        found.append(subject.to_load_with(index(), 0, at, at))
        at = max(at + 1, found[-1].stop)
    return found


def test_nothing_comes_along_until_the_order_is_plain_and_then_twice_as_much_each_time() -> None:
    found = in_order(AdjacentPrefetch(1 << 30), PROOFS + 3)
    sizes = [sum(index().blocks["stored_bytes"][blocks.start : blocks.stop].tolist()) for blocks in found]
    assert sizes[: PROOFS - 1] == [0] * (PROOFS - 1)
    assert 0 < sizes[PROOFS - 1] < sizes[PROOFS] < sizes[PROOFS + 1]
    assert max(sizes) <= MOST_BYTES
    assert found[PROOFS - 1].start == PROOFS


def test_the_next_blocks_are_due_when_the_last_ones_are_begun() -> None:
    subject = AdjacentPrefetch(1 << 30)
    brought = in_order(subject, PROOFS)[-1]
    assert len(brought) > 2
    assert not subject.to_load_now(index(), brought.start - 1)
    assert not subject.to_load_now(index(), brought.stop), "another reader, elsewhere in the object"
    further = subject.to_load_now(index(), brought.start)
    assert further.start == brought.stop
    assert len(further) > len(brought)
    assert not subject.to_load_now(index(), brought.start + 1)
    assert not AdjacentPrefetch(1 << 30).to_load_now(index(), brought.start)


def test_the_order_continues_in_the_next_object() -> None:
    subject = AdjacentPrefetch(1 << 30)
    in_order(subject, len(index().blocks))
    found = [subject.to_load_with(other, 0, 0, 0) for other in (index("other"), index("third"))]
    assert len(found[0]) > 2
    assert not found[1], "once for each object that was read to its end"


def test_a_reader_of_small_runs_in_order_does_not_wait_for_each_request() -> None:
    key = archive().keys[0]
    content = archive().store.get(key)
    bench = SourceBench([Segment(key, content, len(content), b"")])
    opened = bench.index(key)
    for number in range(len(opened.blocks)):
        run = int(np.searchsorted(opened._run_row, opened._block_row[number], side="right")) - 1
        bench.clock.run_one(bench.source.blocks_at(opened, run, [number], Priority.USER))
        bench.clock.run(bench.clock.time_s + bench.reader.latency_s / 4)
    found = bench.source.statistics()
    assert found.waits <= PROOFS + 3  # the tail is one
    assert found.bytes_fetched_twice == 0
    bench.check_at_rest()


def test_reads_at_random_bring_nothing_along() -> None:
    subject, rand = AdjacentPrefetch(1 << 30), random.Random(3)
    brought = sum(
        len(subject.to_load_with(index(), 0, block, block))
        for block in (rand.randrange(len(index().blocks)) for _ in range(300))
    )
    assert brought == 0


def test_runs_of_ordinary_size_are_left_to_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    large = index().runs.copy()
    large["byte_count"] = RUN_BYTES_MAX + 1
    monkeypatch.setattr(index(), "runs", large)
    assert not any(map(len, in_order(AdjacentPrefetch(1 << 30), 20)))


def test_unread_blocks_are_bounded_and_lost_ones_lower_the_bound() -> None:
    subject = AdjacentPrefetch(40 * KIB)
    keys: list[tuple[BlockKey, int]] = []
    at = 0
    for _ in range(40):
        blocks = subject.to_load_with(index(), 0, at, at)
        new = [(BlockKey(index().key, number), int(index().blocks["raw_bytes"][number])) for number in blocks]
        subject.are_loading(new)
        keys += new
        at = max(at + 1, blocks.stop)
        assert subject.unread_bytes <= 40 * KIB
    assert subject.unread_bytes > 20 * KIB
    subject.were_read([keys[0][0]])
    subject.were_read([keys[0][0]])
    assert subject.unread_bytes == sum(raw for _, raw in keys[1:])
    subject.lost(key for key, _ in keys)
    assert subject.unread_bytes == 0
    again = subject.to_load_with(index(), 0, at, at)
    stored = int(index().blocks["stored_bytes"][again.start : again.stop].sum())
    assert stored <= 64 * KIB  # from the beginning


@pytest.mark.parametrize("readers", [1, 8])
def test_many_small_queues_cost_few_requests_and_every_message_comes_once(readers: int) -> None:
    simulation = Simulation(archive(), 2, fetch=FetchSettings(memory_bytes=16 << 20, cache_bytes=8 << 20))
    waiting = list(reversed(QUEUES))

    async def read_all(name: str) -> None:
        while waiting:
            consumer = Consumer(name, waiting.pop(), lambda pull: 0.001)
            await simulation._consume(consumer)
            simulation.consumers.append(consumer)

    for number in range(readers):
        simulation.clock.start(read_all(f"r{number}"))
    simulation.run()
    assert len(simulation.consumers) == len(QUEUES)
    for consumer in simulation.consumers:
        assert consumer.got == archive().truth[consumer.queue].rows
    found = simulation.source.statistics()
    blocks = len(index().blocks)
    assert found.requests <= 2 * blocks / 3  # of two objects, each with so many blocks
    assert found.bytes_fetched_twice == 0
    assert found.peak_bytes <= 16 << 20


def test_blocks_that_never_came_are_not_waited_for() -> None:
    builder = archive()
    key = builder.keys[0]
    item = Segment(key, builder.store.get(key), len(builder.store.get(key)), b"")
    bench = SourceBench([item], cache_bytes=256 * KIB)
    opened = bench.index(key)
    at = 0
    for number in range(60):
        if number >= PROOFS:
            bench.reader.failures[len(bench.reader.gets)] = UnansweredError("no answer")
        run = int(np.searchsorted(opened._run_row, opened._block_row[at], side="right")) - 1
        with contextlib.suppress(UnansweredError):
            bench.clock.run_one(bench.source.blocks_at(opened, run, [at], Priority.USER))
        at += 1
    neighbours = bench.source._adjacent
    assert neighbours.unread_bytes <= neighbours.unread_bytes_max == 64 * KIB
    bench.reader.failures.clear()
    requests = len(bench.reader.gets)
    for number in range(at, at + 40):
        run = int(np.searchsorted(opened._run_row, opened._block_row[number], side="right")) - 1
        bench.clock.run_one(bench.source.blocks_at(opened, run, [number], Priority.USER))
    assert len(bench.reader.gets) - requests < 20


def test_without_memory_to_spare_only_requested_blocks_are_fetched() -> None:
    item = segment("data/a.so", blocks=24)
    bench = SourceBench([item], memory_bytes=8 << 20)
    opened = bench.index(item.key)
    hog = bench.settings.memory_bytes - bench.budget.charged_bytes - 24 * KIB
    assert bench.budget.try_charge(hog, Priority.USER)
    for number in range(12):
        assert bench.read(opened, number, number + 1) == bench.expected(opened, number, number + 1)
        assert bench.budget.charged_bytes <= bench.settings.memory_bytes
    bench.budget.release(hog)
