"""Names of queues, and which topics are the broker's own or LMQs."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LMQ_PREFIX, RETRY_PREFIX, DEAD_PREFIX = "%LMQ%", "%RETRY%", "%DLQ%"
"""Of the names of LMQs, of groups' retry topics, and of their dead letters."""
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"

# org.apache.rocketmq.common.topic.TopicValidator, plus the topics brokers name after themselves.
SYSTEM_TOPICS = frozenset(
    {
        "TBW102",
        SCHEDULE_TOPIC,
        "BenchmarkTest",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRACE_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "CHECKPOINT_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
    }
)
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
    """Which topics are archived, by names and shell patterns.

    System topics are archived if ``include`` has their name itself, or with ``include_system``. ``exclude`` takes
    precedence. ``trace_topic``: the broker's trace topic, if renamed. ``timer_topic`` is always archived.
    """

    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    include_system: bool = False
    cluster: str = ""
    broker: str = ""
    trace_topic: str = ""
    timer_topic: str = ""

    def is_system(self, topic: str) -> bool:
        """Whether RocketMQ uses the topic itself: one of its fixed names, the name of the cluster or the broker,
        ``<cluster>_REPLY_TOPIC``, or the trace topic."""
        return (
            not topic.strip()
            or topic in SYSTEM_TOPICS
            or topic.startswith(SYSTEM_PREFIX)
            or topic in (self.cluster, self.broker, self.trace_topic)
            or (self.cluster != "" and topic == f"{self.cluster}_REPLY_TOPIC")
        )

    def admits(self, topic: str) -> bool:
        """Whether messages of ``topic`` are archived. ``%RETRY%``, ``%DLQ%`` and ``%LMQ%`` are ordinary topics here."""
        return not self.refusal(topic)

    def refusal(self, topic: str) -> str:
        """Why messages of ``topic`` are not archived, as a clause that names the setting; empty if they are."""
        if topic and topic == self.timer_topic:
            return ""
        excluding = next((pattern for pattern in self.exclude if fnmatch.fnmatchcase(topic, pattern)), None)
        if excluding is not None:
            return f"the pattern {excluding} of topics.exclude matches it"
        if topic in self.include:
            return ""
        if not self.include_system and self.is_system(topic):
            return "it is a system topic: add its name to topics.include, or set topics.include_system"
        if not any(fnmatch.fnmatchcase(topic, pattern) for pattern in self.include):
            return "no pattern of topics.include matches it"
        return ""
