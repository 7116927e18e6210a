"""Reading queues by offset: every record that was stored, in order, gaps said aloud, nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.archive.queue_reader import Batch, QueueReader
from tests.sweeps import examples
from tiered.archive.segment_reader import SegmentCache
from tiered.errors import CorruptionError, NotFoundError
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore

ONE, TWO, BATCHED = QueueKey("topic", 0, 0), QueueKey("topic", 1, 0), QueueKey("batched", 0, 0)
LMQ, OTHER_LMQ = QueueKey("%LMQ%a", 0, 0), QueueKey("%LMQ%b", 0, 0)


def _records(batch: Batch) -> list[bytes]:
    return [
        batch.data[start : start + size].tobytes()
        for start, size in zip(batch.starts.tolist(), batch.sizes.tolist(), strict=True)
    ]


def _check_whole_queue(builder: ArchiveBuilder, queue: QueueKey, *, max_rows: int, max_bytes: int) -> None:
    """Walk a queue from its beginning; rows and gaps must be those of the truth."""
    truth = builder.truth[queue]
    reader = QueueReader(builder.store, builder.state, queue)
    assert (reader.min_offset, reader.max_offset) == (truth.rows[0].offset, truth.end)
    found, gaps = 0, []
    offset = reader.min_offset
    while offset < reader.max_offset:
        batch = reader.read(offset, max_rows=max_rows, max_bytes=max_bytes)
        if batch.gap is not None:
            gaps.append(batch.gap)
        assert 1 <= len(batch) <= max_rows
        assert len(batch) == 1 or int(batch.sizes.sum()) <= max_bytes
        rows = truth.rows[found : found + len(batch)]
        assert _records(batch) == [row.record for row in rows]
        assert batch.queue_offsets.tolist() == [row.offset for row in rows]
        assert batch.inner_num.tolist() == [row.inner_num for row in rows]
        assert batch.phys.tolist() == [row.phys for row in rows]
        assert batch.tags_code.tolist() == [row.tags_code for row in rows]
        assert batch.store_timestamp.tolist() == [row.store_timestamp for row in rows]
        found += len(batch)
        assert batch.next_offset == rows[-1].offset + rows[-1].inner_num
        offset = batch.next_offset
    assert found == len(truth.rows)
    assert gaps == truth.gaps


@st.composite
def cycles(draw: st.DrawFn) -> list[list[tuple[int, int, int, int, int]]]:
    message = st.tuples(
        st.integers(0, 2),  # queue
        st.integers(0, 900),  # body length
        st.sampled_from([0, 0, 0, 5]),  # offsets missing before
        st.integers(1, 4),  # inner count, of the batched queue
        st.integers(0, 3),  # LMQs, a bit each
    )
    return draw(st.lists(st.lists(message, min_size=1, max_size=25), min_size=1, max_size=5))


def _sent(builder: ArchiveBuilder, cycle: Sequence[tuple[int, int, int, int, int]]) -> list[Sent]:
    ends = {queue: truth.end for queue, truth in builder.truth.items()}
    sent = []
    for number, length, missing, inner, lmq in cycle:
        queue = (ONE, TWO, BATCHED)[number]
        inner_num = inner if queue == BATCHED else 1
        offset = ends.get(queue, 7) + missing
        ends[queue] = offset + inner_num
        lmqs = [name for bit, name in ((1, LMQ), (2, OTHER_LMQ)) if lmq & bit and queue != BATCHED]
        sent.append(Sent(queue, bytes(length), offset, f"tag{length % 3}", inner_num=inner_num, lmq=lmqs))
    return sent


@settings(max_examples=examples(60))
@given(cycles(), st.booleans(), st.integers(1, 40), st.integers(1, 5000))
def test_all_that_was_stored_is_read(
    logged: list[list[tuple[int, int, int, int, int]]], as_set: bool, max_rows: int, max_bytes: int
) -> None:
    builder = ArchiveBuilder(MemoryStore())
    for cycle in logged:
        builder.commit(_sent(builder, cycle), as_set=as_set)
    for queue in builder.truth:
        _check_whole_queue(builder, queue, max_rows=max_rows, max_bytes=max_bytes)


def _small(count: int = 5, **changes: object) -> ArchiveBuilder:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(ONE, b"%d" % number, **changes) for number in range(count)])  # type: ignore[arg-type]
    return builder


def test_a_read_may_begin_anywhere() -> None:
    builder = _small(10)
    reader = QueueReader(builder.store, builder.state, ONE)
    assert reader.read(4, max_rows=3, max_bytes=1 << 20).queue_offsets.tolist() == [4, 5, 6]


def test_at_and_beyond_the_end_there_is_nothing() -> None:
    builder = _small(3)
    reader = QueueReader(builder.store, builder.state, ONE)
    for offset in (3, 99):
        batch = reader.read(offset, max_rows=3, max_bytes=100)
        assert (len(batch), batch.next_offset, batch.gap) == (0, offset, None)


def test_below_the_minimum_the_missing_offsets_are_said() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(ONE, b"x", offset=600), Sent(ONE, b"y")])
    batch = QueueReader(builder.store, builder.state, ONE).read(5, max_rows=9, max_bytes=1000)
    assert (batch.gap, batch.queue_offsets.tolist()) == ((5, 600), [600, 601])


def test_a_read_ends_before_a_gap_and_the_next_one_says_it() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(ONE, b"a"), Sent(ONE, b"b", offset=5), Sent(ONE, b"c")])
    reader = QueueReader(builder.store, builder.state, ONE)
    first = reader.read(0, max_rows=9, max_bytes=1 << 20)
    assert (first.queue_offsets.tolist(), first.next_offset, first.gap) == ([0], 1, None)
    second = reader.read(1, max_rows=9, max_bytes=1 << 20)
    assert (second.queue_offsets.tolist(), second.next_offset, second.gap) == ([5, 6], 7, (1, 5))
    assert reader.read(3, max_rows=9, max_bytes=1 << 20).gap == (3, 5)


def test_an_offset_inside_an_inner_batch_gives_the_whole_record() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(BATCHED, b"abc", inner_num=10), Sent(BATCHED, b"def", inner_num=4)])
    batch = QueueReader(builder.store, builder.state, BATCHED).read(7, max_rows=9, max_bytes=1 << 20)
    assert (batch.queue_offsets.tolist(), batch.inner_num.tolist(), batch.next_offset) == (
        [0, 10],
        [10, 4],
        14,
    )


def test_a_record_above_the_limit_is_read_alone() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(ONE, bytes(5000)), Sent(ONE, bytes(5000))])
    reader = QueueReader(builder.store, builder.state, ONE)
    assert len(reader.read(0, max_rows=9, max_bytes=1)) == 1


def test_a_queue_that_is_not_there_is_not_found() -> None:
    builder = _small()
    with pytest.raises(NotFoundError, match="nothing"):
        QueueReader(builder.store, builder.state, QueueKey("nothing", 0, 0))


def test_consecutive_blocks_are_one_request_and_segments_are_opened_once() -> None:
    class Counting(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.requests: list[str] = []

        def get_range(self, key: str, offset: int, length: int) -> bytes:
            self.requests.append(key)
            return super().get_range(key, offset, length)

    store = Counting()
    builder = ArchiveBuilder(store)
    builder.commit([Sent(ONE, bytes(500)) for _ in range(40)])
    segments = SegmentCache(store)
    reader = QueueReader(store, builder.state, ONE, segments=segments)
    assert len(reader.read(0, max_rows=40, max_bytes=1 << 20)) == 40
    assert len(store.requests) == 2
    reader.read(3, max_rows=4, max_bytes=1 << 20)
    assert len(store.requests) == 3
    assert segments.held_bytes > 0


def test_a_missing_object_is_looked_up_once_more_and_then_a_corruption() -> None:
    builder = _small()
    reader = QueueReader(builder.store, builder.state, ONE)
    builder.store.delete([builder.keys[0]])
    with pytest.raises(CorruptionError, match="is missing"):
        reader.read(0, max_rows=1, max_bytes=100)


def test_a_reader_of_an_old_version_finds_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance replaced the object and removed the old one: the newest catalog knows where the bytes are now."""
    builder = _small()
    reader = QueueReader(builder.store, builder.state, ONE)
    builder.rewrite(ONE)
    builder.store.delete([builder.keys[0]])
    batch = reader.read(0, max_rows=9, max_bytes=1 << 20)
    assert _records(batch) == [row.record for row in builder.truth[ONE].rows]
    assert reader.state.version == builder.state.version


def test_a_damaged_block_is_a_corruption_never_a_short_answer() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(ONE, np.random.default_rng(1).bytes(300)) for _ in range(9)])
    (key,) = builder.keys
    data = bytearray(builder.store.get(key))
    data[40] ^= 4
    builder.store.delete([key])
    builder.store.put_if_absent(key, [bytes(data)])
    reader = QueueReader(builder.store, builder.state, ONE)
    with pytest.raises(CorruptionError, match=key):
        reader.read(0, max_rows=9, max_bytes=1 << 20)


def test_a_segment_that_is_not_the_one_the_catalog_means_is_a_corruption() -> None:
    builder = _small()
    other = ArchiveBuilder(MemoryStore())
    other.commit([Sent(TWO, b"%d" % number) for number in range(5)])
    builder.store.delete(builder.keys)
    builder.store.put_if_absent(builder.keys[0], [other.store.get(other.keys[0])])
    reader = QueueReader(builder.store, builder.state, ONE)
    with pytest.raises(CorruptionError):
        reader.read(0, max_rows=9, max_bytes=1 << 20)


def test_an_lmq_lives_no_longer_than_its_parent() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(ONE, b"a", lmq=[LMQ]), Sent(ONE, b"b", lmq=[LMQ])])
    builder.commit([Sent(TWO, b"c", lmq=[LMQ]), Sent(ONE, b"d", lmq=[LMQ])])
    builder.expire_first_run(ONE)
    reader = QueueReader(builder.store, builder.state, LMQ)
    batch = reader.read(0, max_rows=9, max_bytes=1 << 20)
    assert (batch.gap, batch.queue_offsets.tolist()) == ((0, 2), [2, 3])
    assert _records(batch) == [row.record for row in builder.truth[LMQ].rows[2:]]
