"""The queue table: ordinals are dense, stable and the same from Python and from kernels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.record_builder import Message, build_log
from tiered.kernels.queue_table import ABSENT, NOT_ADMITTED, UNDECIDED, QueueTable
from tiered.kernels.scan import RecordColumns, scan_log

QUEUES = st.lists(
    st.tuples(st.text(min_size=1, max_size=20), st.integers(-(1 << 31), (1 << 31) - 1)), max_size=300
)


@given(QUEUES.filter(lambda queues: all(_is_utf8(topic) for topic, _ in queues)))
def test_ordinals_are_dense_and_stable(queues: list[tuple[str, int]]) -> None:
    table, expected = QueueTable(), dict[tuple[str, int], int]()
    for topic, queue_id in queues:
        known = expected.setdefault((topic, queue_id), len(expected))
        assert table.ordinal(topic, queue_id) == known
    assert len(table) == len(expected)
    for (topic, queue_id), ordinal in expected.items():
        assert table.find(topic, queue_id) == ordinal
        assert table.topic(ordinal) == topic
        assert table.queue_id[ordinal] == queue_id


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def test_many_queues_survive_growth() -> None:
    table = QueueTable()
    names = [(f"topic-{index // 8}" * (1 + index % 3), index % 8) for index in range(20_000)]
    for topic, queue_id in names:
        table.ordinal(topic, queue_id)
    assert len(table) == len(names)
    assert [table.find(*name) for name in names] == list(range(len(names)))
    assert table.find("topic-1", 9) is None


def test_a_queue_starts_undecided_and_decisions_survive_growth() -> None:
    table = QueueTable()
    table.ordinal("first", 0)
    assert table.admitted.tolist() == [UNDECIDED]
    table.admitted[0] = NOT_ADMITTED
    for index in range(1000):
        table.ordinal("other", index)
    assert table.admitted[0] == NOT_ADMITTED
    assert set(table.admitted[1:].tolist()) == {UNDECIDED}


def test_the_scan_inserts_what_python_finds() -> None:
    table = QueueTable()
    messages = [Message(topic=f"t{index % 100}".encode(), queue_id=index % 7) for index in range(1000)]
    log = np.frombuffer(build_log(messages), np.uint8)
    columns = RecordColumns(1, 1, 1)
    scan_log(log, 0, len(log), 0, 1 << 30, table, columns, delay_levels_ms=None)
    assert columns.rows == 1000
    for message, ordinal in zip(messages, columns.queue[:1000].tolist(), strict=True):
        assert table.find(message.topic.decode(), message.queue_id) == ordinal
    assert len(table) == 700


def test_an_impossible_topic_is_refused() -> None:
    table = QueueTable()
    with pytest.raises(ValueError, match="name has 1 to 32767 bytes, not 0"):
        table.ordinal("", 0)
    with pytest.raises(ValueError, match="name has 1 to 32767 bytes, not 40000"):
        table.ordinal("x" * 40_000, 0)
    assert table.ordinal("x" * 32_767, 0) == 0
    with pytest.raises(IndexError):
        table.topic(1)
    with pytest.raises(ValueError, match="the kernel gave no reason"):
        table.grow(ABSENT)


def test_memory_follows_the_number_of_queues() -> None:
    table = QueueTable()
    for index in range(4096):
        table.ordinal("a-topic-of-usual-length", index)
    assert table.nbytes < 4096 * 2 * 60
