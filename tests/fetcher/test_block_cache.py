"""The memory cache: bounds, expiry, order of eviction, checksums on hand-out, shrinking.

The byte budget: never exceeded, nothing starves, what dies anywhere gives its bytes back.
"""

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import fastcrc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fetcher.blocks.block_cache import (
    Block,
    BlockCache,
    BlockCacheLimits,
    BlockKey,
    DroppedUnread,
    DropReason,
)
from fetcher.blocks.budget import Admission, ByteBudget
from tests.fetcher.virtual import VirtualClock
from tiered.clock import Clock
from tiered.errors import ThrottledError


def _key(number: int) -> BlockKey:
    return BlockKey("data/x.so", number)


class Bench:
    """A cache, its clock and what it reported."""

    def __init__(self, bytes_max: int = 1000) -> None:
        self.clock = VirtualClock()
        self.dropped: list[DroppedUnread] = []
        self.cache = BlockCache(
            BlockCacheLimits(bytes_max),
            clock=Clock(monotonic_s=self.clock.now_s),
            on_unread_dropped=self.dropped.extend,
        )

    def put(self, number: int, byte_count: int = 100, *, is_read: bool = False) -> Block:
        block = np.frombuffer(bytes([number % 256]) * byte_count, np.uint8)
        self.cache.put(_key(number), block, fastcrc.crc32.iscsi(block), is_read=is_read)
        return block

    def held(self) -> list[int]:
        return [number for number in range(100) if _key(number) in self.cache]


@pytest.fixture
def budget() -> ByteBudget:
    return ByteBudget(100)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_unread_blocks_expire_by_age_and_are_reported(bench: Bench) -> None:
    bench.put(1)
    bench.clock.run(100)
    bench.put(2)
    bench.clock.run(180)
    bench.cache.expire()
    assert bench.held() == [2]
    assert bench.dropped == [DroppedUnread(_key(1), 100, DropReason.EXPIRED)]
    assert bench.cache.counts.expired_unread == 1 and bench.cache.held_bytes == 100


def test_read_blocks_expire_after_the_last_reader_and_silently(bench: Bench) -> None:
    bench.put(1)
    bench.clock.run(179)
    assert bench.cache.get(_key(1), is_read=True) is not None
    bench.clock.run(188)
    bench.cache.expire()
    assert bench.cache.get(_key(1), is_read=True) is not None
    bench.clock.run(197)
    bench.cache.expire()
    assert bench.held() == [1]
    bench.clock.run(198)
    bench.cache.expire()
    assert bench.held() == [] and bench.dropped == []


def test_who_only_looks_does_not_make_a_block_read(bench: Bench) -> None:
    bench.put(1)
    bench.clock.run(175)
    assert bench.cache.get(_key(1), is_read=False) is not None
    bench.clock.run(180)
    bench.cache.expire()
    assert [drop.key for drop in bench.dropped] == [_key(1)]


def test_read_blocks_go_before_unread_ones_and_the_longest_unused_first() -> None:
    bench = Bench(400)
    for number in range(4):
        bench.put(number)
        bench.clock.run(number + 1)
    bench.cache.get(_key(1), is_read=True)
    bench.clock.run(10)
    bench.cache.get(_key(2), is_read=True)
    order = []
    for number in range(10, 14):
        before = set(bench.held())
        bench.put(number)
        order += sorted(before - set(bench.held()))
    assert order == [1, 2, 0, 3]
    assert [drop.reason for drop in bench.dropped] == [DropReason.EVICTED] * 2


def test_room_is_made_of_read_blocks_only_by_default(bench: Bench) -> None:
    bench.put(1, is_read=True)
    bench.put(2)
    assert bench.cache.reclaim(500, unread_too=False) == 100
    assert bench.held() == [2]
    assert bench.cache.reclaim(50, unread_too=True) == 100
    assert bench.held() == []


def test_a_bit_flip_in_memory_is_found_when_the_block_is_handed_out(bench: Bench) -> None:
    block = np.arange(256, dtype=np.uint8)
    bench.cache.put(_key(1), block, fastcrc.crc32.iscsi(block), is_read=False)
    assert bench.cache.get(_key(1), is_read=True) is block
    block[77] ^= 4
    assert bench.cache.get(_key(1), is_read=True) is None
    assert bench.cache.counts.corrupt == 1
    assert bench.held() == [] and bench.cache.held_bytes == 0


def test_two_blocks_swapped_are_found_too(bench: Bench) -> None:
    first, second = bench.put(1), bench.put(2)
    entries = bench.cache._unread
    entries[_key(1)].block, entries[_key(2)].block = second, first
    assert bench.cache.get(_key(1), is_read=True) is None
    assert bench.cache.get(_key(2), is_read=True) is None
    assert bench.cache.counts.corrupt == 2


def test_blocks_are_dropped_by_key_whether_read_or_not(bench: Bench) -> None:
    bench.put(1, is_read=True)
    bench.put(2)
    assert bench.cache.drop([_key(1), _key(2), _key(3)]) == 200
    assert bench.held() == []
    assert bench.dropped == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put read", "get", "look", "expire", "wait", "reclaim", "drop"]),
            st.integers(0, 9),
            st.integers(1, 400),
        ),
        max_size=80,
    )
)
def test_the_bound_holds_and_the_sum_is_exact_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    bench, bound = Bench(1000), 1000
    newest: dict[int, Block] = {}
    for what, number, amount in steps:
        if what.startswith("put"):
            newest[number] = bench.put(number, amount, is_read=what == "put read")
        elif what in ("get", "look"):
            found = bench.cache.get(_key(number), is_read=what == "get")
            assert found is None or found is newest[number]
        elif what == "expire":
            bench.cache.expire()
        elif what == "wait":
            bench.clock.run(bench.clock.time_s + amount / 20)
        elif what == "reclaim":
            bench.cache.reclaim(amount, unread_too=number % 2 == 0)
        else:
            bench.cache.drop([_key(number)])
        held = [newest[number].nbytes for number in bench.held()]
        assert bench.cache.held_bytes == sum(held) <= bound
        assert len(bench.cache) == len(held)
    assert bench.cache.counts.corrupt == 0


def _block(byte_count: int) -> NDArray[np.uint8]:
    return np.frombuffer(bytes(byte_count), np.uint8)


def test_an_array_returns_its_charge_when_the_last_view_dies(budget: ByteBudget) -> None:
    assert budget.try_charge(60, 0)
    block = _block(60)
    budget.tie(60, block)
    part = memoryview(block[10:20])
    del block
    assert budget.charged_bytes == 60
    assert bytes(part) == bytes(10)
    del part
    assert budget.charged_bytes == 0


def test_who_waits_is_admitted_when_a_consumer_lets_go(budget: ByteBudget) -> None:
    budget.charge(80, 0)
    block = _block(80)
    budget.tie(80, block)
    waiting = budget.charge(50, 0)
    assert not waiting.future.done()
    del block
    assert waiting.future.done()
    assert budget.charged_bytes == 50
    assert budget.waits == 1


def test_one_charge_above_the_total_is_admitted_alone(budget: ByteBudget) -> None:
    small = budget.charge(1, 0)
    large = budget.charge(500, 0)
    assert small.future.done() and not large.future.done()
    budget.release(1)
    assert large.future.done()
    assert not budget.try_charge(1, 0)
    budget.release(500)
    assert budget.charged_bytes == 0


def test_only_priority_overtakes(budget: ByteBudget) -> None:
    budget.charge(100, 0)
    large, small, urgent = budget.charge(90, 1), budget.charge(5, 1), budget.charge(100, 0)
    assert not budget.try_charge(0, 1)
    budget.release(100)
    assert urgent.future.done() and not large.future.done() and not small.future.done()
    budget.release(100)
    assert large.future.done() and small.future.done()


def test_reclaimers_get_the_missing_bytes_and_the_priority(budget: ByteBudget) -> None:
    budget.charge(70, 0)
    asked = []

    def reclaim(needed: int, priority: int) -> None:
        asked.append((needed, priority))
        if priority == 0:
            budget.release(30)

    budget.add_reclaimer(reclaim)
    budget.add_reclaimer(lambda needed, priority: asked.append((-needed, priority)))
    assert budget.charge(60, 0).future.done()
    assert asked == [(30, 0)]  # the second is not asked once there is room
    assert not budget.try_charge(10, 1)
    assert asked[1:] == [(10, 1), (-10, 1)]


def test_a_waiter_is_served_when_something_became_reclaimable(budget: ByteBudget) -> None:
    budget.charge(100, 0)
    cached: list[NDArray[np.uint8]] = []
    budget.add_reclaimer(lambda needed, priority: cached.clear())
    waiting = budget.charge(40, 0)
    cached.append(_block(100))
    budget.tie(100, cached[0])
    assert not waiting.future.done()
    budget.revise()
    assert waiting.future.done()


def test_a_withdrawn_admission_fails_and_lets_the_next_one_in(budget: ByteBudget) -> None:
    budget.charge(60, 0)
    large, small = budget.charge(100, 0), budget.charge(10, 0)
    assert budget.withdraw(large, ThrottledError("no memory"))
    assert small.future.done()
    with pytest.raises(ThrottledError, match="no memory"):
        large.future.result()
    assert not budget.withdraw(small)


def test_more_returned_than_charged_is_an_error(budget: ByteBudget) -> None:
    budget.charge(10, 0)
    with pytest.raises(ValueError, match="11 bytes released"):
        budget.release(11)


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("charge"), st.integers(0, 130), st.integers(0, 2)),
        st.tuples(st.just("try"), st.integers(0, 130), st.integers(0, 2)),
        st.tuples(st.just("end"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("withdraw"), st.integers(0, 50), st.just(0)),
    ),
    max_size=60,
)


@given(_steps)
def test_the_sum_never_exceeds_the_bound_and_nothing_waits_for_nothing(
    steps: list[tuple[str, int, int]],
) -> None:
    budget, total = ByteBudget(100), 100
    held: list[int] = []
    waiting: list[Admission] = []
    for what, number, priority in steps:
        before = budget.charged_bytes
        if what == "charge":
            waiting.append(budget.charge(number, priority))
        elif what == "try":
            if budget.try_charge(number, priority):
                held.append(number)
        elif what == "end" and held:
            budget.release(held.pop(number % len(held)))
        elif what == "withdraw" and waiting:
            assert budget.withdraw(waiting.pop(number % len(waiting)), ThrottledError("no"))
        admitted = [other for other in waiting if other.future.done()]
        waiting = [other for other in waiting if not other.future.done()]
        held += [other.byte_count for other in admitted]
        assert budget.charged_bytes == sum(held)
        alone = len([byte_count for byte_count in held if byte_count]) <= 1
        assert sum(held) <= total or alone or sum(held) <= before
        if waiting:
            first = min(waiting, key=lambda other: other.priority)
            assert held and sum(held) > 0 and sum(held) + first.byte_count > total


def test_threads_and_the_garbage_collector_together_keep_the_sum() -> None:
    budget = ByteBudget(1000)
    over = []

    def consumer(seed: int) -> None:
        rng = random.Random(seed)
        kept: list[NDArray[np.uint8]] = []
        for _ in range(300):
            byte_count = rng.randrange(1, 120)
            if budget.try_charge(byte_count, rng.randrange(3)):
                block = _block(byte_count)
                budget.tie(byte_count, block)
                kept.append(block)
            if budget.charged_bytes > 1000:
                over.append(budget.charged_bytes)
            while len(kept) > 3 or (kept and rng.random() < 0.5):
                kept.pop(rng.randrange(len(kept)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(consumer, range(16)))
    gc.collect()
    assert not over
    assert budget.peak_bytes <= 1000
    assert budget.charged_bytes == 0


def test_a_thousand_waiters_are_all_served_by_threads_that_come_and_go() -> None:
    budget = ByteBudget(64)
    served = threading.Semaphore(0)

    def consumer(number: int) -> None:
        byte_count = 1 + number % 64
        budget.charge(byte_count, number % 3).future.result(timeout=60)
        budget.release(byte_count)
        served.release()

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(consumer, range(1000)))
    assert budget.charged_bytes == 0 and budget.peak_bytes <= 64
    assert all(served.acquire(blocking=False) for _ in range(1000))
