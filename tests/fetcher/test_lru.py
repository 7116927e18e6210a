"""Caches keyed by names that clients choose: bounded in bytes, the least useful entry goes first."""

import asyncio
import gc
import itertools
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.blocks.budget import ByteBudget
from fetcher.io.request_scheduler import Priority
from fetcher.prefetch.prefetch_window import PullProgress, WindowLimits
from fetcher.prefetch.readers import BUDGET_SHARE, READERS_BYTES_MAX, Reader, ReaderKey, Readers
from fetcher.rows.pull import PullRequest
from rocketmq_tiered.server.groups.client_table import SQL92
from rocketmq_tiered.server.groups.queue_locks import LockTable, MessageQueue
from rocketmq_tiered.server.groups.subscription_filter import CompiledFilters
from rocketmq_tiered.server.pop.pop_delivery import QUEUE_BYTES, UNACKED_BYTES, GroupQueue, PopQueue
from rocketmq_tiered.server.proxy.relay_status import GroupReadStats
from rocketmq_tiered.server.retries.retry_log import RetryMessage, RetryObject, RetryState
from rocketmq_tiered.server.slave.pull_redirect import EmptyReplyPacer
from rocketmq_tiered.server.wire.request import Response
from rocketmq_tiered.server.wire.turns import Turns
from tests.server.serving_peer import request
from tests.sweeps import sweep
from tiered.clock import Clock
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey

LIMITS = WindowLimits(32, 1 << 25, 180.0, 1.0, 1 << 23)
QUEUE = QueueKey("t", 0, 0)
COUNT = 3_000


def key_of(number: int, chars: int = 20) -> ReaderKey:
    return ReaderKey(f"{number:08d}".ljust(chars, "g"), QUEUE)


def opened(readers: Readers, number: int, chars: int = 20) -> Reader:
    """A reader that read twice: what it knows is there."""
    reader = readers.open(key_of(number, chars), number + 0.5)
    reader.window.bytes_per_offset = number + 3.3
    for offset in (number + 1_000, number + 1_300):
        reader.window.pulled(
            PullProgress(offset, offset + 300, offset + 300, 70_000 + number, number + offset / 1000)
        )
    return reader


def test_readers_of_made_up_groups_are_in_the_one_budget() -> None:
    budget = ByteBudget(16 << 20)
    readers = Readers(LIMITS, 1 << 20, budget)
    for number in range(20_000):
        opened(readers, number, chars=255)
        assert readers.kept_bytes == budget._reserved_bytes <= budget.total_bytes // BUDGET_SHARE
        assert budget.peak_bytes <= budget.total_bytes
    assert len(readers) < 2_000
    assert readers.find(key_of(19_999, 255)) is not None


def test_readers_have_their_own_bound_however_large_the_budget_is() -> None:
    readers = Readers(LIMITS, 1 << 20, ByteBudget(1 << 40))
    for number in range(30_000):
        readers.open(key_of(number, 200), 0.0)
    assert readers.kept_bytes <= READERS_BYTES_MAX


def test_readers_that_come_back_outlive_names_that_come_once() -> None:
    readers = Readers(LIMITS, 1 << 20, ByteBudget(16 << 20))
    real = [opened(readers, number) for number in range(100)]
    for reader in real[:50]:
        readers.used(reader, 1e9)  # answered from memory
    for reader in real[50:]:
        readers.open(reader.key, 1e9)
    for number in range(1_000, 20_000):
        opened(readers, number, chars=255)
    assert [readers.find(reader.key) for reader in real] == real


def test_a_reader_without_memory_takes_the_place_of_another_or_is_not_kept() -> None:
    budget = ByteBudget(16 << 20)
    readers = Readers(LIMITS, 1 << 20, budget)
    first = readers.open(key_of(1), 0.0)
    gone: list[Reader] = []
    readers.on_evicted = gone.append
    assert budget.try_charge(budget.total_bytes - budget._reserved_bytes, Priority.USER)
    second = readers.open(key_of(2), 1.0)
    assert gone == [first] and readers.find(key_of(2)) is second
    longer = readers.open(key_of(3, 255), 2.0)
    assert readers.find(longer.key) is None and len(readers) == 0
    assert readers.open(longer.key, 3.0) is not longer
    assert budget._reserved_bytes == readers.kept_bytes == 0
    budget.release(budget.charged_bytes)
    assert readers.open(key_of(4), 4.0) is readers.find(key_of(4))


def test_what_is_set_aside_is_not_there_for_others() -> None:
    budget = ByteBudget(1_000)
    assert budget.reserve(400, Priority.USER)
    # It is larger than the rest, and alone.
    assert not budget.try_charge(601, Priority.USER) or budget.charged_bytes == 601
    budget.release(601)
    assert budget.try_charge(500, Priority.USER)
    assert not budget.try_charge(101, Priority.USER) and not budget.reserve(101, Priority.USER)
    waiting = budget.charge(200, Priority.USER)
    assert not waiting.future.done()
    budget.unreserve(100)
    assert waiting.future.done() and (budget.charged_bytes, budget._reserved_bytes) == (700, 300)


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "put", "used", "drop"]), st.integers(0, 12), st.integers(1, 40))
    ),
    st.booleans(),
)
def test_the_sum_of_all_entries_is_right(steps: list[tuple[str, int, int]], resists_floods: bool) -> None:
    table: Lru[int, int] = Lru(100, resists_floods=resists_floods)
    weights: dict[int, int] = {}
    for what, key, weight in steps:
        if what == "add" and key not in weights:
            weights[key] = weight
            for gone in table.add(key, key, weight):
                del weights[gone]
        elif what == "put":
            weights[key] = weight
            for gone in table.put(key, key, weight):
                del weights[gone]
        elif what == "used":
            table.get(key)
        elif what == "drop":
            table.pop(key)
            weights.pop(key, None)
        assert dict(table) == {key: key for key in weights}
        assert (table.held_bytes, len(table)) == (sum(weights.values()), len(weights))
        assert table.held_bytes <= 100


def test_the_entry_used_longest_ago_goes_first() -> None:
    table: Lru[str, int] = Lru(3)
    for number, key in enumerate("abc"):
        assert table.add(key, number) == []
    assert (table.get("a"), table.peek("b"), table.get("x")) == (0, 1, None)
    assert table.add("d", 3) == [1]
    assert [key for key, _ in table] == ["c", "a", "d"]
    assert table.add("e", 4, 3) == [2, 0, 3] and "e" in table, "as heavy as the bound: alone"
    assert table.add("f", 5, 4) == [4, 5] and not len(table), "heavier: not kept"


# -- what things weigh --------------------------------------------------------------------------------------------


def readers_of(chars: int) -> tuple[object, int]:
    readers = Readers(LIMITS, 1 << 20)
    for number in range(COUNT):
        opened(readers, number, chars)
    return readers, readers.kept_bytes


def locks_of(chars: int) -> tuple[object, int]:
    locks = LockTable(Clock(monotonic_s=itertools.count().__next__))
    for number in range(COUNT):
        names = [f"{number:08d}{letter}".ljust(chars, "é") for letter in "abcd"]
        locks.lock(names[0], names[1], [MessageQueue(names[2], names[3], 1_000 + number)])
    return locks, locks.held_bytes


def popped_of(chars: int) -> tuple[object, int]:
    places: dict[tuple[str, str, int], GroupQueue] = {}
    weight = 0
    for number in range(300):
        state = PopQueue(1_000 * number)
        for offset in range(20):
            state.deliver(1_000 * (number + 1) + offset, 1_700_000_000_000 + offset, 10_000 + number)
        places[f"{number:08d}".ljust(chars, "g"), "t", 1_000 + number] = GroupQueue(state, 1_000 * number)
        weight += QUEUE_BYTES + 20 * UNACKED_BYTES + chars
    return places, weight


def retry_messages_of(chars: int) -> tuple[object, int]:
    state = RetryState()
    for number in range(COUNT):
        topic = f"%RETRY%{number % 50:08d}".ljust(chars, "g")
        message = RetryMessage(1_000 + number, topic, 1_700_000_000_000 + number, bytes(200 + number % 9))
        state.apply(RetryObject(1, "o", "n", number, (message,)))
    return state, state.held_bytes


def retry_queues_of(chars: int) -> tuple[object, int]:
    state = RetryState()
    for number in range(COUNT):
        topic = f"%RETRY%{number:08d}".ljust(chars, "g")
        message = RetryMessage(1_000 + number, topic, 1_700_000_000_000, bytes(9), 5_000 + number, 1)
        state.apply(RetryObject(1, "o", "n", number, (message,)))
        state.release(topic, 6_000 + number)
    return state, state.held_bytes


def reads_of(chars: int) -> tuple[object, int]:
    reads = GroupReadStats()
    for number in range(COUNT):
        names = {
            "consumerGroup": f"{number:08d}".ljust(chars, "g"),
            "topic": f"{number:08d}".ljust(chars, "t"),
        }
        ext = {"nextBeginOffset": str(5_000 + number), "maxOffset": str(900_000 + number)}
        reads.note(request(11, queueId=1_000 + number, **names), Response(ext=ext))
    return reads, reads._queues.held_bytes


def repeats_of(chars: int) -> tuple[object, int]:
    repeats = EmptyReplyPacer()
    for number in range(COUNT):
        names = [f"{number:08d}{letter}".ljust(chars, "g") for letter in "ab"]
        repeats.wait_s((10_000 + number, names[0]), names[1], 1_000 + number, 70_000 + number, number / 3)
    return repeats, repeats._last.held_bytes


def filters_of(chars: int) -> tuple[object, int]:
    filters = CompiledFilters(Turns())

    async def fill() -> None:
        for number in range(100):
            expression = " AND ".join(f"p{number}_{part} = {part}" for part in range(chars // 10))
            await filters.find(PullRequest("t", 0, 0, 1, 1, "g", expression, SQL92))

    asyncio.run(fill())
    return filters, 60 * filters.held_chars


@pytest.mark.parametrize("chars", sweep([20, 255], fast=[255]))
@pytest.mark.parametrize(
    "make",
    [
        readers_of,
        locks_of,
        popped_of,
        retry_messages_of,
        retry_queues_of,
        reads_of,
        repeats_of,
        filters_of,
    ],
)
def test_entries_weigh_at_most_what_is_charged(make: Callable[[int], tuple[object, int]], chars: int) -> None:
    make(chars)  # what only the first call allocates does not count
    gc.collect()
    tracemalloc.start()
    try:
        kept, said_bytes = make(chars)
        gc.collect()
        real_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept is not None
    assert said_bytes / 3 < real_bytes <= said_bytes, f"{real_bytes} of {said_bytes}"
