"""The memory cache: bounds, expiry, order of eviction, checksums on hand-out, shrinking."""

from __future__ import annotations

import fastcrc
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fetcher.blocks.block_cache import (
    Block,
    BlockCache,
    BlockCacheLimits,
    BlockKey,
    DroppedUnread,
    DropReason,
)
from tests.fetcher.virtual import VirtualClock


def _key(number: int) -> BlockKey:
    return BlockKey("data/x.so", number)


class Bench:
    """A cache, its clock and what it reported."""

    def __init__(self, bytes_max: int = 1000) -> None:
        self.clock = VirtualClock()
        self.dropped: list[DroppedUnread] = []
        self.cache = BlockCache(
            BlockCacheLimits(bytes_max), clock_s=self.clock.now_s, on_unread_dropped=self.dropped.extend
        )

    def put(self, number: int, byte_count: int = 100, *, is_read: bool = False) -> Block:
        block = np.frombuffer(bytes([number % 256]) * byte_count, np.uint8)
        self.cache.put(_key(number), block, fastcrc.crc32.iscsi(block), is_read=is_read)
        return block

    def held(self) -> list[int]:
        return [number for number in range(100) if _key(number) in self.cache]


def test_unread_blocks_expire_by_age_and_are_reported() -> None:
    bench = Bench()
    bench.put(1)
    bench.clock.run(100)
    bench.put(2)
    bench.clock.run(180)
    bench.cache.expire()
    assert bench.held() == [2]
    assert bench.dropped == [DroppedUnread(_key(1), 100, DropReason.EXPIRED)]
    assert bench.cache.counts.expired_unread == 1 and bench.cache.held_bytes == 100


def test_read_blocks_expire_after_the_last_reader_and_silently() -> None:
    bench = Bench()
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


def test_who_only_looks_does_not_make_a_block_read() -> None:
    bench = Bench()
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


def test_room_is_made_of_read_blocks_only_by_default() -> None:
    bench = Bench()
    bench.put(1, is_read=True)
    bench.put(2)
    assert bench.cache.reclaim(500, unread_too=False) == 100
    assert bench.held() == [2]
    assert bench.cache.reclaim(50, unread_too=True) == 100
    assert bench.held() == []


def test_a_bit_flip_in_memory_is_found_when_the_block_is_handed_out() -> None:
    bench = Bench()
    block = np.arange(256, dtype=np.uint8)
    bench.cache.put(_key(1), block, fastcrc.crc32.iscsi(block), is_read=False)
    assert bench.cache.get(_key(1), is_read=True) is block
    block[77] ^= 4
    assert bench.cache.get(_key(1), is_read=True) is None
    assert bench.cache.counts.corrupt == 1
    assert bench.held() == [] and bench.cache.held_bytes == 0


def test_two_blocks_swapped_are_found_too() -> None:
    bench = Bench()
    first, second = bench.put(1), bench.put(2)
    entries = bench.cache._unread
    entries[_key(1)].block, entries[_key(2)].block = second, first
    assert bench.cache.get(_key(1), is_read=True) is None
    assert bench.cache.get(_key(2), is_read=True) is None
    assert bench.cache.counts.corrupt == 2


def test_blocks_are_dropped_by_key_whether_read_or_not() -> None:
    bench = Bench()
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
