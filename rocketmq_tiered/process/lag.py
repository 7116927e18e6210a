"""Measures the lag of each queue: messages, bytes and the age of the oldest message that is not archived.

Counts from the dispatch offset to a physical end by scanning the commitlog, which costs less than a search in each of
many consume queues. The scan is bounded: the messages of a longer lag are estimated from its first 64 MiB.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from rocketmq_tiered.process.report import QueueReport
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.damage import stored_size
from tiered.broker_store.pins import measure_disk
from tiered.broker_store.retention import Growth, deletion_margin
from tiered.broker_store.store import BrokerStore
from tiered.errors import AccessDeniedError, UnreadableError
from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import TopicFilter
from tiered.residency import PAGE_BYTES
from tiered.timestamps import wall_ms
from uploader.lmq_dispatch import resolved_lmq_rows
from uploader.log_batch import LogBatch
from uploader.log_feed import FeedBound, FeedOutcome, LogFeed

GROWTH_WINDOW_S, GROWTH_WINDOWS = 10.0, 60
CLOCK_OFF_S = 5.0
"""A message that is stamped later than this after the present shows that a clock is wrong."""


def retention_margin_s(
    store: BrokerStore, committed_phys: int, end_phys: int, growth: Sequence[Growth]
) -> float | None:
    """Seconds until the broker deletes the first commitlog file with messages that are not archived; None if all are,
    or if it is not known.

    ``committed_phys``: physical offset up to which messages are archived; ``end_phys``: end of the written log;
    ``growth``: how fast the log has grown. Without a broker.conf, RocketMQ's default rules of deletion apply.
    """
    if committed_phys >= end_phys:
        return None
    files = []
    for file in store.commit_log.files:
        if file.is_pinned:
            continue
        try:
            files.append((file, int(file.path.stat().st_mtime * 1000)))
        except FileNotFoundError:  # the broker deleted it since the listing
            continue
    if not files:
        return None
    disk = replace(measure_disk(files[-1][0].path), growth=growth)
    margin = deletion_margin(
        files,
        committed_phys,
        store.conf or BrokerConf(),
        disk,
        now_ms=wall_ms(),
        zone=store.zone().zone,
    )
    return margin.seconds


class LogGrowth:
    """Growth of the commitlog over the last ten minutes, and over each shorter time from GROWTH_WINDOW_S on."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=GROWTH_WINDOWS + 1)

    def rates(self, now_s: float, end_phys: int) -> list[Growth]:
        """Note the present end of the log, and return how fast it has grown over several past times, each of at least
        ten seconds. Times over which it did not grow are skipped."""
        if not self._ends or now_s - self._ends[-1][0] >= GROWTH_WINDOW_S:
            self._ends.append((now_s, end_phys))
        return [
            Growth((end_phys - phys) / (now_s - then_s), now_s - then_s)
            for then_s, phys in self._ends
            if now_s - then_s >= GROWTH_WINDOW_S and end_phys > phys
        ]


SCAN_BYTES_MAX = 64 * 1024 * 1024
CHUNK_BYTES = 8 * 1024 * 1024


@dataclass
class QueueLag:
    """The lag of one queue. ``oldest_ms``: store timestamp of its first message that is not archived."""

    messages: int = 0
    bytes: int = 0
    oldest_ms: int = 0


@dataclass
class Lag:
    """The lag of all queues."""

    queues: dict[tuple[str, int], QueueLag] = field(default_factory=dict)
    """What was counted: of an estimated lag, its first part."""
    end_phys: int = 0
    """Physical end of the last record."""
    estimated_from: float = 1.0
    """Share of the bytes that was counted; below 1 ``messages`` is an estimate."""

    @property
    def messages(self) -> int | None:
        """The sum of all queues; None if nothing could be counted of a long lag."""
        counted = sum(queue.messages for queue in self.queues.values())
        return round(counted / self.estimated_from) if self.estimated_from else None

    def oldest_ms(self) -> int | None:
        """Store timestamp of the oldest message that is not archived; None without lag."""
        return min((queue.oldest_ms for queue in self.queues.values() if queue.oldest_ms), default=None)

    def ages(self, now_ms: int) -> dict[str, Any]:
        """Members of a status report: ``lag_seconds`` is the age of the oldest message that is not archived, 0 if all
        are. If that was stored in the future by this host's clock, the age is None and ``clock_off_seconds`` tells how
        far."""
        oldest_ms = self.oldest_ms()
        age_s = 0.0 if oldest_ms is None else (now_ms - oldest_ms) / 1000
        if age_s < -CLOCK_OFF_S:
            return {"lag_seconds": None, "clock_off_seconds": -age_s}
        return {"lag_seconds": max(0.0, age_s), "clock_off_seconds": 0.0}

    def reports(self, now_ms: int) -> tuple[QueueReport, ...]:
        """The lag of each queue that has any, in the order of topics and queue ids. If only a part of a long lag was
        counted, its messages and bytes are scaled up."""
        share = self.estimated_from
        return tuple(
            QueueReport(
                topic,
                queue_id,
                round(lag.messages / share),
                round(lag.bytes / share),
                max(0.0, (now_ms - lag.oldest_ms) / 1000),
            )
            for (topic, queue_id), lag in sorted(self.queues.items())
        )

    def add(self, topic: str, queue_id: int, counted: QueueLag) -> None:
        """Add to the lag of one queue; earlier calls are for earlier records."""
        lag = self.queues.setdefault((topic, queue_id), QueueLag())
        lag.messages += counted.messages
        lag.bytes += counted.bytes
        lag.oldest_ms = lag.oldest_ms or counted.oldest_ms


def measure_lag(log: CommitLog, topic_filter: TopicFilter, committed_phys: int, end_phys: int) -> Lag:
    """Count the messages and bytes of each queue that are not archived: those of the commitlog from ``committed_phys``
    to ``end_phys``. Of more than 64 MiB, or if the log cannot be read to its end, only the first part is counted, and
    the result has its share for an estimate."""
    lag = Lag(end_phys=committed_phys)
    if committed_phys >= end_phys:
        return lag
    end_phys = written_end(log, committed_phys, end_phys)
    with suppress(UnreadableError, AccessDeniedError):
        _count_scanned(lag, log, topic_filter, committed_phys, min(end_phys, committed_phys + SCAN_BYTES_MAX))
    if end_phys - lag.end_phys > PAGE_BYTES:
        lag.estimated_from = (lag.end_phys - committed_phys) / (end_phys - committed_phys)
        lag.end_phys = end_phys
    return lag


def written_end(log: CommitLog, begin_phys: int, end_phys: int) -> int:
    """The end of what is written of the log between two physical offsets, to a page: from there on it has zeros, as
    files have their full size before they are written. It is found by bisection, so that a page of zeros inside a
    record can make it too small."""
    # The end is above low, and at most at high.
    low, high = (
        begin_phys // PAGE_BYTES,
        -(-end_phys // PAGE_BYTES),
    )
    if _is_written(log, high - 1):
        return end_phys
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _is_written(log, middle) else (low, middle)
    return min(max(begin_phys, high * PAGE_BYTES), end_phys)


def _is_written(log: CommitLog, page: int) -> bool:
    try:
        return bool(log.read(page * PAGE_BYTES, PAGE_BYTES).strip(b"\0"))
    except (UnreadableError, AccessDeniedError):
        return True  # it has been there


def _count_scanned(
    lag: Lag, log: CommitLog, topic_filter: TopicFilter, begin_phys: int, end_phys: int
) -> None:
    """Read the commitlog between two physical offsets, add the messages of each queue to ``lag``, and set its
    ``end_phys`` to where the scan ended: at ``end_phys``, or before it at what is not a record yet."""
    table = QueueTable()
    feed = LogFeed(log, table, topic_filter, delay_levels_ms=None, accepted_size=partial(stored_size, log))
    bound = FeedBound(end_phys, end_phys - 1)
    batch = LogBatch(min(CHUNK_BYTES, end_phys - begin_phys))
    phys = begin_phys
    while phys < end_phys:
        batch.reset(phys, 0)
        outcome = FeedOutcome.MORE
        while outcome is FeedOutcome.MORE and batch.room:
            outcome = feed.advance(batch, bound, CHUNK_BYTES)
        if outcome is FeedOutcome.OVERSIZE:  # a record that is larger than the batch
            batch = LogBatch(feed.oversize_bytes)
            continue
        _count_rows(lag, batch, table)
        lag.end_phys = batch.to_phys
        if outcome is FeedOutcome.CAUGHT_UP or batch.to_phys == phys:
            return
        phys = batch.to_phys


def _count_rows(lag: Lag, batch: LogBatch, table: QueueTable) -> None:
    """Add the messages of a batch of records to the lag of their queues, except for queues that are not archived. An
    entry of a light message queue (LMQ) counts with the size of the record that it refers to."""
    columns = batch.columns
    rows, (lmq, _) = columns.rows, resolved_lmq_rows(columns, {})
    parent = columns.lmq_row[lmq]
    queue = np.concatenate([columns.queue[:rows], columns.lmq_queue[lmq]])
    inner = np.concatenate([columns.inner_num[:rows], np.ones(len(lmq), np.int32)])
    size = np.concatenate([columns.size[:rows], columns.size[parent]])
    stamp = np.concatenate([columns.store_timestamp[:rows], columns.store_timestamp[parent]])
    present, first, number = np.unique(queue, return_index=True, return_inverse=True)
    # Sums of floating-point weights are exact here: those of one batch are far below 2**53.
    messages, sizes = np.bincount(number, inner), np.bincount(number, size)
    for i, ordinal in enumerate(present.tolist()):
        if table.admitted[ordinal] == 1:  # the topic filter admits the queue
            counted = QueueLag(int(messages[i]), int(sizes[i]), int(stamp[first[i]]))
            lag.add(table.topic(ordinal), int(table.queue_id[ordinal]), counted)
