"""Which topics are archived: patterns, and the broker's own topics only on request."""

from __future__ import annotations

import pytest

from tiered.model.queue import TopicFilter


@pytest.mark.parametrize(
    "topic",
    [
        "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer",
    ],
)  # fmt: skip
def test_the_brokers_own_topics_are_archived_only_on_request(topic: str) -> None:
    assert not TopicFilter().admits(topic)
    assert TopicFilter(include_system=True).admits(topic)


def test_exclude_wins_over_include() -> None:
    chosen = TopicFilter(include=("order*",), exclude=("order_test*",))
    assert [topic for topic in ("order", "order_test_1", "other") if chosen.admits(topic)] == ["order"]
