"""Which queues and rows of an archive a restore brings back. Pure.

What the archive shows: the current generation of each queue that is not hidden, from its minimum offset on. Every such
queue keeps its offsets, also one of which no message is selected: producers and the archive continue at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.archive.kept_offsets import KeptOffsets
from tiered.broker_store.config import is_batch_topic
from tiered.catalog.pages import Page
from tiered.catalog.state import CatalogState
from tiered.formats.part_rows import PartRows
from tiered.model.queue import LMQ_PREFIX, SCHEDULE_TOPIC, QueueKey, TopicFilter
from tiered.model.tables import QUEUE_BATCH, QUEUE_HIDDEN, QUEUE_LMQ, QUEUE_SUPERSEDED, RunKind, Table
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


def restored_configuration(
    tables: Tables, selection: RestoreSelection, now_ms: int, *, keeps_compaction: bool, may_batch: bool
) -> Configuration:
    """The files of the restored broker's ``config/``: topics, groups and offsets as the archived ``tables`` have them,
    as of ``now_ms``. An offset above the end of its queue is set to that end. ``keeps_compaction``: compaction topics
    stay such; ``may_batch``: consume queues can be BatchCQ."""
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
            "dataVersion": version,
            "subscriptionGroupTable": dict(groups),
            "forbiddenTable": {},
        },
        "consumerOffset.json": {"dataVersion": version, "offsetTable": offsets},
        "lmqConsumerOffset.json": {
            "dataVersion": version,
            "offsetTable": offsets,
            "lmqOffsetTable": lmq_offsets,
        },
    }
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
    """The topics of ``table`` that the restored broker gets, and the names of compaction topics that become ordinary
    ones (unless ``keeps_compaction``), as the broker would compact their written queues. Topics of batches are excluded
    unless ``may_batch``."""
    batch = frozenset() if may_batch else frozenset(batch_topics(table))
    kept, plain = {}, []
    for name, topic in table.items():
        if name in batch:
            continue
        if not keeps_compaction and is_compacted(topic):
            attributes = {key: value for key, value in topic["attributes"].items() if key != CLEANUP_POLICY}
            topic = {**topic, "attributes": attributes}  # noqa: PLW2901
            plain.append(name)
        kept[name] = topic
    return kept, sorted(plain)


def _topics_of(selection: RestoreSelection) -> dict[str, Any]:
    """A table of topics made of the queues that are restored, for an archive without the broker's table."""
    counts: dict[str, int] = {}
    for key in selection.queues:
        if not key.topic.startswith(LMQ_PREFIX):
            counts[key.topic] = max(counts.get(key.topic, 0), key.queue_id + 1)
    return {
        topic: {"topicName": topic, "readQueueNums": count, "writeQueueNums": count, "perm": 6}
        for topic, count in counts.items()
    }


class ShownQueue(NamedTuple):
    """A queue of the archive. ``is_selected``: whether its messages come back; its offsets do anyway."""

    min_offset: int
    end_offset: int
    is_batch: bool
    is_lmq: bool
    is_selected: bool


@dataclass(frozen=True)
class RestoreSelection:
    """``since_ms``: messages stored before it stay away; 0: none."""

    queues: Mapping[QueueKey, ShownQueue]
    since_ms: int = 0
    absent_topics: Sequence[str] = ()
    """Topics that the consume queues of the store cannot have."""
    left: Mapping[QueueKey, KeptOffsets] = field(default_factory=dict)
    """The messages that are left in queues with LMQ entries from which key compaction dropped some."""

    def runs(self, page: Page) -> NDArray[np.bool_]:
        """Which runs of a catalog ``page`` may have rows that are restored."""
        shown = [self.queues.get(queue) for queue in page.queues]
        wanted = np.array([queue is not None and queue.is_selected for queue in shown], bool)
        minimum = np.array([0 if queue is None else queue.min_offset for queue in shown], np.int64)
        runs = page.chunk.runs
        number = runs["queue"]
        may_have: NDArray[np.bool_] = wanted[number] & (runs["end_queue_offset"] > minimum[number])
        may_have &= runs["max_store_timestamp"] >= self.since_ms
        # Messages that were copied from a compaction log have no physical offset.
        may_have &= runs["min_phys"] >= 0
        return may_have

    def whole_runs(self, page: Page) -> NDArray[np.bool_]:
        """Which runs of ``page``, all of which ``runs`` selects, are certainly restored with all of their records."""
        minimum = np.array([self.queues[queue].min_offset for queue in page.queues], np.int64)
        runs = page.chunk.runs
        found: NDArray[np.bool_] = runs["base_queue_offset"] >= minimum[runs["queue"]]
        found &= (runs["min_store_timestamp"] >= self.since_ms) & (runs["kind"] != RunKind.LMQ)
        return found

    def rows(
        self, rows: PartRows, queues: Sequence[QueueKey], parents: Sequence[QueueKey]
    ) -> NDArray[np.bool_]:
        """Which of the ``rows`` of an object are restored. ``queues``: the queue of each of its parts; ``parents``: all
        queues of the object, to which entries of LMQs refer. An LMQ entry is restored if its message is."""
        minimum = np.array([self.queues[queue].min_offset for queue in queues], np.int64)
        kept: NDArray[np.bool_] = rows.queue_offset + rows.inner_num > minimum[rows.part]
        kept &= rows.store_timestamp >= self.since_ms
        is_lmq = rows.position < 0
        for number in np.unique(rows.parent[is_lmq]).tolist():
            parent = self.queues.get(parents[number])
            is_kept = parent is not None and parent.is_selected
            least = parent.min_offset if parent is not None and is_kept else np.iinfo(np.int64).max
            is_there = rows.parent_queue_offset >= least
            if (left := self.left.get(parents[number])) is not None:
                is_there &= left.mask(rows.parent_queue_offset)
            kept &= ~is_lmq | (rows.parent != number) | is_there
        return kept


def select(state: CatalogState, topics: Sequence[str], since_ms: int, *, in_files: bool) -> RestoreSelection:
    """Select what is restored: all visible queues of ``state`` keep their offsets; messages come back of topics that
    match a pattern of ``topics``, and that were stored at or after ``since_ms``. ``in_files``: consume queues are files
    in directories named after topics, else in RocksDB, which has no BatchCQ; queues that cannot be there are absent."""
    chosen = TopicFilter(include=topics, include_system=True)
    shown, absent = {}, set[str]()
    for key, row in state.queues():
        flags = int(row["flags"])
        if flags & (QUEUE_HIDDEN | QUEUE_SUPERSEDED):
            continue
        is_batch = bool(flags & QUEUE_BATCH)
        if "/" in key.topic if in_files else is_batch:
            absent.add(key.topic)
            continue
        shown[key] = ShownQueue(
            int(row["min_queue_offset"]),
            int(row["end_queue_offset"]),
            is_batch,
            bool(flags & QUEUE_LMQ),
            chosen.admits(key.topic),
        )
    return RestoreSelection(shown, since_ms, sorted(absent))


def has_gaps(state: CatalogState, selection: RestoreSelection) -> bool:
    """Whether offsets are missing inside a selected queue. Queues of batches do not count: each of their units has its
    first offset, so that a gap is nothing to fill."""
    gaps: Table = state.gaps
    return any(
        queue.is_selected
        and queue.min_offset < int(gap["end_queue_offset"])
        and int(gap["begin_queue_offset"]) < queue.end_offset
        for gap in gaps
        if (queue := selection.queues.get(state.key_of(int(gap["queue"])))) is not None and not queue.is_batch
    )
