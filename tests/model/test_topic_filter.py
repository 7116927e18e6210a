"""Which topics are archived: patterns, and the broker's own topics only on request."""

import pytest

from tiered.model.queue import TopicFilter


@pytest.mark.parametrize(
    "topic",
    [
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
        "SCHEDULE_TOPIC_XXXX",
        "rmq_sys_wheel_timer",
    ],
)
def test_the_brokers_own_topics_are_archived_only_on_request(topic: str) -> None:
    assert not TopicFilter().admits(topic)
    assert TopicFilter(include_system=True).admits(topic)


def test_exclude_wins_over_include() -> None:
    chosen = TopicFilter(include=("order*",), exclude=("order_test*",))
    assert [topic for topic in ("order", "order_test_1", "other") if chosen.admits(topic)] == ["order"]


def test_a_system_topic_is_archived_if_it_is_named() -> None:
    trace = "RMQ_SYS_TRACE_TOPIC"
    assert TopicFilter(include=(trace, "orders")).admits(trace)
    assert not TopicFilter(include=("RMQ_SYS_*", "*")).admits(trace)
    assert not TopicFilter(include=(trace,), exclude=("RMQ_*",)).admits(trace)


@pytest.mark.parametrize(
    ("topic", "refusal"),
    [
        ("orders", ""),
        (
            "OFFSET_MOVED_EVENT",
            "it is a system topic: add its name to topics.include, or set topics.include_system",
        ),
        ("broker-a", "it is a system topic: add its name to topics.include, or set topics.include_system"),
        ("orders-test", "the pattern *-test of topics.exclude matches it"),
        ("payments", "no pattern of topics.include matches it"),
    ],
)
def test_a_topic_that_is_not_archived_has_a_reason(topic: str, refusal: str) -> None:
    chosen = TopicFilter(include=("order*", "OFFSET*"), exclude=("*-test",), broker="broker-a")
    assert chosen.refusal(topic) == refusal
    assert chosen.admits(topic) == (not refusal)
