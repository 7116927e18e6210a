"""Rows of a broker's store directory: its commitlog, scanned with the uploader's feed, in parallel by file.

With a running broker, reading ends where its consume queues end. Uncommitted transactions are not read, nor are
deleted topics, whose queues have no units, nor RocketMQ's own topics unless they are named.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import require_topics
from rocketmq_tiered.message_table.scan.object_rows import CorruptPlace, OnCorrupt, RowChunk
from tiered.broker_store.conf import BrokerNames, read_broker_conf
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
NEVER = (1 << 62) + 1


@dataclass(frozen=True)
class LogRange:
    """Physical offsets [begin, end) of the commitlog at ``path``. Below ``proven_phys`` every record must be valid."""

    path: str
    names: BrokerNames
    begin_phys: int
    end_phys: int
    proven_phys: int


def plan_ranges(options: SourceOptions) -> list[LogRange]:
    """Divide a broker's commitlog into ranges that are read independently: one for each file. Files above the offset up
    to which all records are known to be valid share a range with the file before them, since where their records end is
    found by reading.

    Raises what opening the store raises, NotFoundError for unknown topics, and UnavailableError if a running broker
    keeps its consume queues in RocksDB.
    """
    path = store_path(options)
    with open_source_store(options) as store:
        shown = BoundSource(store, no_offsets).shown_queues()
        if shown is not None:
            require_topics(options, {topic for topic, _ in shown})
        limit, proven = _bound(store)
        names = _names(store, options)
        files = [file for file in store.commit_log.files if file.begin_phys < limit]
    ranges: list[LogRange] = []
    for file in files:
        end = min(file.end_phys, limit)
        if ranges and file.begin_phys > proven:
            ranges.append(LogRange(path, names, ranges.pop().begin_phys, end, proven))
        else:
            ranges.append(LogRange(path, names, file.begin_phys, end, proven))
    return ranges


def store_path(options: SourceOptions) -> str:
    """The broker's store directory that the options name by a path or a ``file://`` URL. Raises UsageError if the path
    is not absolute."""
    path = options.path.removeprefix("file://")
    if not path.startswith("/"):
        raise UsageError(
            f"{options.path} is not an absolute path",
            hint="source=store needs the path of a broker's store directory on this machine",
        )
    return path


def open_source_store(options: SourceOptions) -> BrokerStore:
    """The store directory that ``options`` name. Raises what open_broker_store raises."""
    conf = read_broker_conf(Path(options.broker_conf)) if options.broker_conf else None
    return open_broker_store(Path(store_path(options)), conf=conf)


def _bound(store: BrokerStore) -> tuple[int, int]:
    """Two physical offsets: the end of what is read of the commitlog, and the one below which every record must be
    valid. Of a running broker both are the end of its consume queues."""
    if store.liveness().is_dead:
        bound = BoundSource(store, no_offsets).ask(store.commit_log.min_phys)
        return bound.phys, bound.proven_phys
    queues = store.consume_queues()
    if queues is None:
        raise UnavailableError(
            f"{store.path}: the running broker keeps its consume queues in RocksDB, where they cannot be read",
            hint="read the archive or stop the broker",
        )
    frontier = queues.frontier_phys()
    return frontier, frontier


def _names(store: BrokerStore, options: SourceOptions) -> BrokerNames:
    found = store.names()
    return BrokerNames(options.cluster or found.cluster, options.broker or found.broker)


def store_chunks(
    options: SourceOptions, predicate: Predicate, on_corrupt: OnCorrupt, part: LogRange
) -> Iterator[RowChunk]:
    """Read all matching rows of a range of a broker's commitlog, window by window. A chunk is valid until the next one
    is taken. ``on_corrupt`` is called for each damaged place."""
    with open_source_store(options) as store:
        table = QueueTable()
        current = _CurrentQueues(store, options, part.proven_phys)
        feed = feed_of(store, table, _filter(options.topics, part.names), BoundSource(store, no_offsets))
        references = LmqDispatch(table, store.consume_queues, partial(lmq_rules, store, {}))
        batch = LogBatch(options.window_bytes)
        batch.reset(part.begin_phys, 0)
        bound = FeedBound(part.end_phys, min(part.proven_phys, part.end_phys))
        while True:
            outcome = feed.advance(batch, bound, batch.room)
            for damage in batch.damaged:
                where = f"{damage.path}: physical offsets [{damage.begin_phys}, {damage.end_phys})"
                place = CorruptPlace(part.names.cluster, part.names.broker, f"{where}: {damage.detail}")
                on_corrupt(place)
            for every, is_lmq in _chunks(batch, table, references, part):
                matching = current.selected(every).matching(predicate, is_lmq=is_lmq)
                if len(matching):
                    yield matching
            if outcome is FeedOutcome.CAUGHT_UP:
                return
            size = feed.oversize_bytes if outcome is FeedOutcome.OVERSIZE else options.window_bytes
            to_phys = batch.to_phys
            if len(batch.arena) != size:
                batch = LogBatch(size)
            batch.reset(to_phys, 0)


class _CurrentQueues:
    """Which records are in the queues that the broker has: deleted topics have no units, and a recreated one has none
    of its earlier generation. From ``proven_phys`` on units may be missing because the broker was killed."""

    def __init__(self, store: BrokerStore, options: SourceOptions, proven_phys: int) -> None:
        self._options, self._proven_phys = options, proven_phys
        self._index = store.consume_queues()
        self._shown = BoundSource(store, no_offsets).shown_queues() if self._index is not None else None
        self._begins: dict[QueueKey, int] = {}

    def selected(self, chunk: RowChunk) -> RowChunk:
        """The rows of ``chunk`` whose topic the options select and that the broker's consume queues show."""
        if not len(chunk):
            return chunk
        numbers, place = np.unique(chunk.queue, return_inverse=True)
        begins = np.array([self._begin_phys(chunk.queues[number]) for number in numbers.tolist()])
        kept = (chunk.phys >= begins[place]) | ((chunk.phys >= self._proven_phys) & (begins[place] < NEVER))
        return chunk if kept.all() else chunk.taken(np.flatnonzero(kept))

    def _begin_phys(self, queue: QueueKey) -> int:
        begin = self._begins.get(queue)
        if begin is None:
            begin = self._begins[queue] = self._read_begin_phys(queue.topic, queue.queue_id)
        return begin

    def _read_begin_phys(self, topic: str, queue_id: int) -> int:
        """The physical offset of the first record that a queue shows. 0 if its files do not tell; NEVER for a topic
        that is not selected; NEVER - 1 for a queue that shows no record."""
        index = self._index
        if not self._options.wants(topic):
            return NEVER
        if index is None or self._shown is None:
            return 0
        if (topic, queue_id) not in self._shown:
            return NEVER - 1
        if not index.contains(topic, queue_id):
            return 0
        units = index.units(topic, queue_id, index.min_offset(topic, queue_id), 1)
        return int(units["phys"][0]) if len(units) else NEVER - 1


def _filter(topics: tuple[str, ...], names: BrokerNames) -> TopicFilter:
    return TopicFilter(topics or ("*",), cluster=names.cluster, broker=names.broker)


def _chunks(
    batch: LogBatch, table: QueueTable, references: LmqDispatch, part: LogRange
) -> Iterator[tuple[RowChunk, bool]]:
    """The rows of a batch of the commitlog as two chunks: its messages in their own queues, with False, and the entries
    that refer to them in LMQs, with True."""
    columns = batch.columns
    queues = [
        QueueKey(table.topic(ordinal), int(table.queue_id[ordinal]), NO_GENERATION)
        for ordinal in range(len(table))
    ]
    word = references.offsets(columns, lambda ordinals: np.full(len(ordinals), UNKNOWN))
    lmq, lmq_offset = resolved_lmq_rows(columns, word)
    for rows, queue, offset, is_lmq in (
        (np.arange(columns.rows), columns.queue[: columns.rows], columns.queue_offset[: columns.rows], False),
        (columns.lmq_row[lmq], columns.lmq_queue[lmq], lmq_offset, True),
    ):
        kept = np.flatnonzero(table.admitted[queue] == ADMITTED)
        row = rows[kept]
        yield (
            RowChunk(
                cluster=part.names.cluster,
                broker=part.names.broker,
                queues=queues,
                queue=queue[kept],
                queue_offset=offset[kept],
                inner_num=np.ones(len(row), np.int32) if is_lmq else columns.inner_num[row],
                phys=columns.phys[row],
                size=columns.size[row],
                store_timestamp=columns.store_timestamp[row],
                tags_code=columns.tags_code[row],
                is_batch=(columns.flags[row] & FLAG_BATCH) != 0,
                data=batch.arena,
                starts=columns.position[row],
                source=part.path,
            ),
            is_lmq,
        )
