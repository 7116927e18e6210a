"""Names of queues, and which topics are the broker's own or LMQs."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LMQ_PREFIX = "%LMQ%"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"

# org.apache.rocketmq.common.topic.TopicValidator, plus the topics brokers name after themselves.
SYSTEM_TOPICS = frozenset({
    "TBW102", SCHEDULE_TOPIC, "BenchmarkTest", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRACE_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT",
    "CHECKPOINT_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
})  # fmt: skip
SYSTEM_PREFIX = "rmq_sys_"


class QueueKey(NamedTuple):
    """One generation of a queue. ``generation`` counts from 0 how often its topic was deleted and recreated."""

    topic: str
    queue_id: int
    generation: int

    def __str__(self) -> str:
        """The text in messages to people."""
        generation = f" generation {self.generation}" if self.generation else ""
        return f"{self.topic} queue {self.queue_id}{generation}"


@dataclass(frozen=True)
class TopicFilter:
    """Which topics are archived: system topics on request, then include, then exclude (shell patterns).
    ``trace_topic``: the broker's trace topic, if renamed."""

    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    include_system: bool = False
    cluster: str = ""
    broker: str = ""
    trace_topic: str = ""

    def is_system(self, topic: str) -> bool:
        """Whether the topic is the broker's own, as are ``<cluster>_REPLY_TOPIC`` and the names of both."""
        return (
            not topic.strip()
            or topic in SYSTEM_TOPICS
            or topic.startswith(SYSTEM_PREFIX)
            or topic in (self.cluster, self.broker, self.trace_topic)
            or (self.cluster != "" and topic == f"{self.cluster}_REPLY_TOPIC")
        )

    def admits(self, topic: str) -> bool:
        """Whether messages of ``topic`` are archived. ``%RETRY%``, ``%DLQ%`` and ``%LMQ%`` are ordinary topics here."""
        if not self.include_system and self.is_system(topic):
            return False
        if not any(fnmatch.fnmatchcase(topic, pattern) for pattern in self.include):
            return False
        return not any(fnmatch.fnmatchcase(topic, pattern) for pattern in self.exclude)
