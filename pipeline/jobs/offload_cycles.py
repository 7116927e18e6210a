"""The worker's half of bulk back-fill: scan a part of a commitlog into cycles; encode and put one cycle.

Both halves read with the uploader's own dispatcher, so a cycle is the same bytes both times. What a task does is
described by plain data; it opens store and archive itself.

Owns what a task does and returns. Does not own the order of cycles, epochs and commits (offload.py).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.jobs.offload_tails import moves_of
from pipeline.jobs.tasks import attempt_number
from tiered.broker_store.conf import BrokerConf, read_broker_conf
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.catalog.commit import CommitDraft
from tiered.catalog.state import NO_CHECK
from tiered.errors import CorruptionError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.formats.segment import BlockCodec, EncodedSegment, SegmentMeta, SegmentScratch, encode_segment
from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import SCHEDULE_TOPIC, TopicFilter
from tiered.model.tables import GapReason
from tiered.object_store.options import StoreOptions
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.protocol import ObjectStore
from tiered.object_store.url import open_store
from tiered.settings.sections import OffloadSettings
from uploader.attempts import AttemptPolicy, Stop, after_failure, attempt_timeout_ms
from uploader.bound_source import BoundSource, no_word
from uploader.cycle_draft import CycleRange, cycle_draft, gap_reason, object_key
from uploader.cycle_plan import CyclePlan, CyclePlanner
from uploader.dispatcher import StepResult, TieredDispatcher
from uploader.double_buffer import DoubleBuffer
from uploader.log_batch import DamagedRange, LogBatch, LogBatchPool
from uploader.log_feed import FeedBound, LogFeed
from uploader.queue_tails import QueueTails

logger = logging.getLogger(__name__)

ARENA_SLACK = 0.25
"""Room beyond batch_bytes for the record that fills a cycle."""
ATTEMPTS_MAX = 30
"""Attempts at one cycle before its task fails, and Spark decides."""

QueueNames = list[tuple[str, int]]


@dataclass(frozen=True)
class StoreSource:
    """A broker's store directory, as every worker sees it, and whose archive it becomes."""

    path: str
    cluster: str
    broker: str
    conf_path: str = ""
    topics: TopicFilter = field(default_factory=TopicFilter)

    def conf(self) -> BrokerConf | None:
        """The broker's configuration, if there is one."""
        return read_broker_conf(Path(self.conf_path)) if self.conf_path else None

    def open(self) -> BrokerStore:
        """Open it for reading. Raises what open_broker_store raises."""
        return open_broker_store(Path(self.path), conf=self.conf())


@dataclass(frozen=True)
class ArchiveTarget:
    """Where the archives are, and how the object store is opened."""

    url: str
    options: StoreOptions = field(default_factory=StoreOptions)

    @contextmanager
    def open(self, cluster: str, broker: str) -> Iterator[ObjectStore]:
        """The archive of one broker name."""
        root = open_store(self.url, self.options)
        try:
            yield PrefixedStore(root, archive_prefix(cluster, broker))
        finally:
            root.close()


@dataclass(frozen=True)
class LogPart:
    """Physical offsets [from_phys, to_phys); below ``proven_phys`` every record must be valid."""

    from_phys: int
    to_phys: int
    proven_phys: int

    @property
    def bound(self) -> FeedBound:
        """What the feed may read."""
        return FeedBound(self.to_phys, min(self.proven_phys, self.to_phys))


@dataclass(frozen=True)
class ScanTask:
    """Scan ``part``: whole commitlog files."""

    source: StoreSource
    settings: OffloadSettings
    part: LogPart


@dataclass(frozen=True)
class ScannedCycle:
    """A cycle that ``part`` was cut into. ``ordinals`` index the queues of the scan."""

    part: LogPart
    rows: int
    is_damaged: bool
    is_lost: bool
    ordinals: NDArray[np.int64]
    moves: NDArray[np.int64]


@dataclass(frozen=True)
class Scan:
    """What a part of the log holds: cycles that follow one another from its beginning."""

    queues: QueueNames
    cycles: list[ScannedCycle]
    part: LogPart

    @property
    def end_phys(self) -> int:
        """Where the last cycle ends; below the end of the part when what is written ends there."""
        return self.cycles[-1].part.to_phys if self.cycles else self.part.from_phys


@dataclass(frozen=True)
class PutTask:
    """Make one cycle durable in ``epoch``. ``tails`` (TAIL_FIELDS) are of ``queues``, as they were before it."""

    source: StoreSource
    settings: OffloadSettings
    target: ArchiveTarget
    part: LogPart
    epoch: int
    line: int
    catalog_version: int
    writer: str
    queues: QueueNames
    tails: NDArray[np.int64]
    rows: int
    was_damaged: bool
    was_lost: bool


@dataclass(frozen=True)
class PutCycle:
    """A durable cycle. ``draft`` lacks the time; its check is NO_CHECK when the cycle holds no bytes."""

    draft: CommitDraft
    rows: int
    raw_bytes: int
    stored_bytes: int
    abandoned: list[str]
    damaged: list[DamagedRange]
    lost: list[tuple[int, int]]


# -- scan -----------------------------------------------------------------------------------------------------


def scan_part(task: ScanTask) -> Scan:
    """Cut a part of the log into cycles and sum each one up."""
    cycles = []
    table = QueueTable()
    with task.source.open() as store:
        planner = CyclePlanner(table, QueueTails(), split_bytes=task.settings.split_bytes)
        for batch in _cycles(store, task.source, task.settings, table, task.part):
            plan = planner.plan(batch.columns, gap_reason=GapReason.NEVER_WRITTEN)
            ordinals, moves = moves_of(plan, table)
            part = replace(task.part, from_phys=batch.from_phys, to_phys=batch.to_phys)
            cycles.append(
                ScannedCycle(part, plan.rows, bool(batch.damaged), bool(batch.lost), ordinals, moves)
            )
    queues = [(table.topic(i), int(table.queue_id[i])) for i in range(len(table))]
    return Scan(queues, cycles, task.part)


def _cycles(
    store: BrokerStore, source: StoreSource, settings: OffloadSettings, table: QueueTable, part: LogPart
) -> Iterator[LogBatch]:
    """The cycles of ``part``, one at a time: a batch is good until the next one is asked for."""
    schedule = source.topics.admits(SCHEDULE_TOPIC)
    feed = LogFeed(
        store.commit_log,
        table,
        source.topics,
        delay_levels_ms=(store.conf or BrokerConf()).delay_levels_ms if schedule else None,
        next_record=BoundSource(store, no_word).next_record,
    )
    pool = LogBatchPool(batch_bytes=int(settings.batch_bytes * (1 + ARENA_SLACK)), count=1)
    closed: DoubleBuffer[LogBatch] = DoubleBuffer(capacity=1)
    dispatcher = TieredDispatcher(
        feed, pool, closed,
        start_phys=part.from_phys,
        batch_bytes=settings.batch_bytes,
        batch_age_ms=settings.batch_age_ms,
        range_bytes_max=max((file.size_bytes for file in store.commit_log.files), default=1 << 30),
        clock_ms=lambda: 0,
    )  # fmt: skip
    is_over = False
    while not is_over:
        before = dispatcher.cursor
        is_over = dispatcher.compensate(part.bound) is StepResult.CAUGHT_UP and dispatcher.cursor == before
        if is_over:
            dispatcher.close_if_due(force=True)
        batch = closed.get()
        if batch is not None:
            yield batch
            pool.release(batch)


# -- put ------------------------------------------------------------------------------------------------------


def put_cycle(task: PutTask) -> PutCycle:
    """Read the cycle again, plan it from its queues' ends, encode it, and put its objects under keys of this attempt.

    Raises CorruptionError when the log is no longer what was scanned, UnavailableError when the store took nothing in
    ATTEMPTS_MAX attempts, and what repeating cannot help.
    """
    table, tails = QueueTable(), QueueTails()
    for (topic, queue_id), tail in zip(task.queues, task.tails.tolist(), strict=True):
        next_offset, end_byte, end_phys, generation = tail
        tails.set(
            table.ordinal(topic, queue_id),
            next_offset=next_offset, end_byte=end_byte, end_phys=end_phys, generation=generation,
        )  # fmt: skip
    with task.source.open() as store, task.target.open(task.source.cluster, task.source.broker) as archive:
        batches = _cycles(store, task.source, task.settings, table, task.part)
        batch = next(batches, None)
        if batch is None or (batch.from_phys, batch.to_phys) != (task.part.from_phys, task.part.to_phys):
            raise _changed(task)
        reason = gap_reason(
            is_lost=bool(batch.lost),
            is_damaged=bool(batch.damaged),
            was_damaged=task.was_damaged,
            was_lost=task.was_lost,
        )
        planner = CyclePlanner(table, tails, split_bytes=task.settings.split_bytes)
        plan = planner.plan(batch.columns, gap_reason=reason)
        if plan.rows != task.rows:
            raise _changed(task)
        result = _Putter(task, archive).put(plan, batch)
        batches.close()  # type: ignore[attr-defined]
    return result


def _changed(task: PutTask) -> CorruptionError:
    part = task.part
    return CorruptionError(
        f"{task.source.path}: physical offsets [{part.from_phys}, {part.to_phys}) changed while they were read",
        hint="run again; a broker must not write into a store that is back-filled so",
    )


class _Putter:
    """Attempts at one cycle."""

    def __init__(self, task: PutTask, archive: ObjectStore) -> None:
        self._task = task
        self._archive = archive
        self._policy = AttemptPolicy(timeout_ms_max=task.settings.attempt_timeout_ms)
        self._attempt = attempt_number()
        self._abandoned: list[str] = []

    def put(self, plan: CyclePlan, batch: LogBatch) -> PutCycle:
        """Attempt after attempt, each under new keys, until every object is durable."""
        failures = 0
        while True:
            keys, encoded = self._encode(plan, batch)
            error = self._put_all(keys, encoded, failures)
            if error is None:
                break
            failures += 1
            self._abandoned += keys
            step = after_failure(self._policy, error, failures, random.random())
            if isinstance(step, Stop) or failures >= ATTEMPTS_MAX:
                raise error
            logger.warning("upload attempt abandoned: %s", error)
            time.sleep(step.delay_ms / 1000)
        task = self._task
        check = batch.log_check() or NO_CHECK
        place = CycleRange(task.epoch, task.line, task.part.from_phys, task.part.to_phys, check)
        return PutCycle(
            draft=cycle_draft(plan, keys, encoded, place),
            rows=plan.rows,
            raw_bytes=plan.raw_bytes,
            stored_bytes=sum(one.size_bytes for one in encoded),
            abandoned=self._abandoned,
            damaged=batch.damaged,
            lost=batch.lost,
        )

    def _encode(self, plan: CyclePlan, batch: LogBatch) -> tuple[list[str], list[EncodedSegment]]:
        self._attempt += 1
        task, settings = self._task, self._task.settings
        meta = SegmentMeta(
            cluster=task.source.cluster,
            broker=task.source.broker,
            epoch=task.epoch,
            attempt=self._attempt,
            line=task.line,
            catalog_version=task.catalog_version,
            from_phys=batch.from_phys,
            to_phys=batch.to_phys,
            created_ms=time.time_ns() // 1_000_000,
            writer=task.writer,
        )
        codec = BlockCodec(settings.compression_level, settings.block_bytes, 1)
        scratch = SegmentScratch()
        keys, encoded = [], []
        for item in plan.objects:
            keys.append(object_key(item, batch.from_phys, task.epoch, self._attempt))
            encoded.append(
                encode_segment(meta, item.queues, item.runs, item.rows, batch.arena, codec, scratch)
            )
        return keys, encoded

    def _put_all(self, keys: list[str], encoded: list[EncodedSegment], failures: int) -> Exception | None:
        """The first error, once every request has ended."""

        def put(key: str, segment: EncodedSegment) -> None:
            timeout_ms = attempt_timeout_ms(self._policy, segment.size_bytes, failures)
            self._archive.put_if_absent(key, segment.body, timeout_s=timeout_ms / 1000)

        with ThreadPoolExecutor(self._task.settings.upload_threads, thread_name_prefix="put") as pool:
            puts = [pool.submit(put, key, segment) for key, segment in zip(keys, encoded, strict=True)]
            errors = [future.exception() for future in puts]
        found = [error for error in errors if isinstance(error, Exception)]
        fatal = [error for error in found if not isinstance(error, UnavailableError)]
        return next(iter(fatal or found), None)
