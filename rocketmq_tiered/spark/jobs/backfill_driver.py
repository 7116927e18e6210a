"""The driver of a bulk backfill: archives one store directory.

    settle   load the catalog → compare the log with the archive → claim the epoch (uploader/archive_owner.py)
    scan     tasks, one per file:  cut the log into cycles, summarise how each moves the ends of its queues
    put      tasks, one per cycle: encode from the ends before it, upload objects with keys of the claimed epoch
    commit   the driver, in log order, through the catalog protocol
    tables   the broker's topics, groups and offsets; the epoch is released
    finish   an ordinary backfill of the rest: hides deleted queues, builds the index

The archive is the same as from ``tiered backfill``. A killed driver leaves whole commits and garbage of its epoch; the
same job continues from the last commit. Only ``take_over`` fences a writer that has not released its epoch.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rocketmq_tiered.spark.jobs.backfill_cycles import put_cycle, scan_part
from rocketmq_tiered.spark.jobs.backfill_options import BackfillOptions, BackfillReport, Report
from rocketmq_tiered.spark.jobs.backfill_outage import bounded
from rocketmq_tiered.spark.jobs.backfill_parts import grouped, log_parts
from rocketmq_tiered.spark.jobs.backfill_tails import move
from rocketmq_tiered.spark.jobs.backfill_tasks import (
    ArchiveTarget,
    LogPart,
    PutCycle,
    PutTask,
    Scan,
    ScanTask,
    StoreSource,
)
from rocketmq_tiered.spark.jobs.tasks import TaskRunner
from tiered.broker_store.config import state_fingerprint
from tiered.broker_store.store import BrokerStore
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.claims import BACKFILL
from tiered.catalog.state import NO_CHECK
from tiered.errors import TieredError
from tiered.kernels.queue_table import QueueTable
from tiered.object_store.create_race import require_exclusive_creates
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from uploader.archive_owner import ArchiveOwner
from uploader.bound_source import BoundSource, no_offsets
from uploader.broker_state_archive import BrokerStateArchive
from uploader.cycle_draft import draft_in_place
from uploader.metadata_commits import broker_tables
from uploader.offload import Environment, ObjectOptions, Offloader, OffloadIdentity
from uploader.queue_tails import QueueTails
from uploader.queue_ttl_classes import attributes_in_use
from uploader.skipped_log import SkippedLog

CYCLES_PER_CORE = 2
"""Cycles uploaded in one stage: more keep cores busier, fewer repeat less after a kill."""
STAGES_AHEAD = 2
HEARTBEAT_S = 20.0
"""A third of the time after which a writer counts as stopped (tiered.catalog.claims)."""

_FINISH_COUNTS = (
    "messages", "raw_bytes", "stored_bytes", "objects", "commits", "gaps", "damaged", "lost", "hidden",
)  # fmt: skip

T = TypeVar("T")


class StoreBackfill:
    """Archives one store directory."""

    def __init__(
        self, source: StoreSource, url: str, options: BackfillOptions, runner: TaskRunner, report: Report
    ) -> None:
        self._source = source
        self._target = ArchiveTarget(url, options.store)
        self._options = options
        self._runner = runner
        self._report = report
        self._identity = OffloadIdentity(source.cluster, source.broker, _instance(source.path), BACKFILL)
        self._bound_source: BoundSource
        self._table = QueueTable()
        self._tails = QueueTails()
        self._was_damaged = self._was_lost = False
        self._skipped = SkippedLog()
        self._topics: dict[str, Any] = {}
        self._pending_deletions: list[str] = []
        self._result = BackfillReport(source.path, source.cluster, source.broker)

    def run(self) -> BackfillReport:
        """All steps."""
        started_s = time.monotonic()
        with self._source.open() as store:
            with self._target.open(self._source.cluster, self._source.broker) as archive:
                self._ship(store, archive)
            self._finish(store)
        self._result = replace(self._result, duration_s=time.monotonic() - started_s)
        return self._result

    # -- settle -----------------------------------------------------------------------------------------------

    def _ship(self, store: BrokerStore, archive: ObjectStore) -> None:
        self._bound_source = BoundSource(store, no_offsets)
        owner = ArchiveOwner(
            archive,
            store.commit_log,
            self._identity,
            Environment(refuse_empty=partial(require_exclusive_creates, archive)),
            root_every=self._options.settings.root_every,
            take_over=self._options.take_over,
            supersedes_max_bytes=math.inf if self._options.replace_log else 0,
            reported_end_phys=self._bound_source.reported_end_phys,
        )
        writer = owner.writer
        with bounded(self._options.outage_limit_s, lambda: writer.retry_reason, lambda _: writer.abort()):
            self._ship_as(owner, store, archive)

    def _ship_as(self, owner: ArchiveOwner, store: BrokerStore, archive: ObjectStore) -> None:
        log, writer = store.commit_log, owner.writer
        start_phys = owner.open(claim_now=False)
        bound = self._bound_source.ask(start_phys)
        self._result = replace(self._result, from_phys=start_phys, to_phys=start_phys)
        if not writer.is_claimed:
            if start_phys >= min(bound.phys, log.max_file_end):
                return
            # The previous owner may commit until the claim is won: read the start again after it.
            start_phys = owner.open(claim_now=True)
            self._result = replace(self._result, from_phys=start_phys, to_phys=start_phys)
        owner.load_tails(self._table, self._tails)
        self._skipped = SkippedLog.of(writer.state)
        self._topics = self._topic_attributes(store)
        parts = log_parts(store, start_phys, bound.phys, bound.proven_phys)
        self._commit_all(writer, parts)
        self._commit_tables(writer, archive, store)
        writer.release(pending_deletions=self._pending_deletions)

    def _topic_attributes(self, store: BrokerStore) -> dict[str, Any]:
        """Empty where the tables are unreadable: objects are then grouped worse, and _commit_tables fails."""
        try:
            return attributes_in_use(self._options.rules, broker_tables(store)["topics"])
        except TieredError:
            return {}

    def _commit_tables(self, writer: CatalogWriter, archive: ObjectStore, store: BrokerStore) -> None:
        """Commit the broker's topics, groups and offsets if they changed. A copy may lack them."""
        if not state_fingerprint(store.path):
            return
        tables = BrokerStateArchive(archive, lambda: broker_tables(store))
        state = writer.state
        tables.adopt(state.state_objects)
        if state.started and tables.refresh(state.epoch, 1):
            writer.append(replace(draft_in_place(state, _now_ms()), state_objects=tables.pending()))

    def _commit_all(self, writer: CatalogWriter, parts: Sequence[LogPart]) -> None:
        """Stages overlap: during a commit, the next stages are uploaded and the one after is scanned."""
        first, total = parts[0].from_phys if parts else 0, parts[-1].to_phys if parts else 0
        self._report(self._source.path, 0, total - first)
        stages: deque[Future[list[PutCycle]]] = deque()
        with ThreadPoolExecutor(STAGES_AHEAD, thread_name_prefix="put-stage") as pool:
            try:
                for tasks in grouped(self._put_tasks(writer, parts), self._stage_cycles):
                    stages.append(pool.submit(self._runner.run, put_cycle, tasks, "backfill: upload"))
                    if len(stages) > STAGES_AHEAD:
                        self._commit(writer, _awaited(stages.popleft(), writer), first, total)
                while stages:
                    self._commit(writer, _awaited(stages.popleft(), writer), first, total)
            except BaseException:
                _call_off(stages)
                self._runner.cancel()
                raise
        self._report(self._source.path, total - first, total - first)

    @property
    def _stage_cycles(self) -> int:
        return CYCLES_PER_CORE * self._runner.parallelism

    def _put_tasks(self, writer: CatalogWriter, parts: Sequence[LogPart]) -> Iterator[PutTask]:
        """Cycles in log order, each with the ends before it."""
        for scan in self._scans(writer, parts):
            ordinals = np.array([self._table.ordinal(*queue) for queue in scan.queues], np.int64)
            self._tails.grow(len(self._table))
            for cycle in scan.cycles:
                before = move(self._tails, ordinals[cycle.ordinals], cycle.moves)
                state = writer.state
                yield PutTask(
                    source=self._source,
                    settings=self._options.settings,
                    target=self._target,
                    part=cycle.part,
                    epoch=state.epoch,
                    history=state.cursor.history,
                    catalog_version=state.version,
                    writer=self._identity.instance,
                    queues=[scan.queues[ordinal] for ordinal in cycle.ordinals.tolist()],
                    tails=before,
                    rows=cycle.rows,
                    excluded=cycle.excluded,
                    lmq=cycle.lmq,
                    was_damaged=self._was_damaged,
                    was_lost=self._was_lost,
                    skipped=self._skipped,
                    rules=self._options.rules,
                    topics=self._topics,
                    outage_limit_s=self._options.outage_limit_s,
                )
                self._was_damaged |= cycle.is_damaged
                self._was_lost |= cycle.is_lost
            if scan.end_phys < scan.part.to_phys:
                return  # the end of the written log

    def _scans(self, writer: CatalogWriter, parts: Sequence[LogPart]) -> Iterator[Scan]:
        """Scans of ``parts`` in order. The next stage of scans runs in the background."""
        scans = [ScanTask(self._source, self._options.settings, part) for part in parts]
        with ThreadPoolExecutor(1, thread_name_prefix="scan-stage") as pool:
            ahead: deque[Future[list[Scan]]] = deque()
            try:
                for tasks in grouped(iter(scans), self._runner.parallelism):
                    ahead.append(pool.submit(self._runner.run, scan_part, tasks, "backfill: scan"))
                    if len(ahead) > 1:
                        yield from _awaited(ahead.popleft(), writer)
                while ahead:
                    yield from _awaited(ahead.popleft(), writer)
            finally:
                _call_off(ahead)

    def _commit(self, writer: CatalogWriter, cycles: list[PutCycle], first: int, total: int) -> None:
        self._bound_source.refuse_started_broker()
        for cycle in cycles:
            self._pending_deletions += cycle.abandoned
            check = cycle.draft.check if cycle.draft.check != NO_CHECK else writer.state.cursor.check
            draft = replace(
                cycle.draft,
                check=check,
                pending_deletions=list(self._pending_deletions),
                created_ms=_now_ms(),
            )
            writer.append(draft)
            self._pending_deletions = []
            self._result = replace(self._result, to_phys=draft.to_phys).plus(
                messages=cycle.rows,
                raw_bytes=cycle.raw_bytes,
                stored_bytes=cycle.stored_bytes,
                objects=len(draft.object_keys),
                commits=1,
                gaps=len(draft.gaps),
                damaged=len(cycle.damaged),
                lost=len(cycle.lost),
                abandoned=len(cycle.abandoned),
            )
            self._report(self._source.path, draft.to_phys - first, total - first)

    # -- finish -----------------------------------------------------------------------------------------------

    def _finish(self, store: BrokerStore) -> None:
        """Hide deleted queues and build the index. Archives messages only if the log grew."""
        with closing(open_store(self._target.url, self._target.options)) as root:
            offloader = Offloader(
                store,
                root,
                self._identity,
                self._options.settings,
                topic_filter=self._source.topics,
                offsets_source=no_offsets,
                options=ObjectOptions(self._options.index, self._options.rules),
            )
            outage_limit_s = self._options.outage_limit_s
            with bounded(outage_limit_s, lambda: offloader.retry_reason, offloader.abort, offloader.status):
                last = offloader.run(threading.Event(), follow=False)
        self._result = replace(self._result, to_phys=max(self._result.to_phys, last.to_phys)).plus(
            **{name: getattr(last, name) for name in _FINISH_COUNTS}
        )


def _awaited(stage: Future[T], writer: CatalogWriter) -> T:
    """The result of ``stage``. Commits a heartbeat while it runs: another host may take over from a backfill without
    commits for a minute."""
    while True:
        try:
            return stage.result(timeout=HEARTBEAT_S)
        except TimeoutError:
            if stage.done():
                raise
        writer.append(draft_in_place(writer.state, _now_ms()))


def _call_off(stages: Iterable[Future[T]]) -> None:
    """Cancel ``stages`` that have not started."""
    for stage in stages:
        stage.cancel()


def _instance(path: str) -> str:
    """The writer's name: stable for one store on one host, so that a killed job can be repeated at once."""
    place = f"{os.uname().nodename}\0{path}"
    return f"offload-{hashlib.sha256(place.encode()).hexdigest()[:16]}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
