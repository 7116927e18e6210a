"""Which queues and rows of an archive a restore brings back. Pure.

What the archive shows: the current generation of each queue that is not hidden, from its minimum offset on. Every such
queue keeps its offsets, also one of which no message is selected: producers and the archive continue at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.object_spans import Rows
from tiered.catalog.pages import Page
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey, TopicFilter
from tiered.model.tables import QUEUE_BATCH, QUEUE_HIDDEN, QUEUE_LMQ, QUEUE_SUPERSEDED, RunKind, Table


class ShownQueue(NamedTuple):
    """A queue of the archive. ``is_selected``: whether its messages come back; its offsets do anyway."""

    min_offset: int
    end_offset: int
    is_batch: bool
    is_lmq: bool
    is_selected: bool


@dataclass(frozen=True)
class Selection:
    """``since_ms``: messages stored before it stay away; 0: none."""

    queues: Mapping[QueueKey, ShownQueue]
    since_ms: int = 0
    absent_topics: Sequence[str] = ()
    """Topics that the consume queues of the store cannot have."""
    left: Mapping[QueueKey, KeptOffsets] = field(default_factory=dict)
    """Of queues with LMQ entries that key compaction made sparse, the messages that are left."""

    def runs(self, page: Page) -> NDArray[np.bool_]:
        """Which runs of ``page`` may have selected rows."""
        shown = [self.queues.get(queue) for queue in page.queues]
        wanted = np.array([queue is not None and queue.is_selected for queue in shown], bool)
        minimum = np.array([0 if queue is None else queue.min_offset for queue in shown], np.int64)
        runs = page.chunk.runs
        number = runs["queue"]
        found: NDArray[np.bool_] = wanted[number] & (runs["end_queue_offset"] > minimum[number])
        found &= (runs["max_store_timestamp"] >= self.since_ms) & (
            runs["min_phys"] >= 0
        )  # not of another log
        return found

    def whole_runs(self, page: Page) -> NDArray[np.bool_]:
        """Which of the runs that ``runs`` selects have all of their records selected."""
        minimum = np.array([self.queues[queue].min_offset for queue in page.queues], np.int64)
        runs = page.chunk.runs
        found: NDArray[np.bool_] = runs["base_queue_offset"] >= minimum[runs["queue"]]
        found &= (runs["min_store_timestamp"] >= self.since_ms) & (runs["kind"] != RunKind.LMQ)
        return found

    def rows(self, rows: Rows, queue: QueueKey, kind: int, parents: Sequence[QueueKey]) -> NDArray[np.bool_]:
        """Which of ``rows`` come back; ``parents`` are the queues of their object. Of an LMQ only those do whose
        messages do."""
        kept: NDArray[np.bool_] = rows.queue_offset + rows.inner_num > self.queues[queue].min_offset
        kept &= rows.store_timestamp >= self.since_ms
        if kind == RunKind.LMQ:
            for number in np.unique(rows.parent).tolist():
                parent = self.queues.get(parents[number])
                is_kept = parent is not None and parent.is_selected
                minimum = parent.min_offset if parent is not None and is_kept else np.iinfo(np.int64).max
                is_there = rows.parent_queue_offset >= minimum
                if (left := self.left.get(parents[number])) is not None:
                    is_there &= left.mask(rows.parent_queue_offset)
                kept &= (rows.parent != number) | is_there
        return kept


def select(state: CatalogState, topics: Sequence[str], since_ms: int, *, in_files: bool) -> Selection:
    """What ``state`` shows of topics that match a pattern of ``topics``. ``in_files``: consume queues are files, whose
    directories are named by topics. Others are in RocksDB, which has no BatchCQ."""
    chosen = TopicFilter(include=topics, include_system=True)
    found, absent = {}, set[str]()
    for key, row in state.queues():
        flags = int(row["flags"])
        if flags & (QUEUE_HIDDEN | QUEUE_SUPERSEDED):
            continue
        is_batch = bool(flags & QUEUE_BATCH)
        if "/" in key.topic if in_files else is_batch:
            absent.add(key.topic)
            continue
        found[key] = ShownQueue(
            int(row["min_queue_offset"]), int(row["end_queue_offset"]), is_batch, bool(flags & QUEUE_LMQ),
            chosen.admits(key.topic),
        )  # fmt: skip
    return Selection(found, since_ms, sorted(absent))


def has_gaps(state: CatalogState, selection: Selection) -> bool:
    """Whether offsets are missing inside a selected queue."""
    gaps: Table = state.gaps
    return any(
        queue.is_selected
        and queue.min_offset < int(gap["end_queue_offset"])
        and int(gap["begin_queue_offset"]) < queue.end_offset
        for gap in gaps
        if (queue := selection.queues.get(state.key_of(int(gap["queue"])))) is not None and not queue.is_batch
    )
