"""Rows of a broker's store directory: its commitlog scanned as the archiver scans it, in parallel by file.

What a live broker may still change is left out: reading ends where its consume queues end. Transactions that were not
committed are not shown, nor are topics of the broker's own unless they are named.

Owns ranges of the log and what is read of them. Does not own the scan (tiered.kernels, uploader.log_feed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.options.predicate import Predicate
from pipeline.options.source_options import SourceOptions
from pipeline.scan.row_chunk import CorruptPlace, RowChunk
from tiered.broker_store.conf import BrokerConf, read_broker_conf
from tiered.broker_store.names import BrokerNames
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.errors import UnavailableError, UsageError
from tiered.kernels.queue_table import ADMITTED, QueueTable
from tiered.kernels.scan import FLAG_BATCH
from tiered.model.queue import QueueKey, TopicFilter
from uploader.bound_source import BoundSource, no_offsets
from uploader.lmq_dispatch import LmqDispatch, resolved_lmq_rows
from uploader.log_batch import LogBatch
from uploader.log_feed import FeedBound, FeedOutcome
from uploader.queue_tails import UNKNOWN
from uploader.store_feed import feed_of, lmq_rules

NO_GENERATION = -1
OnCorrupt = Callable[[CorruptPlace], None]


@dataclass(frozen=True)
class LogRange:
    """Physical offsets [begin, end) of the commitlog at ``path``; below ``proven_phys`` every record must be valid."""

    path: str
    names: BrokerNames
    begin_phys: int
    end_phys: int
    proven_phys: int


def plan_ranges(options: SourceOptions) -> list[LogRange]:
    """One range for each commitlog file; what is not proven to be whole stays together with the file before.

    Raises what opening the store raises, UnavailableError when a running broker hides its consume queues.
    """
    path = store_path(options)
    with _open(options) as store:
        limit, proven = _bound(store)
        names = _names(store, options)
        files = [file for file in store.commit_log.files if file.begin_phys < limit]
    ranges: list[LogRange] = []
    for file in files:
        end = min(file.end_phys, limit)
        if ranges and file.begin_phys > proven:
            last = ranges.pop()
            ranges.append(LogRange(path, names, last.begin_phys, end, proven))
        else:
            ranges.append(LogRange(path, names, file.begin_phys, end, proven))
    return ranges


def store_path(options: SourceOptions) -> str:
    """The directory; ``file://`` is understood."""
    path = options.path.removeprefix("file://")
    if not path.startswith("/"):
        raise UsageError(
            f"not an absolute directory: {options.path}", hint="source=store reads local directories"
        )
    return path


def _conf(options: SourceOptions) -> BrokerConf | None:
    return read_broker_conf(Path(options.broker_conf)) if options.broker_conf else None


def _open(options: SourceOptions) -> BrokerStore:
    return open_broker_store(Path(store_path(options)), conf=_conf(options))


def _bound(store: BrokerStore) -> tuple[int, int]:
    """(nothing at or above is read, everything below is valid)."""
    if store.liveness().is_dead:
        bound = BoundSource(store, no_offsets).ask(store.commit_log.min_phys)
        return bound.phys, bound.proven_phys
    queues = store.consume_queues()
    if queues is None:
        raise UnavailableError(
            f"{store.path}: its broker runs and keeps its consume queues in RocksDB, where they cannot be seen",
            hint="read the archive, or stop the broker",
        )
    frontier = queues.frontier_phys()
    return frontier, frontier


def _names(store: BrokerStore, options: SourceOptions) -> BrokerNames:
    found = store.names()
    return BrokerNames(options.cluster or found.cluster, options.broker or found.broker)


class StoreScanner:
    """Reads ranges of a store's commitlog."""

    def __init__(
        self, options: SourceOptions, predicate: Predicate, *, window_bytes: int, on_corrupt: OnCorrupt
    ) -> None:
        self._options = options
        self._predicate = predicate
        self._window_bytes = window_bytes
        self._on_corrupt = on_corrupt

    def chunks(self, part: LogRange) -> Iterator[RowChunk]:
        """All rows of ``part`` that pass, a window at a time. A chunk is good until the next one is asked for."""
        with _open(self._options) as store:
            table = QueueTable()
            feed = feed_of(store, table, self._filter(part.names), BoundSource(store, no_offsets))
            references = LmqDispatch(table, store.consume_queues, partial(lmq_rules, store, {}))
            batch = LogBatch(self._window_bytes)
            batch.reset(part.begin_phys, 0)
            bound = FeedBound(part.end_phys, min(part.proven_phys, part.end_phys))
            while True:
                outcome = feed.advance(batch, bound, batch.room)
                self._report_damage(batch, part)
                yield from self._rows(batch, table, references, part)
                if outcome is FeedOutcome.CAUGHT_UP:
                    return
                size = feed.oversize_bytes if outcome is FeedOutcome.OVERSIZE else self._window_bytes
                to_phys = batch.to_phys
                if len(batch.arena) != size:
                    batch = LogBatch(size)
                batch.reset(to_phys, 0)

    def _filter(self, names: BrokerNames) -> TopicFilter:
        topics = self._options.topics
        plain = TopicFilter(cluster=names.cluster, broker=names.broker)
        return TopicFilter(
            include=topics or ("*",),
            include_system=any(plain.is_system(topic) for topic in topics),
            cluster=names.cluster,
            broker=names.broker,
        )

    def _report_damage(self, batch: LogBatch, part: LogRange) -> None:
        for damage in batch.damaged:
            message = (
                f"{damage.path}: physical offsets [{damage.begin_phys}, {damage.end_phys}): {damage.detail}"
            )
            self._on_corrupt(CorruptPlace(part.names.cluster, part.names.broker, None, message))

    def _rows(
        self, batch: LogBatch, table: QueueTable, references: LmqDispatch, part: LogRange
    ) -> Iterator[RowChunk]:
        columns = batch.columns
        queues = [
            QueueKey(table.topic(ordinal), int(table.queue_id[ordinal]), NO_GENERATION)
            for ordinal in range(len(table))
        ]
        every = np.arange(columns.rows)
        word = references.word(columns, lambda ordinals: np.full(len(ordinals), UNKNOWN))
        lmq, lmq_offset = resolved_lmq_rows(columns, word)
        for row, queue, offset, inner in (
            (every, columns.queue[: columns.rows], columns.queue_offset[: columns.rows], columns.inner_num),
            (columns.lmq_row[lmq], columns.lmq_queue[lmq], lmq_offset, None),
        ):
            kept = np.flatnonzero(table.admitted[queue] == ADMITTED)
            chunk = self._chunk(batch, part, queues, row[kept], queue[kept], offset[kept], inner)
            passing = self._passing(chunk, is_lmq=inner is None)
            chunk = chunk if passing is None else chunk.taken(np.flatnonzero(passing))
            if len(chunk):
                yield chunk

    def _chunk(
        self,
        batch: LogBatch,
        part: LogRange,
        queues: list[QueueKey],
        row: NDArray[Any],
        queue: NDArray[Any],
        offset: NDArray[Any],
        inner: NDArray[Any] | None,
    ) -> RowChunk:
        columns = batch.columns
        return RowChunk(
            cluster=part.names.cluster,
            broker=part.names.broker,
            queues=queues,
            queue=queue,
            queue_offset=offset,
            inner_num=np.ones(len(row), np.int32) if inner is None else inner[row],
            phys=columns.phys[row],
            size=columns.size[row],
            store_timestamp=columns.store_timestamp[row],
            tags_code=columns.tags_code[row],
            is_batch=(columns.flags[row] & FLAG_BATCH) != 0,
            data=batch.arena,
            starts=columns.position[row],
            source=part.path,
        )

    def _passing(self, chunk: RowChunk, *, is_lmq: bool) -> NDArray[np.bool_] | None:
        topics = {chunk.queues[number].topic for number in np.unique(chunk.queue).tolist()}
        predicate = self._predicate.for_lmq() if is_lmq else self._predicate
        if any(predicate.for_topic(topic) is not predicate for topic in topics):
            predicate = predicate.without_tags()
        ids = np.array([queue.queue_id for queue in chunk.queues] or [0], np.int64)
        return predicate.mask({
            "queueId": ids[chunk.queue], "queueOffset": chunk.queue_offset, "tagsCode": chunk.tags_code,
            "storeTimestamp": chunk.store_timestamp, "commitLogOffset": chunk.phys, "storeSize": chunk.size,
            "innerNum": chunk.inner_num,
        })  # fmt: skip
