"""The broker's configuration of a restored store, from the tables that the archive has. Pure.

Consumer offsets above what was restored would skip new messages without a word: they are clamped. Sources:
org.apache.rocketmq.broker.topic.TopicConfigManager, SubscriptionGroupManager, ConsumerOffsetManager,
LmqConsumerOffsetManager.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from rocketmq_tiered.maintenance.restore.selection import Selection
from tiered.broker_store.config import is_batch_topic
from tiered.model.queue import LMQ_PREFIX, SCHEDULE_TOPIC
from tiered.settings.topic_rules import CLEANUP_POLICY, is_compacted

Tables = Mapping[str, Mapping[str, Any]]


class ClampedOffset(NamedTuple):
    """An offset of a group above the end of its queue."""

    topic: str
    group: str
    queue_id: int
    offset: int
    end_offset: int


class Configuration(NamedTuple):
    """Documents by the name of their file below ``config/``, and what differs from the archive's tables."""

    documents: dict[str, Any]
    clamped: list[ClampedOffset]
    plain_topics: list[str]
    """Compaction topics that become ordinary ones, as their consume queues are written."""


def configuration(
    tables: Tables, selection: Selection, now_ms: int, *, keeps_compaction: bool, may_batch: bool
) -> Configuration:
    """The documents for ``tables``, as of ``now_ms``."""
    version = {"counter": 1, "stateVersion": 0, "timestamp": now_ms}
    topics, plain = _topics(tables.get("topics", {}), keeps_compaction=keeps_compaction, may_batch=may_batch)
    ends = {(key.topic, key.queue_id): queue.end_offset for key, queue in selection.queues.items()}
    offsets: dict[str, dict[str, int]] = {}
    lmq_offsets: dict[str, int] = {}
    clamped = []
    for name, of_queues in sorted(tables.get("consumer_offsets", {}).items()):
        topic, _, group = name.partition("@")
        for queue_id, offset in sorted((int(number), int(value)) for number, value in of_queues.items()):
            end = ends.get((topic, queue_id), 0)
            if offset > end:
                clamped.append(ClampedOffset(topic, group, queue_id, offset, end))
            if topic.startswith(LMQ_PREFIX):
                lmq_offsets[name] = min(offset, end)
            else:
                offsets.setdefault(name, {})[str(queue_id)] = min(offset, end)
    groups = tables.get("subscription_groups", {})
    documents: dict[str, Any] = {
        "topics.json": {"dataVersion": version, "topicConfigTable": topics or _topics_of(selection)},
        "subscriptionGroup.json": {
            "dataVersion": version, "subscriptionGroupTable": dict(groups), "forbiddenTable": {},
        },
        "consumerOffset.json": {"dataVersion": version, "offsetTable": offsets},
        "lmqConsumerOffset.json": {
            "dataVersion": version, "offsetTable": offsets, "lmqOffsetTable": lmq_offsets,
        },
    }  # fmt: skip
    if any(key.topic == SCHEDULE_TOPIC for key in selection.queues):
        delays = {
            level: min(int(offset), ends.get((SCHEDULE_TOPIC, int(level) - 1), 0))
            for level, offset in tables.get("delay_offsets", {}).items()
        }
        documents["delayOffset.json"] = {"dataVersion": version, "offsetTable": delays}
    if mappings := tables.get("topic_queue_mappings"):
        documents["topicQueueMapping.json"] = {
            "dataVersion": version,
            "topicQueueMappingInfoMap": dict(mappings),
        }
    return Configuration(documents, clamped, plain)


def encoded(document: Any) -> bytes:
    """The file of ``document``."""
    return json.dumps(document, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")


def batch_topics(topics: Mapping[str, Any]) -> list[str]:
    """Topics of the table whose queues are BatchCQ."""
    return [name for name, topic in topics.items() if is_batch_topic(topic)]


def _topics(
    table: Mapping[str, Any], *, keeps_compaction: bool, may_batch: bool
) -> tuple[dict[str, Any], list[str]]:
    batch = frozenset() if may_batch else frozenset(batch_topics(table))
    found, plain = {}, []
    for name, topic in table.items():
        if name in batch:
            continue
        if not keeps_compaction and is_compacted(topic):
            attributes = {key: value for key, value in topic["attributes"].items() if key != CLEANUP_POLICY}
            topic = {**topic, "attributes": attributes}  # noqa: PLW2901
            plain.append(name)
        found[name] = topic
    return found, sorted(plain)


def _topics_of(selection: Selection) -> dict[str, Any]:
    """A table of the topics that have queues, for an archive without one."""
    counts: dict[str, int] = {}
    for key in selection.queues:
        if not key.topic.startswith(LMQ_PREFIX):
            counts[key.topic] = max(counts.get(key.topic, 0), key.queue_id + 1)
    return {
        topic: {"topicName": topic, "readQueueNums": count, "writeQueueNums": count, "perm": 6}
        for topic, count in counts.items()
    }
