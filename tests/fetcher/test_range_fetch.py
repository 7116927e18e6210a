"""Prefetch requests blocks, not rows, and few and whole ones: what sequential reads cost the object store.

Plans of GETs: every wanted byte once, gaps below the ratio, pieces near their size, few requests.
"""

import random
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.blocks.block_loader import CoalescingLimits, Range, plan_gets
from fetcher.io.waiting import InlineExecutor, run_sync
from fetcher.prefetch.prefetch_window import RunEnds
from fetcher.prefetch.prefetcher import RangeFetcher, run_ends
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.pull import PullRequest
from fetcher.rows.row_reader import RowReader
from fetcher.rows.tag_filter import TagFilter
from fetcher.walk import Span, Walk
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.fetcher.reading_fakes import PlainSource, plain_fetcher
from tests.fetcher.reading_simulation import Consumer, Simulation
from tiered.catalog.catalog_reader import load
from tiered.clock import Clock
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import FetchSettings, PrefetchSettings

QUEUES = [QueueKey("topic", number, 0) for number in range(4)]
BATCHED, LMQ = QueueKey("batched", 0, 0), QueueKey("%LMQ%light", 0, 0)
RUNS, ROWS = 6, 300
KIB = 1024


@lru_cache
def archive() -> ArchiveBuilder:
    """Six objects, each with a run of 300 messages (40 KiB, five blocks) of every queue."""
    rand = random.Random(4)
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=8 * KIB))
    for _ in range(RUNS):
        builder.commit([Sent(queue, rand.randbytes(50)) for _ in range(ROWS) for queue in QUEUES])
    return builder


def ahead_of(builder: ArchiveBuilder) -> tuple[RangeFetcher, PlainSource, CatalogView]:
    source = PlainSource(builder.store)
    catalog = CatalogView(
        builder.store, load(builder.store), executor=InlineExecutor(), clock=Clock(monotonic_s=lambda: 0.0)
    )
    return RangeFetcher(source, catalog, RowReader(source, catalog)), source, catalog


def test_it_fetches_the_blocks_of_the_range_and_says_how_far_they_reach() -> None:
    reader, source, catalog = ahead_of(archive())
    view = catalog.view(catalog.state, QUEUES[1])
    assert view is not None
    begin, end = 250, 2 * ROWS + 10
    ahead = run_sync(reader.read(view, begin, end, None))
    assert sorted(key for key, _ in source.fetched) == sorted(archive().keys[:3])
    assert [(key, block) for key, numbers in source.fetched for block in numbers] == list(ahead.blocks)
    rows = archive().truth[QUEUES[1]].rows
    assert end <= ahead.covered <= 3 * ROWS
    inside = sum(len(row.record) for row in rows[begin : ahead.covered])
    assert inside <= ahead.block_bytes <= inside + 3 * 2 * 8 * KIB  # the ends of runs share blocks


def test_it_stops_at_a_gap_and_begins_behind_one() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(QUEUES[0], b"x") for _ in range(10)])
    builder.commit([Sent(QUEUES[0], b"x", offset=50 + number) for number in range(10)])
    reader, _, catalog = ahead_of(builder)
    view = catalog.view(catalog.state, QUEUES[0])
    assert view is not None
    assert run_sync(reader.read(view, 0, 60, None)).covered == 10
    assert run_sync(reader.read(view, 10, 55, None)).covered >= 55
    assert run_sync(reader.read(view, 10, 40, None)) == (40, 0, ())


@pytest.mark.parametrize("queue", [BATCHED, LMQ])
def test_rows_that_are_more_than_an_offset_each_are_read_as_a_pull_reads_them(queue: QueueKey) -> None:
    builder = ArchiveBuilder(MemoryStore())
    lmq = [LMQ] if queue == LMQ else []
    for _ in range(3):
        builder.commit([Sent(BATCHED, b"y" * 60, inner_num=1 if lmq else 5, lmq=lmq) for _ in range(40)])
    reader, source, catalog = ahead_of(builder)
    view = catalog.view(catalog.state, queue)
    assert view is not None
    ahead = run_sync(reader.read(view, 3, view.max_offset, None))
    assert ahead.covered >= view.max_offset
    assert {(key, number) for key, numbers in source.fetched for number in numbers} == set(ahead.blocks)


def test_a_filter_skips_blocks_without_a_wanted_row() -> None:
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=1 * KIB))
    builder.commit([Sent(QUEUES[0], b"z" * 100, tags="a" if number < 10 else "b") for number in range(100)])
    reader, source, catalog = ahead_of(builder)
    view = catalog.view(catalog.state, QUEUES[0])
    assert view is not None
    run_sync(reader.read(view, 0, 100, TagFilter(["a"])))
    (numbers,) = [numbers for _, numbers in source.fetched]
    assert 0 < len(numbers) < 5


def test_ends_of_runs() -> None:
    _, _, catalog = ahead_of(archive())
    view = catalog.view(catalog.state, QUEUES[2])
    assert view is not None
    runs = run_sync(catalog.runs_of(view, 0))
    assert catalog.cached_runs_of(view, 0) is runs
    assert run_ends(runs, 0) == run_ends(runs, ROWS - 1) == RunEnds(0, ROWS)
    assert run_ends(runs, ROWS) == RunEnds(ROWS, 2 * ROWS)
    assert run_ends(runs, RUNS * ROWS) is None


def requests_of(simulation: Simulation) -> int:
    return simulation.source.statistics().requests


def simulation_of(**prefetch: Any) -> Simulation:
    fetch = FetchSettings(memory_bytes=16 << 20, cache_bytes=4 << 20, unread_expiry_ms=20_000)
    window: dict[str, Any] = {
        "window_first_bytes": 64 * KIB,
        "window_max_bytes": 256 * KIB,
        "memory_bytes": 1 << 20,
    } | prefetch
    return Simulation(archive(), 1, fetch=fetch, prefetch=PrefetchSettings(**window))


def test_a_fast_consumer_costs_about_a_request_a_run() -> None:
    simulation = simulation_of()
    for number, queue in enumerate(QUEUES):
        simulation.add(Consumer(f"c{number}", queue, lambda pull: 0.002))
    simulation.run()
    assert all(len(consumer.got) == RUNS * ROWS for consumer in simulation.consumers)
    ideal = RUNS * len(QUEUES) + RUNS
    assert requests_of(simulation) <= 1.3 * ideal


def test_a_walk_costs_a_request_a_run_from_its_first_message_on() -> None:
    simulation = simulation_of()
    walk = Walk(simulation.fetcher, QUEUES[0], 0, Span(batch_messages=50))
    offsets: list[int] = []

    async def read() -> None:
        while (batch := await walk.next_batch()) is not None:
            offsets.extend(batch.queue_offsets.tolist())

    simulation.clock.run_one(read())
    assert offsets == list(range(RUNS * ROWS))
    assert 2 * RUNS <= requests_of(simulation) <= 1.3 * 2 * RUNS


@pytest.mark.parametrize("count", [1, 60])
def test_a_walk_of_few_messages_fetches_no_more_than_they_take(count: int) -> None:
    simulation = simulation_of()
    walk = Walk(simulation.fetcher, QUEUES[0], 10, Span(limit=count, batch_messages=20))

    async def read() -> int:
        got = 0
        while (batch := await walk.next_batch()) is not None:
            got += len(batch)
        return got

    assert simulation.clock.run_one(read()) == count
    simulation.run(simulation.clock.time_s + 10)
    assert requests_of(simulation) == 2
    assert simulation.source.held_bytes <= 2 * 8 * KIB + 400


def test_many_readers_share_prefetched_blocks_without_falling_back_to_small_requests() -> None:
    simulation = simulation_of(memory_bytes=192 * KIB)
    for number, queue in enumerate(QUEUES):
        simulation.add(Consumer(f"c{number}", queue, lambda pull: 0.002))
    simulation.run()
    assert requests_of(simulation) <= 2.5 * (RUNS * len(QUEUES) + RUNS)
    assert simulation.fetcher.prefetcher.unread_bytes == 0


def test_blocks_of_one_object_are_requested_together_whatever_run_they_belong_to() -> None:
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=1 * KIB))
    builder.commit([Sent(queue, b"m" * 100, lmq=[LMQ]) for _ in range(20) for queue in QUEUES])
    source = PlainSource(builder.store)
    fetcher = plain_fetcher(builder.store, source)
    result = run_sync(fetcher.pull(PullRequest(*LMQ[:2], 0, count=80, max_bytes=1 << 30)))
    assert [bytes(record) for record in result.batch.records()] == [
        row.record for row in builder.truth[LMQ].rows
    ]
    assert len(source.fetched) == len(QUEUES)  # a parent each: these are read side by side


MIB = 1024 * 1024
LIMITS = CoalescingLimits(gap_ratio=0.125, piece_bytes=4 * MIB, get_bytes_max=16 * MIB)


@st.composite
def _wanted(draw: st.DrawFn) -> list[Range]:
    ranges, at = [], draw(st.integers(0, 1000))
    for _ in range(draw(st.integers(0, 60))):
        at += draw(st.one_of(st.just(0), st.integers(0, 2000)))
        length = draw(st.integers(1, 3000))
        ranges.append(Range(at, length))
        at += length
    return ranges


_limits = st.builds(
    lambda ratio, piece, more: CoalescingLimits(ratio, piece, piece + more),
    st.floats(0, 0.9),
    st.integers(1, 8000),
    st.integers(0, 8000),
)


@given(_wanted(), _limits)
def test_every_plan_keeps_its_promises(wanted: list[Range], limits: CoalescingLimits) -> None:
    plans = plan_gets(wanted, limits)
    assert [number for plan in plans for number in range(plan.first, plan.end)] == list(range(len(wanted)))
    for plan in plans:
        mine = wanted[plan.first : plan.end]
        assert plan.offset == mine[0].offset
        assert plan.offset + plan.length == mine[-1].end
        assert plan.gap_bytes == plan.length - sum(item.length for item in mine)
        assert plan.gap_bytes <= limits.gap_ratio * plan.length
        assert plan.length <= limits.get_bytes_max or len(mine) == 1
    assert all(before.offset + before.length <= after.offset for before, after in pairwise(plans))


@given(st.lists(st.integers(1, 512 * 1024), min_size=1, max_size=200))
def test_a_span_without_gaps_is_cut_into_about_equal_pieces(lengths: list[int]) -> None:
    wanted, at = [], 16
    for length in lengths:
        wanted.append(Range(at, length))
        at += length
    plans = plan_gets(wanted, LIMITS)
    total = sum(lengths)
    assert sum(plan.length for plan in plans) == total
    assert len(plans) == max(1, round(total / LIMITS.piece_bytes))
    assert max(plan.length for plan in plans) - min(plan.length for plan in plans) <= 2 * max(lengths)


def test_what_is_little_longer_than_a_piece_stays_one_request() -> None:
    blocks = [Range(16 + 100_000 * number, 100_000) for number in range(50)]  # 4.8 MiB
    assert len(plan_gets(blocks, LIMITS)) == 1


def test_a_small_gap_is_read_over_and_a_large_one_is_not() -> None:
    small = [Range(0, 900), Range(1000, 900)]
    large = [Range(0, 900), Range(1300, 900)]
    assert len(plan_gets(small, LIMITS)) == 1
    assert len(plan_gets(large, LIMITS)) == 2
    assert plan_gets(small, CoalescingLimits(0.0, MIB, MIB))[1].offset == 1000


def test_a_long_start_does_not_pay_for_a_gap_in_its_last_piece() -> None:
    """One ratio over all would let a gap of a MiB ride on 16 MiB before it; each request must be worth it."""
    wanted = [Range(number * MIB, MIB) for number in range(16)] + [Range(17 * MIB, 1000)]
    assert all(plan.gap_bytes <= plan.length / 8 for plan in plan_gets(wanted, LIMITS))


def test_a_range_above_the_bound_goes_alone() -> None:
    plans = plan_gets([Range(0, 10), Range(10, 40 * MIB), Range(40 * MIB + 10, 10)], LIMITS)
    assert [plan.length for plan in plans] == [10, 40 * MIB, 10]


@pytest.mark.parametrize("wanted", [[Range(0, 10), Range(5, 10)], [Range(10, 1), Range(0, 1)]])
def test_ranges_out_of_order_are_refused(wanted: list[Range]) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        plan_gets(wanted, LIMITS)
