"""Queue names as a table and back: any topic, every generation of a queue, no number that does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.formats.container import decode_container, encode_container
from tiered.formats.queue_names import queues_of
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import selection_of

TOPICS = st.one_of(
    st.sampled_from(
        ["%LMQ%a/b", "%RETRY%g", "тема", "主题", "a\u0301", "\u00e1", "\0", "\n", '"', "\\", "𝕥", "\ufeff"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
)
KEYS = st.builds(QueueKey, TOPICS, st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1))


@given(st.lists(KEYS, unique=True, max_size=30))
def test_a_table_tells_the_same_queues_through_a_container(keys: list[QueueKey]) -> None:
    topics, table = selection_of(keys).table()
    assert len(topics) == len(set(topics)) == len({key.topic for key in keys})
    data = encode_container(b"RMQTTEST", {"topics": topics}, {"queues": table})
    assert queues_of(decode_container(data, b"RMQTTEST", source="test")) == keys


@pytest.mark.parametrize("key", [QueueKey("t", 2**31, 0), QueueKey("t", 0, 2**32), QueueKey("t", 0, -1)])
def test_a_number_that_does_not_fit_is_an_error_and_not_another_queue(key: QueueKey) -> None:
    with pytest.raises(OverflowError):
        selection_of([key]).table()
