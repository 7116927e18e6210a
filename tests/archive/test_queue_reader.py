"""Reading queues by offset: every record that was stored, in order, gaps said aloud, nothing else."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.archive.queue_reader import Batch, QueueReader
from tests.sweeps import examples
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


def test_an_lmq_lives_no_longer_than_its_parent() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(ONE, b"a", lmq=[LMQ]), Sent(ONE, b"b", lmq=[LMQ])])
    builder.commit([Sent(TWO, b"c", lmq=[LMQ]), Sent(ONE, b"d", lmq=[LMQ])])
    builder.expire_first_run(ONE)
    batch = QueueReader(builder.store, builder.state, LMQ).read(0, max_rows=9, max_bytes=1 << 20)
    assert (batch.gap, batch.queue_offsets.tolist()) == ((0, 2), [2, 3])
    assert _records(batch) == [row.record for row in builder.truth[LMQ].rows[2:]]
