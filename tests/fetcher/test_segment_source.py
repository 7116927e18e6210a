"""The block source by a virtual clock: requests made, single load, memory, damage, failures, cancellation."""

import gc
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from fetcher.blocks import adjacent_prefetch
from fetcher.blocks.block_cache import BlockKey, DropReason
from fetcher.blocks.index_cache import CHECK_S
from fetcher.io.request_scheduler import Priority
from tests.fetcher.segments import segment
from tests.fetcher.source_bench import MIB, SourceBench
from tests.fetcher.virtual import HeldPool
from tiered.errors import (
    CorruptionError,
    NotFoundError,
    ThrottledError,
    TieredError,
    UnansweredError,
    UnavailableError,
    UsageError,
)

PLAIN = segment("data/aa/plain.so", blocks=32, block_bytes=16 * 1024)
OTHER = segment("data/bb/other.so", blocks=32, block_bytes=16 * 1024)
NOISE = segment("data/cc/noise.so", blocks=8, block_bytes=16 * 1024, noise=1.0)


@pytest.fixture(autouse=True)
def _ordinary_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of these objects are not small ones, which are read with those after them."""
    monkeypatch.setattr(adjacent_prefetch, "RUN_BYTES_MAX", 256 * 1024)


def _bench(**settings: Any) -> SourceBench:
    return SourceBench([PLAIN, OTHER, NOISE], **settings)


@pytest.fixture
def bench() -> SourceBench:
    return _bench()


@pytest.fixture
def index(bench: SourceBench) -> Any:
    """The tail of PLAIN, once it has been read."""
    return bench.index(PLAIN.key)


# -- requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", [PLAIN, NOISE])
def test_a_cold_read_is_one_request_for_the_tail_and_one_for_the_blocks(
    bench: SourceBench, item: Any
) -> None:
    index = bench.index(item.key)
    assert bench.read(index, 2, 7) == bench.expected(index, 2, 7)
    assert len(bench.reader.gets) == 2
    assert bench.clock.time_s == pytest.approx(2 * bench.reader.latency_s, rel=0.01)
    found = bench.source.statistics()
    assert (found.requests, found.waits, found.misses) == (2, 2, 6)
    assert found.bytes_fetched == sum(get[3] for get in bench.reader.gets)
    assert found.bytes_fetched_twice == 0
    bench.check_at_rest()


def test_a_warm_read_never_waits(bench: SourceBench, index: Any) -> None:
    bench.read(index, 0, 8)
    reads: list[Coroutine[Any, Any, Any]] = [
        bench.source.blocks_at(index, 0, range(3, 6), Priority.USER),
        bench.source.index(PLAIN.key, len(PLAIN.content), PLAIN.tail_bytes, Priority.USER),
    ]
    for coroutine in reads:
        with pytest.raises(StopIteration):
            coroutine.send(None)
    assert bench.source.statistics().waits == 2  # those of the cold reads
    assert len(bench.reader.gets) == 2


def test_blocks_are_read_only_and_outlive_the_cache(bench: SourceBench) -> None:
    index = bench.index(NOISE.key)
    (block,) = bench.clock.run_one(bench.source.blocks_at(index, 0, range(3, 4), Priority.USER))
    assert not block.flags.writeable
    assert not bench.budget.try_charge(bench.budget.total_bytes, Priority.USER)
    assert bench.source.held_bytes == 0
    assert block.tobytes() == NOISE.block(3)
    assert bench.budget.charged_bytes == block.nbytes + bench.source.statistics().index_bytes + index.nbytes
    del block, index
    gc.collect()
    assert bench.budget.charged_bytes == 0


def test_a_long_span_is_fetched_in_concurrent_pieces() -> None:
    big = segment("data/big.so", blocks=64, block_bytes=64 * 1024, noise=0.9)
    bench = SourceBench([big], piece_bytes=512 * 1024, user_requests=16)
    index = bench.index(big.key)
    before_s = bench.clock.time_s
    assert bench.read(index, 0, len(index.blocks)) == bench.expected(index, 0, len(index.blocks))
    lengths = [get[3] for get in bench.reader.gets[1:]]
    assert len(lengths) == 7 and bench.reader.in_flight_max == 7
    assert max(lengths) - min(lengths) <= 64 * 1024
    assert bench.clock.time_s - before_s == pytest.approx(bench.reader.latency_s, rel=0.01)


def test_near_blocks_share_a_request_over_unwanted_bytes(bench: SourceBench, index: Any) -> None:
    numbers = [*range(9), *range(10, 20), 30]
    blocks = bench.clock.run_one(bench.source.blocks_at(index, 0, numbers, Priority.USER))
    assert [block.tobytes() for block in blocks] == [PLAIN.block(number) for number in numbers]
    assert len(bench.reader.gets) == 3  # tail, 0-19 over block 9, block 30
    assert bench.source.statistics().gap_bytes == PLAIN.span(9).length
    assert BlockKey(index.key, 9) not in bench.source._cache


def test_every_block_and_tail_is_fetched_once_however_many_want_it(bench: SourceBench) -> None:
    tail = [
        bench.clock.start(bench.source.index(PLAIN.key, len(PLAIN.content), PLAIN.tail_bytes, priority))
        for priority in [*Priority] * 5
    ]
    bench.clock.run()
    index = tail[0].result()
    assert all(found.result() is index for found in tail) and len(bench.reader.gets) == 1
    reads = [bench.begin(index, first, first + 8, Priority(first % 3)) for first in range(20)]
    bench.clock.run()
    for first, read in enumerate(reads):
        assert [block.tobytes() for block in read.result()] == bench.expected(index, first, first + 8)
    found = bench.source.statistics()
    assert found.bytes_fetched_twice == 0
    assert sum(get[3] for get in bench.reader.gets[1:]) == sum(PLAIN.span(n).length for n in range(27))
    bench.check_at_rest()


def test_a_user_waits_for_what_is_being_fetched_ahead_and_makes_it_urgent() -> None:
    bench = _bench(prefetch_requests=1, piece_bytes=64 * 1024)
    index = bench.index(PLAIN.key)
    ahead = bench.begin(index, 0, 32, Priority.PREFETCH)
    bench.clock.run(bench.clock.time_s + 0.01)
    assert len(bench.reader.gets) == 2  # the first piece; others wait for their turn
    user = bench.begin(index, 31, 32)
    bench.clock.run(bench.clock.time_s + 0.06)
    assert user.done() and not ahead.done()
    assert user.result()[0].tobytes() == PLAIN.block(31)
    bench.clock.run()
    assert ahead.done() and bench.source.statistics().bytes_fetched_twice == 0
    assert bench.source.statistics().joined == 1


def test_a_users_blocks_are_decoded_before_prefetched_ones() -> None:
    pool = HeldPool()
    bench = _bench(decode_pool=pool)
    index = bench.clock.start(
        bench.source.index(PLAIN.key, len(PLAIN.content), PLAIN.tail_bytes, Priority.USER)
    )
    bench.clock.run()
    pool.run()
    bench.clock.run()
    ahead = [bench.begin(index.result(), first, first + 4, Priority.PREFETCH) for first in (0, 8, 16)]
    bench.clock.run()
    assert len(pool.runs) == 3, "arrived, not decoded"
    joins, reads = bench.begin(index.result(), 16, 20), bench.begin(index.result(), 30, 31)
    bench.clock.run()
    for read in (joins, reads, *ahead[:2]):
        assert not read.done()
        pool.run()
        bench.clock.run()
        assert read.done()
    assert ahead[2].done()
    assert [block.tobytes() for block in joins.result()] == bench.expected(index.result(), 16, 20)
    bench.check_at_rest()


def test_maintenance_leaves_nothing_in_memory(bench: SourceBench, index: Any) -> None:
    assert bench.read(index, 0, 8, Priority.BACKGROUND) == bench.expected(index, 0, 8)
    assert bench.source.held_bytes == 0
    bench.check_at_rest()
    together = [bench.begin(index, 8, 9, priority) for priority in (Priority.BACKGROUND, Priority.USER)]
    bench.clock.run()
    assert all(read.done() for read in together)
    assert BlockKey(index.key, 8) in bench.source._cache  # a user came too


def test_a_bandwidth_cap_is_kept_within_five_per_cent() -> None:
    big = segment("data/big.so", blocks=128, block_bytes=64 * 1024, noise=0.9)
    rate = 2 * MIB
    bench = SourceBench([big], bytes_per_s=rate)
    index = bench.index(big.key)
    began_s = bench.clock.time_s
    bench.read(index, 0, len(index.blocks))
    taken_s = bench.clock.time_s - began_s
    assert sum(get[3] for get in bench.reader.gets[1:]) / taken_s == pytest.approx(rate, rel=0.05)


# -- damage -----------------------------------------------------------------------------------------------------


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_block_damaged_on_its_way_is_fetched_once_more(bench: SourceBench, index: Any) -> None:
    span, gets = PLAIN.span(4), []

    def damage_once(key: str, offset: int, data: bytes) -> bytes:
        gets.append(offset)
        return _flipped(data, span.offset - offset + 3) if len(gets) == 1 else data

    bench.reader.damage = damage_once
    assert bench.read(index, 0, 8) == bench.expected(index, 0, 8)
    assert gets == [PLAIN.span(0).offset, span.offset]  # the second time only what was damaged
    found = bench.source.statistics()
    assert found.corrupt_fetched == 1 and found.bytes_fetched_twice == span.length
    bench.check_at_rest(index)


def test_a_block_damaged_in_the_store_is_an_error_that_names_it_and_others_are_unaffected(
    bench: SourceBench, index: Any
) -> None:
    span = PLAIN.span(4)
    bench.reader.objects[PLAIN.key] = _flipped(PLAIN.content, span.offset + 3)
    where = rf"data/aa/plain\.so: block 4 \[{span.offset}, {span.offset + span.length}\) fails its CRC32C"
    for _ in range(2):
        with pytest.raises(CorruptionError, match=where):
            bench.read(index, 0, 8)
    assert bench.read(index, 5, 9) == bench.expected(index, 5, 9)
    other = bench.index(OTHER.key)
    assert bench.read(other, 0, 32) == bench.expected(other, 0, 32)
    bench.check_at_rest(index)


def test_a_queues_block_in_another_ones_place_is_found(bench: SourceBench, index: Any) -> None:
    mine, foreign = PLAIN.span(4), OTHER.span(4)
    stranger = OTHER.content[foreign.offset : foreign.offset + foreign.length].ljust(mine.length, b"\0")
    content = PLAIN.content
    bench.reader.objects[PLAIN.key] = (
        content[: mine.offset] + stranger[: mine.length] + content[mine.offset + mine.length :]
    )
    with pytest.raises(CorruptionError, match="block 4"):
        bench.read(index, 4, 5)


@pytest.mark.parametrize("length", [0, 5, -1])
def test_an_answer_of_another_length_is_found(bench: SourceBench, index: Any, length: int) -> None:
    bench.reader.damage = lambda key, offset, data: data[:length]
    with pytest.raises(CorruptionError, match=r"plain\.so"):
        bench.read(index, 0, 3)
    bench.reader.damage = lambda key, offset, data: data
    assert bench.read(index, 0, 3) == bench.expected(index, 0, 3)


def test_a_damaged_tail_is_fetched_once_more_and_then_an_error(bench: SourceBench) -> None:
    bench.reader.damage = lambda key, offset, data: _flipped(data, 3) if len(bench.reader.gets) == 1 else data
    index = bench.index(PLAIN.key)
    assert len(bench.reader.gets) == 2 and bench.read(index, 0, 1) == bench.expected(index, 0, 1)
    bench.reader.damage = lambda key, offset, data: _flipped(data, len(data) - 60)  # in the footer
    with pytest.raises(CorruptionError, match=r"data/bb/other\.so"):
        bench.index(OTHER.key)
    with pytest.raises(CorruptionError, match="of 20 of its 10 bytes"):
        bench.clock.run_one(bench.source.index("data/x.so", 10, 20, Priority.USER))
    bench.check_at_rest()


def test_a_bit_flip_in_a_tail_in_memory_is_found_too(
    bench: SourceBench, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_page_bytes", _flipped(index.page_bytes, 9))
    assert bench.index(PLAIN.key) is index  # looked at a moment ago: then decoding a page is what finds it
    with pytest.raises(CorruptionError, match="column page"):
        index.row_columns(0)
    bench.clock.run(bench.clock.time_s + 2 * CHECK_S)
    again = bench.index(PLAIN.key)
    assert again is not index and len(bench.reader.gets) == 2
    assert bench.source.statistics().corrupt_memory == 1
    assert again.row_columns(0).size.sum() == len(PLAIN.raw)


def test_a_bit_flip_in_memory_is_dropped_counted_and_fetched_again(bench: SourceBench) -> None:
    index = bench.index(NOISE.key)
    bench.read(index, 0, 4)
    entry = bench.source._cache._read[BlockKey(index.key, 2)]
    entry.block.flags.writeable = True
    entry.block[7] ^= 1
    del entry
    assert bench.read(index, 0, 4) == bench.expected(index, 0, 4)
    found = bench.source.statistics()
    assert found.corrupt_memory == 1 and found.bytes_fetched_twice == NOISE.span(2).length
    bench.check_at_rest()


# -- disk -------------------------------------------------------------------------------------------------------


def test_a_restart_reads_from_disk_and_asks_the_store_for_the_tail_only(tmp_path: Path) -> None:
    first = _bench(disk=tmp_path)
    first.read(first.index(PLAIN.key), 0, 8)
    again = _bench(disk=tmp_path)
    index = again.index(PLAIN.key)
    assert again.read(index, 0, 8) == again.expected(index, 0, 8)
    assert len(again.reader.gets) == 1
    assert again.source.statistics().disk_hits == 8
    assert again.read(index, 6, 12) == again.expected(index, 6, 12)
    assert len(again.reader.gets) == 2
    again.check_at_rest()


def test_damage_on_disk_is_dropped_counted_and_fetched_again(tmp_path: Path) -> None:
    first = _bench(disk=tmp_path)
    first.read(first.index(PLAIN.key), 0, 8)
    first.read(first.index(OTHER.key), 0, 8)
    rng, files = random.Random(1), sorted(tmp_path.iterdir())
    files[0].rename(tmp_path / "x")
    files[8].rename(files[0])  # two swapped: of different objects
    (tmp_path / "x").rename(files[8])
    files[1].write_bytes(files[1].read_bytes()[:-9])
    files[2].unlink()
    files[3].write_bytes(_flipped(files[3].read_bytes(), rng.randrange(files[3].stat().st_size)))
    again = _bench(disk=tmp_path)
    for key in (PLAIN.key, OTHER.key):
        index = again.index(key)
        assert again.read(index, 0, 8) == again.expected(index, 0, 8)
    found = again.source.statistics()
    assert found.corrupt_disk == 4 and found.disk_hits == 11
    again.check_at_rest()
    third = _bench(disk=tmp_path)
    index = third.index(PLAIN.key)
    assert third.read(index, 0, 8) == third.expected(index, 0, 8)
    assert third.source.statistics().disk_hits == 8  # what was fetched again is there again


def test_a_damaged_block_never_reaches_the_disk(tmp_path: Path) -> None:
    bench = _bench(disk=tmp_path)
    index = bench.index(PLAIN.key)
    bench.reader.objects[PLAIN.key] = _flipped(PLAIN.content, PLAIN.span(4).offset)
    with pytest.raises(CorruptionError):
        bench.read(index, 0, 8)
    assert bench.disk is not None
    assert [number for number in range(8) if BlockKey(index.key, number) in bench.disk] == [
        0,
        1,
        2,
        3,
        5,
        6,
        7,
    ]


# -- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [UnansweredError("lost"), ThrottledError("slow down"), NotFoundError("gone")]
)
def test_a_failed_fetch_is_raised_and_leaves_nothing_behind(error: TieredError) -> None:
    bench = _bench(piece_bytes=64 * 1024)
    index = bench.index(PLAIN.key)
    bench.reader.failures = {2: error}  # the second piece
    with pytest.raises(type(error)):
        bench.read(index, 0, 32)
    bench.clock.run()
    bench.check_at_rest()
    before = len(bench.reader.gets)
    assert bench.read(index, 0, 32) == bench.expected(index, 0, 32)
    assert len(bench.reader.gets) == before + 1  # only what had failed
    assert bench.source.statistics().bytes_fetched_twice == 0


def test_a_user_who_joined_a_failing_prefetch_learns_of_it_and_may_try_again(
    bench: SourceBench, index: Any
) -> None:
    bench.reader.failures = {1: UnansweredError("lost")}
    ahead, user = bench.begin(index, 0, 4, Priority.PREFETCH), bench.begin(index, 2, 3)
    bench.clock.run()
    for read in (ahead, user):
        with pytest.raises(UnansweredError):
            read.result()
    assert bench.read(index, 2, 3) == bench.expected(index, 2, 3)
    bench.check_at_rest()


def test_a_failed_tail_is_not_cached(bench: SourceBench) -> None:
    bench.reader.failures = {0: UnansweredError("lost")}
    with pytest.raises(UnansweredError):
        bench.index(PLAIN.key)
    assert bench.index(PLAIN.key).key == PLAIN.key
    bench.check_at_rest()


def test_a_decoder_that_fails_unexpectedly_is_raised_not_waited_for(
    bench: SourceBench, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(index, "decode_each", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        bench.read(index, 0, 3)
    bench.check_at_rest()


def test_a_cancelled_reader_leaves_its_blocks_to_others(bench: SourceBench, index: Any) -> None:
    cancelled = bench.source.blocks_at(index, 0, range(4), Priority.USER)
    cancelled.send(None)
    other = bench.begin(index, 2, 6)
    cancelled.close()
    bench.clock.run()
    assert [block.tobytes() for block in other.result()] == bench.expected(index, 2, 6)
    del other
    bench.check_at_rest()
    assert bench.read(index, 0, 4) == bench.expected(index, 0, 4)
    assert bench.source.statistics().bytes_fetched_twice == 0


def test_a_closed_source_still_answers_from_memory_and_refuses_the_rest(
    bench: SourceBench, index: Any
) -> None:
    bench.read(index, 0, 4)
    bench.source.close()
    assert bench.read(index, 0, 4) == bench.expected(index, 0, 4)
    with pytest.raises(UnavailableError, match="closed"):
        bench.read(index, 4, 5)
    bench.check_at_rest()


# -- memory -----------------------------------------------------------------------------------------------------

SMALL = {"memory_bytes": 600 * 1024, "cache_bytes": 512 * 1024, "index_cache_bytes": 64 * 1024}


def test_the_budget_holds_while_far_more_is_read_than_fits() -> None:
    bench = _bench(**SMALL)
    for _ in range(3):
        for key in (PLAIN.key, OTHER.key):
            index = bench.index(key)
            for first in range(0, 32, 4):
                assert bench.read(index, first, first + 4) == bench.expected(index, first, first + 4)
    assert bench.budget.peak_bytes <= bench.budget.total_bytes
    del index
    bench.check_at_rest()


def test_a_read_larger_than_all_memory_says_so() -> None:
    bench = _bench(**SMALL)
    index = bench.index(PLAIN.key)
    refusal = r"plain\.so cannot be read: 32 of its blocks need \d+ bytes at once.*fetch\.memory_bytes"
    with pytest.raises(UsageError, match=refusal):
        bench.read(index, 0, 32)
    bench.check_at_rest(index)


def test_a_single_block_larger_than_all_memory_is_read_alone() -> None:
    huge = segment("data/huge.so", blocks=3, block_bytes=512 * 1024)
    bench = SourceBench([huge, PLAIN], memory_bytes=400 * 1024, cache_bytes=128 * 1024)
    plain = bench.index(PLAIN.key)
    reads = [bench.begin(plain, first, first + 2) for first in range(0, 10, 2)]
    bench.clock.run()
    for read in reads:
        assert len(read.result()) == 2
    del reads, read, plain
    assert bench.read(huge.index, 1, 2) == [huge.block(1)]
    assert bench.budget.charged_bytes == 0  # too large for the cache, and all else had to go
    bench.check_at_rest()


def test_a_user_waits_for_memory_for_a_limited_time() -> None:
    bench = _bench(**{**SMALL, "memory_bytes": 520 * 1024}, memory_wait_ms=2000)
    index = bench.index(PLAIN.key)
    held = [
        bench.clock.run_one(bench.source.blocks_at(index, 0, range(n, n + 4), Priority.USER))
        for n in range(0, 28, 4)
    ]
    began_s = bench.clock.time_s
    with pytest.raises(ThrottledError, match="no memory for"):
        bench.read(index, 28, 32)
    assert bench.clock.time_s - began_s == pytest.approx(2.0)
    waiting = bench.begin(index, 28, 32)
    bench.clock.call_at(bench.clock.time_s + 1, held.clear)
    bench.clock.run()
    assert [block.tobytes() for block in waiting.result()] == bench.expected(index, 28, 32)
    assert bench.source.statistics().memory_refused == 1
    assert bench.budget.peak_bytes <= bench.budget.total_bytes


def test_a_reader_cancelled_while_it_waits_for_memory_frees_its_place() -> None:
    bench = _bench(**SMALL)
    index = bench.index(PLAIN.key)
    held = [
        bench.clock.run_one(bench.source.blocks_at(index, 0, range(n, n + 4), Priority.USER))
        for n in range(0, 24, 4)
    ]
    first = bench.source.blocks_at(index, 0, range(24, 32), Priority.USER)
    first.send(None)
    first.close()
    second = bench.source.blocks_at(index, 0, range(24, 32), Priority.USER)
    second.send(None)
    held.clear()  # the second is admitted, and cancelled before it runs
    second.close()
    bench.clock.run()
    del first, second
    bench.check_at_rest()
    assert bench.read(index, 24, 32) == bench.expected(index, 24, 32)


def test_prefetch_takes_no_memory_from_prefetched_blocks() -> None:
    bench = _bench(**SMALL)
    index = bench.index(PLAIN.key)
    for first in range(0, 20, 4):
        bench.read(index, first, first + 4, Priority.PREFETCH)
    unread = list(bench.source._cache._unread)
    with pytest.raises(ThrottledError):
        bench.read(index, 20, 32, Priority.PREFETCH)
    assert list(bench.source._cache._unread) == unread and bench.dropped == []
    bench.read(index, 20, 32)  # but a user may
    assert {drop.reason for drop in bench.dropped} == {DropReason.EVICTED}
    assert bench.budget.peak_bytes <= bench.budget.total_bytes


def test_unread_prefetched_blocks_expire_and_is_reported(bench: SourceBench, index: Any) -> None:
    bench.read(index, 0, 4, Priority.PREFETCH)
    bench.read(index, 2, 3)
    bench.clock.run(bench.clock.time_s + 170)
    bench.source.expire()
    cache = bench.source._cache
    assert BlockKey(index.key, 0) in cache and BlockKey(index.key, 2) not in cache
    bench.clock.run(bench.clock.time_s + 20)
    bench.read(index, 10, 11)  # any read looks after the clock
    assert BlockKey(index.key, 0) not in cache
    assert [drop.key.block for drop in bench.dropped] == [0, 1, 3]
    assert bench.source.statistics().expired_unread == 3
