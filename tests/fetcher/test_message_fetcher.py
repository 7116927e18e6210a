"""Pulls: statuses and next offsets as the Java peer's tests ask for them (MessageStoreFetcherImplTest), and, over
archives with everything in them, the same rows as the simple reader's.

Queues of the archives that fetcher tests build.
"""

import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import run_sync
from fetcher.pulls.memory_pull import _rows
from fetcher.pulls.message_fetcher import TieredMessageFetcher
from fetcher.rows.block_fetch import BufferedRows
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from fetcher.rows.run_list import QueueView, RunList
from fetcher.rows.tag_filter import TagFilter
from tests.archive.archive_builder import ArchiveBuilder, Sent, Stored
from tests.archive.queue_reader import QueueReader
from tests.end_to_end.ground_truth import difference, load_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, backfill
from tests.fetcher.reading_fakes import PlainSource, plain_fetcher
from tests.sweeps import examples
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.errors import CorruptionError, NotFoundError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore

BATCHED, LMQ, LONELY = (
    QueueKey("batched", 0, 0),
    QueueKey("%LMQ%light", 0, 0),
    QueueKey("%LMQ%lonely", 0, 0),
)
NO_LIMIT = 1 << 40


def pull(fetcher: TieredMessageFetcher, queue: QueueKey, offset: int, **options: object) -> PullResult:
    """One pull, in this thread."""
    wish = {"count": 32, "max_bytes": NO_LIMIT} | options
    return run_sync(fetcher.pull(PullRequest(queue.topic, queue.queue_id, offset, **wish)))  # type: ignore[arg-type]


def rows_of(result: PullResult) -> list[Stored]:
    """What the batch holds, row by row."""
    batch = result.batch
    columns = zip(
        batch.queue_offsets.tolist(),
        batch.inner_num.tolist(),
        map(bytes, batch.records()),
        batch.phys.tolist(),
        batch.tags_code.tolist(),
        batch.store_timestamp.tolist(),
        strict=True,
    )
    return [Stored(*row) for row in columns]


def hundred(tags: Callable[[int], str] = lambda offset: "") -> ArchiveBuilder:
    """Messages 100 to 199 of PLAIN, in four commits."""
    builder = ArchiveBuilder(MemoryStore())
    for begin in range(100, 200, 25):
        builder.commit(
            [Sent(PLAIN, b"x" * 50, offset=offset, tags=tags(offset)) for offset in range(begin, begin + 25)]
        )
    return builder


# -- as the Java peer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "status", "next_offset"),
    [
        (0, PullStatus.OFFSET_TOO_SMALL, 100),
        (-1, PullStatus.OFFSET_TOO_SMALL, 100),
        (99, PullStatus.OFFSET_TOO_SMALL, 100),
        (200, PullStatus.OFFSET_OVERFLOW_ONE, 200),
        (300, PullStatus.OFFSET_OVERFLOW_BADLY, 200),
        (100, PullStatus.FOUND, 132),
        (180, PullStatus.FOUND, 200),
        (199, PullStatus.FOUND, 200),
    ],
)
def test_status_and_next_offset(offset: int, status: PullStatus, next_offset: int) -> None:
    result = pull(plain_fetcher(hundred().store), PLAIN, offset)
    assert (result.status, result.next_offset) == (status, next_offset)
    assert (result.min_offset, result.max_offset) == (100, 200)
    assert result.batch.queue_offsets.tolist() == (
        list(range(offset, next_offset)) if status is PullStatus.FOUND else []
    )


def test_unknown_queue_and_empty_queue() -> None:
    fetcher = plain_fetcher(hundred().store)
    result = pull(fetcher, QueueKey("unknown", 0, 0), 17)
    assert (result.status, result.next_offset) == (PullStatus.NO_MATCHED_LOGIC_QUEUE, 17)
    assert pull(fetcher, PLAIN, 100, generation=5).status is PullStatus.NO_MATCHED_LOGIC_QUEUE


def test_limits_of_bytes_and_count() -> None:
    builder = hundred()
    fetcher = plain_fetcher(builder.store)
    size = len(builder.truth[PLAIN].rows[0].record)
    by_bytes = pull(fetcher, PLAIN, 180, max_bytes=8 * size + 10)
    assert (len(by_bytes.batch), by_bytes.next_offset) == (8, 188)
    by_count = pull(fetcher, PLAIN, 180, count=8)
    assert (len(by_count.batch), by_count.next_offset) == (8, 188)
    assert len(pull(fetcher, PLAIN, 180, max_bytes=8 * size - 1).batch) == 7
    assert len(pull(fetcher, PLAIN, 180, max_bytes=0).batch) == 1  # a larger first record comes alone


def test_batches_of_four_walk_the_queue_in_exactly_25_pulls() -> None:
    fetcher = plain_fetcher(hundred().store)
    offset, pulls = 100, 0
    while (result := pull(fetcher, PLAIN, offset, count=4, group="g")).status is PullStatus.FOUND:
        assert result.batch.queue_offsets.tolist() == list(range(offset, offset + 4))
        offset, pulls = result.next_offset, pulls + 1
    assert (pulls, offset) == (25, 200)


def test_tag_filter_ends_behind_the_last_match() -> None:
    fetcher = plain_fetcher(hundred(lambda offset: "odd" if offset % 2 else "even").store)
    first = pull(fetcher, PLAIN, 100, filter=TagFilter(["odd"]))
    assert (len(first.batch), first.next_offset) == (32, 164)
    rest = pull(fetcher, PLAIN, 164, filter=TagFilter(["odd"]))
    assert (len(rest.batch), rest.next_offset) == (18, 200)
    assert pull(fetcher, PLAIN, 200, filter=TagFilter(["odd"])).next_offset == 200
    even = pull(fetcher, PLAIN, 100, filter=TagFilter(["even"]))
    assert (len(even.batch), even.next_offset) == (32, 163)
    none = pull(fetcher, PLAIN, 100, filter=TagFilter(["neither"]))
    assert (none.status, none.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 200)


def test_two_tags_of_many_with_a_small_count() -> None:
    fetcher = plain_fetcher(hundred(lambda offset: f"tag{offset - 100}").store)
    result = pull(fetcher, PLAIN, 100, count=2, filter=TagFilter(["tag10", "tag20"]))
    assert (result.batch.queue_offsets.tolist(), result.next_offset) == ([110, 120], 121)


# -- what a filter may fetch ------------------------------------------------------------------------------------


def test_tags_are_looked_at_before_any_block_is_fetched() -> None:
    builder = hundred(lambda offset: "rare" if offset == 150 else "common")
    source = PlainSource(builder.store)
    fetcher = plain_fetcher(builder.store, source)
    assert pull(fetcher, PLAIN, 100, filter=TagFilter(["absent"])).status is PullStatus.NO_MATCHED_MESSAGE
    assert source.fetched == []
    assert pull(fetcher, PLAIN, 100, filter=TagFilter(["rare"])).batch.queue_offsets.tolist() == [150]
    assert [len(numbers) for _, numbers in source.fetched] == [1]


def test_tags_with_equal_codes_are_told_apart() -> None:
    fetcher = plain_fetcher(hundred(lambda offset: "Aa" if offset % 3 else "BB").store)
    result = pull(fetcher, PLAIN, 100, count=100, filter=TagFilter(["BB"]))
    assert result.batch.queue_offsets.tolist() == [offset for offset in range(100, 200) if offset % 3 == 0]
    assert result.next_offset == 200


class SizeFilter:
    """An arbitrary filter: says nothing of tags."""

    def __init__(self, divisor: int) -> None:
        self._divisor = divisor
        self.asked = 0

    def tags_mask(self, tags_code: object) -> None:
        """Nothing."""

    def keep(self, record: memoryview) -> bool:
        """Records whose queue offset is divisible."""
        self.asked += 1
        return int.from_bytes(record[20:28], "big") % self._divisor == 0


@pytest.mark.parametrize("count", [1, 2, 3, 32])
@pytest.mark.parametrize("divisor", [1, 2, 7, 50, 1000])
def test_any_filter_returns_what_it_keeps(divisor: int, count: int) -> None:
    fetcher = plain_fetcher(hundred().store)
    offset, found = 100, []
    for _ in range(200):
        result = pull(fetcher, PLAIN, offset, count=count, filter=SizeFilter(divisor), group="g")
        if result.status is PullStatus.OFFSET_OVERFLOW_ONE:
            break
        assert result.next_offset > offset
        assert len(result.batch) == count or result.next_offset == 200
        found += result.batch.queue_offsets.tolist()
        offset = result.next_offset
    assert found == [offset for offset in range(100, 200) if offset % divisor == 0]


# -- against the simple reader ------------------------------------------------------------------------------------


@lru_cache
def mixed_archive(seed: int) -> ArchiveBuilder:
    """Plain, batched and LMQ queues, gaps, many and few runs, SOs and SSOs."""
    rand = random.Random(seed)
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=rand.choice([300, 900, 4000])))
    for cycle in range(rand.randrange(2, 7)):
        sent = []
        for _ in range(rand.randrange(3, 30)):
            queue = rand.choice([PLAIN, PLAIN, OTHER, BATCHED])
            lmq = [] if queue == BATCHED else [q for q in (LMQ, LONELY) if rand.random() < 0.3]
            skip = builder.truth.get(queue) is not None and rand.random() < 0.03
            sent.append(
                Sent(
                    queue,
                    bytes(rand.randrange(300)),
                    tags=rand.choice(["", "a", "b"]),
                    lmq=lmq,
                    inner_num=rand.randrange(2, 5) if queue == BATCHED else 1,
                    offset=builder.truth[queue].end + 40 + cycle if skip and not sent else None,
                )
            )
        builder.commit(sent, as_set=rand.random() < 0.6)
    if rand.random() < 0.4 and len(builder.truth.get(OTHER, builder.truth[next(iter(builder.truth))]).rows):
        builder.expire_first_run(next(queue for queue in (OTHER, PLAIN) if queue in builder.truth))
    return builder


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 15), data=st.data())
def test_every_pull_equals_the_simple_reader(seed: int, data: st.DataObject) -> None:
    builder = mixed_archive(seed)
    fetcher = plain_fetcher(builder.store)
    for queue in builder.truth:
        reader = QueueReader(builder.store, builder.state, queue)
        for _ in range(6):
            offset = data.draw(st.integers(reader.min_offset, reader.max_offset))
            count, max_bytes = (
                data.draw(st.integers(1, 40)),
                data.draw(st.sampled_from([1, 400, 3000, NO_LIMIT])),
            )
            result = pull(
                fetcher, queue, offset, count=count, max_bytes=max_bytes, group=data.draw(st.just("g"))
            )
            if offset == reader.max_offset:
                assert result.status in (PullStatus.OFFSET_OVERFLOW_ONE, PullStatus.NO_MESSAGE_IN_QUEUE)
                continue
            expected = reader.read(offset, max_rows=count, max_bytes=max_bytes)
            assert result.status is (PullStatus.FOUND if len(expected) else PullStatus.NO_MATCHED_MESSAGE)
            assert (result.next_offset, result.gap) == (expected.next_offset, expected.gap)
            records = [
                expected.data[start : start + size].tobytes()
                for start, size in zip(expected.starts, expected.sizes, strict=True)
            ]
            assert list(map(bytes, result.batch.records())) == records
            assert b"".join(result.batch.buffers()) == b"".join(records)
            for name in ("queue_offsets", "inner_num", "phys", "tags_code", "store_timestamp", "sizes"):
                assert getattr(result.batch, name).tolist() == getattr(expected, name).tolist()


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 15), count=st.integers(1, 50), tag=st.sampled_from([None, "a", ""]))
def test_walks_deliver_every_row_once_in_order(seed: int, count: int, tag: str | None) -> None:
    builder = mixed_archive(seed)
    fetcher = plain_fetcher(builder.store)
    for queue, truth in builder.truth.items():
        wanted = None if tag is None else TagFilter([tag])
        codes = None if wanted is None else wanted._codes.tolist()
        view = fetcher.catalog.view(fetcher.catalog.state, queue)
        assert view is not None
        rows = [row for row in truth.rows if row.offset >= view.min_offset]
        if queue in (LMQ, LONELY):
            continue  # parents may have expired; the test above compares
        found: list[Stored] = []
        offset = view.min_offset
        while (result := pull(fetcher, queue, offset, count=count, group="g", filter=wanted)).status in (
            PullStatus.FOUND,
            PullStatus.NO_MATCHED_MESSAGE,
        ):
            assert result.next_offset > offset
            found += rows_of(result)
            offset = result.next_offset
        assert found == [row for row in rows if codes is None or (row.tags_code in codes and tag != "")]


@settings(max_examples=examples(12))
@given(seed=st.integers(0, 15), data=st.data())
def test_buffered_rows_equal_the_answer_of_a_pull(seed: int, data: st.DataObject) -> None:
    builder = mixed_archive(seed)
    has_all = data.draw(st.booleans())
    one = plain_fetcher(builder.store, PlainSource(builder.store, has_all=has_all))
    other = plain_fetcher(builder.store)
    for queue in builder.truth:
        reader = QueueReader(builder.store, builder.state, queue)
        offset = reader.min_offset
        for _ in range(30):
            if offset == reader.max_offset or data.draw(st.integers(0, 9)) == 0:
                offset = data.draw(st.integers(0, reader.max_offset + 1))
            count, max_bytes = (
                data.draw(st.integers(1, 9)),
                data.draw(st.sampled_from([1, 400, 3000, NO_LIMIT])),
            )
            found = one.pull_from_memory(
                PullRequest(queue.topic, queue.queue_id, offset, count, max_bytes, "g")
            )
            result = pull(other, queue, offset, count=count, max_bytes=max_bytes, group="g")
            if found is None:
                pull(one, queue, offset, count=count, max_bytes=max_bytes, group="g")
            else:
                assert (result.status, result.gap) == (PullStatus.FOUND, None)
                assert (found.records, found.next_offset) == (len(result.batch), result.next_offset)
                assert (found.min_offset, found.max_offset) == (result.min_offset, result.max_offset)
                assert b"".join(found.body) == b"".join(result.batch.buffers())
            offset = result.next_offset
        assert one.counters.pulls == other.counters.pulls
        assert one.counters.messages == other.counters.messages


def test_a_sequential_reader_finds_most_in_memory() -> None:
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=100_000))
    for begin in range(100, 200, 25):
        builder.commit([Sent(PLAIN, b"x" * 50, offset=offset) for offset in range(begin, begin + 25)])
    fetcher = plain_fetcher(builder.store)
    assert fetcher.pull_from_memory(PullRequest("plain", 0, 100, 5, NO_LIMIT, "g")) is None
    offset, found = 100, 0
    while offset < 200:
        from_memory = fetcher.pull_from_memory(PullRequest("plain", 0, offset, 5, NO_LIMIT, "g"))
        found += from_memory is not None
        at_hand = from_memory or pull(fetcher, PLAIN, offset, count=5, group="g")
        offset = at_hand.next_offset
    assert found == 16  # of 20: each of four runs begins a block
    assert fetcher.pull_from_memory(PullRequest("plain", 0, 195, 5, NO_LIMIT, "another")) is None


def test_a_sequential_reader_goes_from_block_to_block_without_another_look_at_rows() -> None:
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=1000))
    sent = [Sent(PLAIN, b"%d" % offset * 20, offset=offset) for offset in range(200)]
    builder.commit(sent)
    source = PlainSource(builder.store, has_all=True)
    fetcher = plain_fetcher(builder.store, source)
    for offset in (0, 5):  # from the second pull on it is sequential
        pull(fetcher, PLAIN, offset, count=5, group="g")
    asked = len(source.fetched)
    for offset in range(10, 200, 5):
        found = fetcher.pull_from_memory(PullRequest("plain", 0, offset, 5, NO_LIMIT, "g"))
        assert found is not None and found.next_offset == offset + 5
        expected = pull(plain_fetcher(builder.store), PLAIN, offset, count=5, group="g")
        assert b"".join(found.body) == b"".join(expected.batch.buffers())
        assert fetcher.readers.buffered_bytes < 40_000
    assert len(source.fetched) == asked


def next_from_memory(fetcher: TieredMessageFetcher, offset: int) -> int | None:
    """Where a pull of two continues that is answered from the buffered block."""
    found = fetcher.pull_from_memory(PullRequest("plain", 0, offset, 2, NO_LIMIT, "g"))
    return None if found is None else found.next_offset


def test_buffered_slices_are_of_the_version_they_were_made_of() -> None:
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=100_000))
    builder.commit([Sent(PLAIN) for _ in range(9)])
    builder.commit([Sent(PLAIN) for _ in range(9)])
    fetcher = plain_fetcher(builder.store)
    pull(fetcher, PLAIN, 0, count=2, group="g")
    assert [next_from_memory(fetcher, offset) for offset in (2, 4, 4, 7)] == [4, 6, 6, 9]
    state = builder.state
    line = replace(state.cursor, history=state.cursor.history + 1)
    fetcher.catalog.adopt(replace(state, version=state.version + 1, cursor=line))
    assert next_from_memory(fetcher, 4) is None
    fetcher = plain_fetcher(builder.store)
    pull(fetcher, PLAIN, 0, count=2, group="g")
    assert [next_from_memory(fetcher, offset) for offset in (2, 4)] == [4, 6]
    fetcher.catalog.adopt(builder.expire_first_run(PLAIN))
    assert next_from_memory(fetcher, 4) is None
    assert pull(fetcher, PLAIN, 4, count=2, group="g").status is PullStatus.OFFSET_TOO_SMALL


def test_buffered_slices_keep_no_block_the_reader_has_let_go_of() -> None:
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=100_000))
    builder.commit([Sent(PLAIN) for _ in range(9)])
    fetcher = plain_fetcher(builder.store)
    pull(fetcher, PLAIN, 0, count=2, group="g")
    assert [next_from_memory(fetcher, offset) for offset in (2, 4)] == [4, 6]
    ((_, reader),) = fetcher.readers._readers
    (block,) = [weakref.ref(block) for block in reader.buffered.blocks.values()]
    assert block() is not None and reader.buffered.slices is not None
    fetcher.readers.reclaim(1, Priority.USER)
    assert block() is None
    assert next_from_memory(fetcher, 6) is None


def queue_of_four_runs() -> ArchiveBuilder:
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=700))
    for begin in range(0, 100, 25):
        builder.commit(
            [Sent(PLAIN, b"%d" % offset * 20, offset=offset) for offset in range(begin, begin + 25)]
        )
    return builder


@pytest.mark.parametrize("count", [5, 7, 24])
def test_a_sequential_reader_goes_from_run_to_run_by_calls(count: int) -> None:
    builder = queue_of_four_runs()
    source = PlainSource(builder.store, has_all=True)
    fetcher = plain_fetcher(builder.store, source)
    pull(fetcher, PLAIN, 0, count=100, group="another")  # tails are in memory now
    offset = pull(fetcher, PLAIN, 0, count=count, group="g").next_offset
    asked = len(source.fetched)
    while offset < 100:
        found = fetcher.pull_from_memory(PullRequest("plain", 0, offset, count, NO_LIMIT, "g"))
        expected = pull(plain_fetcher(builder.store), PLAIN, offset, count=count, group="g")
        assert found is not None
        assert (found.records, found.next_offset) == (len(expected.batch), expected.next_offset)
        assert b"".join(found.body) == b"".join(expected.batch.buffers())
        offset = found.next_offset
    assert len(source.fetched) == asked


def test_a_run_that_is_not_the_catalogs_is_not_answered_from_memory() -> None:
    builder = queue_of_four_runs()
    source = PlainSource(builder.store, has_all=True)
    fetcher = plain_fetcher(builder.store, source)
    pull(fetcher, PLAIN, 0, count=100, group="another")
    offset = 0
    while offset < 25:
        offset = pull(fetcher, PLAIN, offset, count=5, group="g").next_offset
    first, second = source.opened[:2]
    source._indexes[second], kept = source._indexes[first], source._indexes[second]
    assert fetcher.pull_from_memory(PullRequest("plain", 0, 25, 5, NO_LIMIT, "g")) is None
    with pytest.raises(CorruptionError, match="differs from the catalog"):
        pull(fetcher, PLAIN, 25, count=5, group="g")
    source._indexes[second] = kept
    assert pull(fetcher, PLAIN, 25, count=5, group="g").next_offset == 30


def test_a_pull_inside_an_inner_batch_returns_the_whole_record() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(BATCHED, b"%d" % number, inner_num=3) for number in range(4)])
    result = pull(plain_fetcher(builder.store), BATCHED, 4, count=2)
    assert result.batch.queue_offsets.tolist() == [3, 6]
    assert (result.batch.inner_num.tolist(), result.next_offset) == ([3, 3], 9)


def test_a_gap_is_passed_only_when_nothing_comes_before_it() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(PLAIN), Sent(PLAIN), Sent(PLAIN, offset=10)])
    fetcher = plain_fetcher(builder.store)
    before = pull(fetcher, PLAIN, 0)
    assert (before.batch.queue_offsets.tolist(), before.next_offset, before.gap) == ([0, 1], 2, None)
    behind = pull(fetcher, PLAIN, 2)
    assert (behind.batch.queue_offsets.tolist(), behind.next_offset, behind.gap) == ([10], 11, (2, 10))
    assert pull(fetcher, PLAIN, 5).gap == (5, 10)


def test_offsets_that_are_neither_stored_nor_a_gap_are_corruption() -> None:
    builder = ArchiveBuilder(MemoryStore())

    def hole(runs: object) -> None:
        runs["end_queue_offset"] -= 1  # type: ignore[index]

    builder.commit([Sent(PLAIN) for _ in range(5)])
    fetcher = plain_fetcher(builder.store)
    view = fetcher.catalog.view(fetcher.catalog.state, ("plain", 0, None))
    assert view is not None
    runs = run_sync(fetcher.catalog.runs_of(view, 0))
    hole(runs._parts[0].chunk.runs)
    with pytest.raises(CorruptionError, match="in no segment and in no recorded gap"):
        pull(fetcher, PLAIN, 4)


# -- versions of the catalog ----------------------------------------------------------------------------------------


class Time:
    """Stands until moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_tail_is_seen_once_the_catalog_is_old_enough() -> None:
    clock = Time()
    builder = hundred()
    fetcher = plain_fetcher(builder.store, clock_s=clock)
    builder.commit([Sent(PLAIN), Sent(QueueKey("new", 0, 0))])
    assert pull(fetcher, PLAIN, 200).status is PullStatus.OFFSET_OVERFLOW_ONE
    clock.now_s += 1.1
    result = pull(fetcher, PLAIN, 200)
    assert (result.status, result.next_offset, result.max_offset) == (PullStatus.FOUND, 201, 201)
    assert result.version == builder.state.version
    assert pull(fetcher, QueueKey("new", 0, 0), 0).status is PullStatus.FOUND


def test_an_object_that_moved_is_found_by_a_second_look() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(PLAIN, b"%d" % number) for number in range(9)])
    fetcher = plain_fetcher(builder.store)
    old = builder.keys[0]
    builder.rewrite(PLAIN)
    builder.store.delete([old])
    result = pull(fetcher, PLAIN, 0)
    assert rows_of(result) == builder.truth[PLAIN].rows
    assert result.version == builder.state.version
    assert fetcher.catalog.retries == 1


def test_an_object_that_is_gone_is_corruption_and_hurts_no_other_queue() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(PLAIN)])
    builder.commit([Sent(OTHER)])
    builder.store.delete([builder.keys[0]])
    fetcher = plain_fetcher(builder.store)
    with pytest.raises(CorruptionError, match=r"does not exist") as caught:
        pull(fetcher, PLAIN, 0)
    assert builder.keys[0] in caught.value.message
    assert pull(fetcher, OTHER, 0).status is PullStatus.FOUND


def test_an_object_of_another_queue_is_corruption() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(PLAIN, b"same")])
    builder.commit([Sent(OTHER, b"same")])
    fetcher = plain_fetcher(builder.store)
    mine, other = (
        fetcher.catalog.view(fetcher.catalog.state, (queue.topic, queue.queue_id, None))
        for queue in (PLAIN, OTHER)
    )
    assert mine is not None and other is not None
    # Lengths and all: as if the other object had been copied over this one and only the footer showed it.
    mine.tail = RunList(PLAIN, run_sync(fetcher.catalog.all_runs_of(other)))
    with pytest.raises(CorruptionError, match="run 0 differs from the catalog"):
        pull(fetcher, PLAIN, 0)
    assert pull(fetcher, OTHER, 0).status is PullStatus.FOUND


class SwitchedStore:
    """A store whose catalog can be made unreachable."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.is_down = False

    def get(self, key: str, max_bytes: int) -> bytes:
        """See ObjectStore; commits are read so."""
        if self.is_down:
            raise UnavailableError("down")
        return self._store.get(key, max_bytes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_an_unreachable_catalog_is_no_answer_where_a_client_would_jump() -> None:
    clock = Time()
    store = SwitchedStore(hundred().store)  # type: ignore[arg-type]
    fetcher = plain_fetcher(store, clock_s=clock)  # type: ignore[arg-type]
    store.is_down = True
    clock.now_s += 2
    assert pull(fetcher, PLAIN, 200).status is PullStatus.OFFSET_OVERFLOW_ONE
    for queue, offset in ((PLAIN, 300), (QueueKey("unknown", 0, 0), 0)):
        clock.now_s += 2
        with pytest.raises(UnavailableError):
            pull(fetcher, queue, offset)
    assert pull(fetcher, PLAIN, 100).status is PullStatus.FOUND
    assert fetcher.catalog.failures == 3


def test_nothing_is_kept_of_a_queue_that_one_pull_reads_to_its_end() -> None:
    fetcher = plain_fetcher(hundred().store, clock_s=Time())
    whole = pull(fetcher, PLAIN, 100, count=100, until=NO_LIMIT, group="whole")
    assert (whole.records, whole.next_offset, len(fetcher.readers)) == (100, 200, 0)
    found = []
    for _ in range(3):  # in parts that fit into the bytes
        part = pull(
            fetcher, PLAIN, 100 + len(found), count=100, max_bytes=7_000, until=NO_LIMIT, group="parts"
        )
        found += rows_of(part)
    assert 1 < len(rows_of(part)) < 60
    assert found == rows_of(whole)[: len(found)]
    assert len(fetcher.readers) == 1


def test_the_end_of_a_queue_needs_no_coroutine_while_the_catalog_is_recent() -> None:
    clock, builder = Time(), hundred()
    fetcher = plain_fetcher(builder.store, clock_s=clock)
    found = fetcher._memory.pull_rows(PullRequest(PLAIN.topic, PLAIN.queue_id, 200, 32, NO_LIMIT))
    assert found == pull(fetcher, PLAIN, 200)
    assert found is not None and found.status is PullStatus.OFFSET_OVERFLOW_ONE
    assert (found.min_offset, found.max_offset, found.next_offset) == (100, 200, 200)
    builder.commit([Sent(PLAIN, offset=200)])
    assert pull(fetcher, PLAIN, 200).status is PullStatus.OFFSET_OVERFLOW_ONE
    clock.now_s += 2
    assert pull(fetcher, PLAIN, 200).status is PullStatus.FOUND


def test_buffered_rows_are_not_used_for_offsets_that_left_the_queue() -> None:
    clock = Time()
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=100_000))
    builder.commit([Sent(PLAIN) for _ in range(9)])
    builder.commit([Sent(PLAIN) for _ in range(9)])
    fetcher = plain_fetcher(builder.store, clock_s=clock)
    assert pull(fetcher, PLAIN, 0, count=2, group="g").next_offset == 2
    assert pull(fetcher, PLAIN, 2, count=2, group="g").next_offset == 4
    assert fetcher.counters.from_memory == 1
    fetcher.catalog.adopt(builder.expire_first_run(PLAIN))
    result = pull(fetcher, PLAIN, 4, count=2, group="g")
    assert (result.status, result.next_offset) == (PullStatus.OFFSET_TOO_SMALL, 9)


def test_buffered_rows_are_not_used_once_the_log_was_replaced() -> None:
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=100_000))
    builder.commit([Sent(PLAIN) for _ in range(9)])
    fetcher = plain_fetcher(builder.store)
    pull(fetcher, PLAIN, 0, count=2, group="g")
    state = builder.state
    table = state.table.copy()
    table["end_queue_offset"] = 5
    fetcher.catalog.adopt(replace(state, version=state.version + 1, table=table))
    assert pull(fetcher, PLAIN, 5, count=2, group="g").status is PullStatus.OFFSET_OVERFLOW_ONE
    assert pull(fetcher, PLAIN, 3, count=1, group="g").next_offset == 4
    line = replace(state.cursor, history=state.cursor.history + 1)
    fetcher.catalog.adopt(replace(state, version=state.version + 2, cursor=line))
    assert pull(fetcher, PLAIN, 4, count=1, group="g").next_offset == 5
    assert fetcher.counters.from_memory == 0
    assert pull(fetcher, PLAIN, 5, count=1, group="g").next_offset == 6
    assert fetcher.counters.from_memory == 1


class InterruptedView:
    """A view during whose use another thread does ``what``."""

    def __init__(self, view: QueueView, what: Callable[[], None]) -> None:
        self._view, self._what = view, what

    def __getattr__(self, name: str) -> object:
        if name == "min_offset":
            self._what()
        return getattr(self._view, name)


def test_buffered_rows_are_not_judged_by_the_log_history_of_their_successors() -> None:
    """Two pulls of one group at once, the one of them the first after the log was replaced."""
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=100_000))
    builder.commit([Sent(PLAIN) for _ in range(9)])
    fetcher = plain_fetcher(builder.store)
    pull(fetcher, PLAIN, 0, count=2, group="g")
    ((_, reader),) = fetcher.readers._readers
    old = reader.buffered
    new_line = replace(builder.state.cursor, history=builder.state.cursor.history + 1)
    state = replace(builder.state, version=builder.state.version + 1, cursor=new_line)
    view = fetcher.catalog.view(state, PLAIN)
    request = PullRequest("plain", 0, 2, 2, NO_LIMIT, "g")
    assert view is not None and _rows(reader, view, request) is None

    def other_pull() -> None:
        fetcher.readers.buffer(reader, BufferedRows(dict(old.blocks), old.rows, history=new_line.history))

    assert _rows(reader, cast("QueueView", InterruptedView(view, other_pull)), request) is None
    assert _rows(reader, view, request) is not None


def test_lmq_rows_whose_parents_expired_are_passed_like_a_gap() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(PLAIN, b"%d" % number, lmq=[LMQ]) for number in range(3)])
    builder.commit([Sent(PLAIN, b"%d" % number, lmq=[LMQ]) for number in range(3, 6)])
    builder.expire_first_run(PLAIN)
    result = pull(plain_fetcher(builder.store), LMQ, 0)
    assert (result.gap, result.next_offset) == ((0, 3), 6)
    assert rows_of(result) == builder.truth[LMQ].rows[3:]


def test_bad_arguments_are_errors() -> None:
    fetcher = plain_fetcher(hundred().store)
    with pytest.raises(ValueError, match="count must be 1 or more"):
        pull(fetcher, PLAIN, 0, count=0)
    with pytest.raises(NotFoundError):
        load(MemoryStore())


# -- real stores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["D"])
def test_real_stores_come_back_message_by_message(name: str, real_store: Callable[[str], Path]) -> None:
    directory = real_store(name)
    archive = MemoryStore()
    backfill(directory / "store", archive)
    truth = load_truth(directory, name, FILTER)
    fetcher = plain_fetcher(PrefixedStore(archive, archive_prefix(CLUSTER, BROKER)))
    delivered = 0
    with open_broker_store(directory / "store") as broker_store:
        log = broker_store.commit_log
        for (topic, queue_id), lines in truth.queues.items():
            by_offset = {line["queueOffset"]: line for line in lines}
            view = fetcher.catalog.view(fetcher.catalog.state, (topic, queue_id, None))
            assert view is not None
            offset = view.min_offset
            while (result := pull(fetcher, QueueKey(topic, queue_id, 0), offset, group="g")).batch:
                for row in rows_of(result):
                    if row.offset in by_offset and row.inner_num == 1:
                        assert difference(row.record, by_offset[row.offset], log) == ""
                        delivered += 1
                offset = result.next_offset
    assert delivered > 100


PLAIN, OTHER = QueueKey("plain", 0, 0), QueueKey("other", 3, 0)
