"""What must hold of the read path whatever the store and the consumers do (seeded; see reading_simulation.py)."""

import random
from dataclasses import replace

import pytest

from fetcher.prefetch.readers import ReaderKey
from fetcher.rows.pull import PullRequest
from tests.fetcher.reading_simulation import (
    BLOCK_BYTES,
    FETCH,
    LMQ,
    PREFETCH,
    QUEUES,
    Consumer,
    Simulation,
    archive,
)

SEEDS = range(4)


def fast(_pull: int) -> float:
    return 0.002


def slow(_pull: int) -> float:
    return 1.0


def assert_all_delivered(simulation: Simulation) -> None:
    for consumer in simulation.consumers:
        rows = simulation.builder.truth[consumer.queue].rows
        assert consumer.is_done, consumer.name
        assert consumer.got == [row for row in rows if row.offset >= consumer.start], consumer.name


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("failing", [0.0, 0.1])
def test_every_message_is_delivered_once_in_order(seed: int, failing: float) -> None:
    # Queues share blocks of set objects: read at different times they would count as fetched twice.
    simulation = Simulation(archive(with_sets=False), seed, failing=failing)
    for number, queue in enumerate(QUEUES):
        simulation.add(
            Consumer(f"c{number}", queue, slow if number % 3 == 2 else fast, count=8 * (1 + number % 4))
        )
    simulation.run()
    assert_all_delivered(simulation)
    statistics = simulation.source.statistics()
    assert statistics.bytes_fetched_twice <= statistics.bytes_fetched / 100
    assert statistics.peak_bytes <= FETCH.memory_bytes
    assert statistics.blocks_loading == 0
    assert (failing > 0) == any(consumer.errors for consumer in simulation.consumers)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_lmq_comes_out_of_its_parents_blocks(seed: int) -> None:
    simulation = Simulation(archive(), seed, failing=0.05)
    simulation.add(Consumer("light", LMQ, fast))
    simulation.add(Consumer("parent", QUEUES[0], slow))
    simulation.run()
    assert_all_delivered(simulation)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fast_consumer_seldom_waits_once_its_window_has_grown(seed: int) -> None:
    def waits(enabled: bool) -> tuple[int, int]:
        simulation = Simulation(archive(), seed, prefetch=replace(PREFETCH, enabled=enabled))
        consumer = simulation.add(Consumer("fast", QUEUES[0], lambda pull: 0.02, count=8))
        simulation.run()
        assert_all_delivered(simulation)
        return simulation.fetcher.counters.waited, consumer.pulls

    ahead, pulls = waits(True)
    on_demand, _ = waits(False)
    assert ahead < on_demand / 2
    assert ahead <= 0.2 * pulls


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stalled_consumer_holds_a_bounded_amount_and_halves_its_window(seed: int) -> None:
    simulation = Simulation(archive(), seed)
    stalled = simulation.add(Consumer("stalled", QUEUES[2], lambda pull: 0.02 if pull < 20 else 1e9))
    simulation.run(5.0)
    assert stalled.pulls == 20
    window_bytes = max(PREFETCH.window_max_bytes, BLOCK_BYTES)
    assert 0 < simulation.fetcher.prefetcher.unread_bytes <= window_bytes + BLOCK_BYTES
    assert simulation.source.held_bytes <= 2 * window_bytes
    reader = simulation.fetcher.readers.find(ReaderKey("stalled", QUEUES[2]))
    assert reader is not None
    before = reader.window.size
    other = simulation.add(Consumer("other", QUEUES[3], slow))  # the simulation continues
    simulation.run(80.0)
    assert other.is_done
    assert simulation.fetcher.prefetcher.unread_bytes == 0
    assert simulation.source.statistics().expired_unread > 0
    assert reader.window.size == max(before // 2, stalled.count)
    assert simulation.fetcher.prefetcher.counters.expired_bytes > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_it_continues_after_a_stall_without_a_message_lost(seed: int) -> None:
    simulation = Simulation(archive(), seed)
    simulation.add(Consumer("stalling", QUEUES[4], lambda pull: 60.0 if pull % 12 == 0 else 0.02))
    simulation.add(Consumer("other", QUEUES[5], slow))
    simulation.run()
    assert_all_delivered(simulation)


def test_random_single_reads_fetch_their_block_and_nothing_else() -> None:
    simulation = Simulation(archive(), 1)
    rand = random.Random(5)
    rows = simulation.builder.truth[QUEUES[0]].rows
    for _ in range(60):
        row = rand.choice(rows)
        before = simulation.source.statistics()
        result = simulation.clock.run_one(
            simulation.fetcher.pull(
                PullRequest(*QUEUES[0][:2], row.offset, count=1, max_bytes=1 << 30, group="single")
            )
        )
        simulation.run(simulation.clock.time_s + 1)
        after = simulation.source.statistics()
        assert list(map(bytes, result.batch.records())) == [row.record]
        assert after.requests - before.requests <= 2  # the object's tail and the block, cold; none, warm
        assert after.cached_bytes - before.cached_bytes <= BLOCK_BYTES + 400
    assert simulation.fetcher.prefetcher.counters.fetches == 0


@pytest.mark.soak
def test_a_thousand_slow_consumers_stay_within_the_budget() -> None:
    """Buffered they would take twice the budget."""
    simulation = Simulation(archive(), 1, failing=0.01)
    rand = random.Random(1)
    for number in range(1000):
        queue = rand.choice(QUEUES[2:])
        rows = simulation.builder.truth[queue].rows
        first = rand.randrange(len(rows) - 200)
        think = rand.uniform(0.5, 4.0)
        simulation.add(
            Consumer(f"slow-{number}", queue, lambda pull, s=think: s, rows[first].offset, pulls_max=4)  # type: ignore[misc]
        )
    simulation.run()
    assert all(consumer.is_done and len(consumer.got) >= 4 * 32 for consumer in simulation.consumers)
    statistics = simulation.source.statistics()
    assert statistics.peak_bytes <= FETCH.memory_bytes
    assert simulation.fetcher.readers.buffered_bytes <= PREFETCH.buffered_bytes
    prefetcher = simulation.fetcher.prefetcher
    assert prefetcher.unread_bytes <= PREFETCH.memory_bytes + 2 * BLOCK_BYTES  # planned by average sizes
    assert statistics.blocks_loading == 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_seeds(seed: int) -> None:
    rand = random.Random(seed)
    simulation = Simulation(archive(), seed, failing=rand.choice([0.0, 0.02, 0.3]))
    for number in range(rand.randrange(1, 20)):
        queue = rand.choice([*QUEUES, LMQ])
        think = rand.choice([0.001, 0.02, 0.5, 5.0])
        stall = rand.choice([1 << 30, 7, 20])
        simulation.add(
            Consumer(
                f"c{number}",
                queue,
                lambda pull, s=think, n=stall: 45.0 if pull % n == 0 else s,  # type: ignore[misc]
                count=rand.choice([1, 8, 32, 100]),
            )
        )
    simulation.run()
    assert_all_delivered(simulation)
    assert simulation.source.statistics().peak_bytes <= FETCH.memory_bytes
