"""Worker tasks of a bulk backfill: scan a part of a commitlog into cycles; encode and upload one cycle.

Both read with the uploader's dispatcher, so a cycle has the same bytes both times. backfill_driver.py orders and
commits the cycles.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from rocketmq_tiered.spark.jobs.backfill_tails import moves_of
from rocketmq_tiered.spark.jobs.backfill_tasks import (
    LogPart,
    PutCycle,
    PutTask,
    Scan,
    ScannedCycle,
    ScanTask,
    StoreSource,
)
from rocketmq_tiered.spark.jobs.tasks import ATTEMPTS_PER_TASK, attempt_number
from tiered.broker_store.store import BrokerStore
from tiered.catalog.state import NO_CHECK
from tiered.errors import CorruptionError, UnavailableError
from tiered.formats.segment import BlockCodec, EncodedSegment, SegmentMeta, SegmentScratch, encode_segment
from tiered.kernels.queue_table import QueueTable
from tiered.model.tables import GapReason
from tiered.object_store.interface import ObjectStore
from tiered.object_store.own_name import put_own
from tiered.settings.sections import OffloadSettings
from uploader.attempts import AttemptPolicy, Stop, after_failure, attempt_timeout_ms
from uploader.bound_source import BoundSource, no_offsets
from uploader.cycle_draft import CycleRange, cycle_draft, gap_reason, object_key
from uploader.cycle_plan import CyclePlan, CyclePlanner
from uploader.dispatcher import StepResult, TieredDispatcher
from uploader.double_buffer import DoubleBuffer
from uploader.log_batch import LogBatch, LogBatchPool
from uploader.outage_limit import outage_error
from uploader.queue_tails import QueueTails
from uploader.queue_ttl_classes import QueueTtlClasses
from uploader.store_feed import feed_of, header_check_of

logger = logging.getLogger(__name__)

ARENA_SLACK = 0.25
"""Room above batch_bytes for the record that fills a cycle."""
ATTEMPTS_MAX = ATTEMPTS_PER_TASK - 1
"""Attempts at one cycle before its task fails, regardless of the outage limit."""


# -- scan -----------------------------------------------------------------------------------------------------


def scan_part(task: ScanTask) -> Scan:
    """Cut a part of the log into cycles and summarise each."""
    cycles = []
    table = QueueTable()
    with task.source.open() as store:
        # Plan each cycle as if it were the first.
        planner = CyclePlanner(table, QueueTails(), split_bytes=task.settings.split_bytes, knows_ends=False)
        for batch in _cycles(store, task.source, task.settings, table, task.part):
            # A new check for each cycle: the result must not depend on the cost of earlier checks.
            header_check = header_check_of(store, table)
            plan = header_check.plan(planner, batch, lambda _: GapReason.NEVER_WRITTEN)
            ordinals, moves = moves_of(plan, table)
            part = replace(task.part, from_phys=batch.from_phys, to_phys=batch.to_phys, is_cycle=True)
            lmq = [
                (phys, table.topic(ordinal), int(table.queue_id[ordinal]), offset)
                for (phys, ordinal), offset in batch.lmq.items()
            ]
            cycles.append(
                ScannedCycle(
                    part,
                    plan.rows,
                    bool(batch.damaged),
                    bool(batch.lost),
                    batch.columns.phys[batch.excluded].tolist(),
                    lmq,
                    ordinals,
                    moves,
                )
            )
    queues = [(table.topic(i), int(table.queue_id[i])) for i in range(len(table))]
    return Scan(queues, cycles, task.part)


def _cycles(
    store: BrokerStore, source: StoreSource, settings: OffloadSettings, table: QueueTable, part: LogPart
) -> Iterator[LogBatch]:
    """The cycles of ``part``. A batch is valid until the next one is requested."""
    feed = feed_of(store, table, source.topics, BoundSource(store, no_offsets))
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
    """Read the cycle again, plan it from its queues' ends, encode it, and upload its objects with keys of this attempt.

    Raises CorruptionError if the log changed since the scan, UnavailableError if the store refused every request for
    ``outage_limit_s``, and permanent errors.
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
        excluded = np.flatnonzero(np.isin(batch.columns.phys[: batch.columns.rows], task.excluded)).tolist()
        if len(excluded) != len(task.excluded):
            raise _changed(task)
        header_check_of(store, table).exclude(batch, excluded)
        reason = gap_reason(
            is_lost=bool(batch.lost),
            is_damaged=bool(batch.damaged),
            was_damaged=task.was_damaged,
            was_lost=task.was_lost,
        )
        planner = CyclePlanner(
            table,
            tails,
            split_bytes=task.settings.split_bytes,
            skipped=task.skipped,
            ttl_classes=QueueTtlClasses(task.rules, task.topics),
        )
        lmq = {(phys, table.ordinal(topic, queue_id)): offset for phys, topic, queue_id, offset in task.lmq}
        plan = planner.plan(batch.columns, gap_reason=reason, excluded=batch.excluded, lmq=lmq)
        if plan.rows != task.rows:
            raise _changed(task)
        result = _CycleUpload(task, archive).run(plan, batch)
        batches.close()  # type: ignore[attr-defined]
    return result


def _changed(task: PutTask) -> CorruptionError:
    part = task.part
    return CorruptionError(
        f"{task.source.path}: physical offsets [{part.from_phys}, {part.to_phys}) changed while they were read",
        hint="stop the broker that writes to this store and run the command again",
    )


class _CycleUpload:
    """Upload attempts of one cycle."""

    def __init__(self, task: PutTask, archive: ObjectStore) -> None:
        self._task = task
        self._archive = archive
        self._policy = AttemptPolicy(timeout_ms_max=task.settings.attempt_timeout_ms)
        self._attempt = attempt_number()
        self._abandoned: list[str] = []

    def run(self, plan: CyclePlan, batch: LogBatch) -> PutCycle:
        """Attempt with new keys each time until every object is durable."""
        failures = 0
        refused_since_s = 0.0
        while True:
            keys, encoded = self._encode(plan, batch)
            error = self._put_all(keys, encoded, failures)
            if error is None:
                break
            refused_since_s = refused_since_s if failures else time.monotonic()
            failures += 1
            self._abandoned += keys
            jitter = random.random()  # nosec B311
            step = after_failure(self._policy, error, failures, jitter)
            if isinstance(step, Stop):
                raise error
            outage_limit_s = self._task.outage_limit_s
            if time.monotonic() - refused_since_s >= outage_limit_s or failures >= ATTEMPTS_MAX:
                raise outage_error(outage_limit_s, str(error)) from error
            logger.warning("upload attempt abandoned: %s", error)
            time.sleep(step.delay_ms / 1000)
        task = self._task
        check = batch.log_check() or NO_CHECK
        place = CycleRange(task.epoch, task.history, task.part.from_phys, task.part.to_phys, check)
        return PutCycle(
            draft=cycle_draft(plan, keys, encoded, place, batch),
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
            line=task.history,
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
        """The first error after all requests ended, permanent errors first."""

        def put(key: str, segment: EncodedSegment) -> None:
            timeout_ms = attempt_timeout_ms(self._policy, segment.size_bytes, failures)
            put_own(self._archive, key, segment.body, timeout_s=timeout_ms / 1000)

        with ThreadPoolExecutor(self._task.settings.upload_threads, thread_name_prefix="put") as pool:
            puts = [pool.submit(put, key, segment) for key, segment in zip(keys, encoded, strict=True)]
            errors = [future.exception() for future in puts]
        found = [error for error in errors if isinstance(error, Exception)]
        fatal = [error for error in found if not isinstance(error, UnavailableError)]
        return next(iter(fatal or found), None)
