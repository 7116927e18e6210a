"""The parts of the write path and how they hold together: what each is given, and the buffers between them.

Owns the wiring only. Threads, their order and the end are backfill.py's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tiered.broker_store.pins import PinKeeper
from tiered.broker_store.store import BrokerStore
from tiered.formats.segment import BlockCodec
from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import TopicFilter
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import IndexSettings, OffloadSettings
from uploader.archive_owner import ArchiveOwner
from uploader.attempts import AttemptPolicy
from uploader.bound_source import BoundSource
from uploader.broker_state_archive import BrokerStateArchive
from uploader.cycle_plan import CyclePlanner
from uploader.cycle_upload import IN_FLIGHT_MAX, CycleUploader, UploadContext
from uploader.dispatcher import TieredDispatcher
from uploader.double_buffer import DoubleBuffer
from uploader.follow_loop import FollowContext, FollowLoop
from uploader.index_builder import IndexBuilder
from uploader.log_batch import LogBatch, LogBatchPool
from uploader.metadata_commits import MetadataCommits, MetadataContext, broker_tables
from uploader.offload_environment import Environment, OffloadIdentity
from uploader.queue_tails import QueueTails
from uploader.skipped_log import SkippedLog
from uploader.store_feed import feed_of, header_check_of

ARENA_SLACK = 0.25
"""Room beyond batch_bytes, so that a retry can take newer data along."""


@dataclass(frozen=True)
class OffloadGiven:
    """What there is before the catalog is read. ``archive`` is the archive's own prefix."""

    store: BrokerStore
    archive: ObjectStore
    identity: OffloadIdentity
    settings: OffloadSettings
    index_settings: IndexSettings
    topic_filter: TopicFilter
    environment: Environment
    owner: ArchiveOwner
    bound_source: BoundSource
    pins: PinKeeper | None
    table: QueueTable = field(default_factory=QueueTable)
    tails: QueueTails = field(default_factory=QueueTails)


@dataclass(frozen=True)
class OffloadParts:
    """What works on one archive."""

    pool: LogBatchPool
    dispatcher: TieredDispatcher
    uploader: CycleUploader
    index_builder: IndexBuilder
    marks: MetadataCommits
    loop: FollowLoop


def wire(
    given: OffloadGiven, start_phys: int, *, behind: threading.Event, check_failure: Callable[[], None]
) -> OffloadParts:
    """The parts, to begin at ``start_phys``. ``behind`` wakes the compensate group; ``check_failure`` raises what
    made another thread end."""
    settings, environment, writer = given.settings, given.environment, given.owner.writer
    arena_bytes = int(settings.batch_bytes * (1 + ARENA_SLACK))
    count = max(2, min(IN_FLIGHT_MAX + 2, settings.memory_budget_bytes // (2 * arena_bytes)))
    pool = LogBatchPool(batch_bytes=arena_bytes, count=count)
    closed: DoubleBuffer[LogBatch] = DoubleBuffer(capacity=count)
    dispatcher = TieredDispatcher(
        feed_of(given.store, given.table, given.topic_filter, given.bound_source), pool, closed,
        start_phys=start_phys,
        batch_bytes=settings.batch_bytes,
        batch_age_ms=settings.batch_age_ms,
        range_bytes_max=max((file.size_bytes for file in given.store.commit_log.files), default=1 << 30),
        clock_ms=environment.clock_ms,
    )  # fmt: skip
    state_archive = BrokerStateArchive(given.archive, lambda: broker_tables(given.store))
    state = writer.state_or_none
    if state is not None:
        state_archive.adopt(state.state_objects)
    context = _upload_context(given, pool)
    uploader = CycleUploader(
        context, closed,
        upload_threads=settings.upload_threads,
        extend=lambda batch: dispatcher.extend_into(batch, given.bound_source.feed),
        state_archive=state_archive,
    )  # fmt: skip
    index_builder = IndexBuilder(
        given.archive, writer, given.index_settings, clock_ms=environment.clock_ms, log=environment.log
    )  # fmt: skip
    marks = MetadataCommits(
        MetadataContext(
            given.store, writer, uploader, state_archive, given.owner.claim, environment.log, environment.wait
        )
    )
    loop = FollowLoop(
        FollowContext(
            store=given.store,
            settings=settings,
            bound_source=given.bound_source,
            dispatcher=dispatcher,
            writer=writer,
            pins=given.pins,
            behind=behind,
            clock_ms=environment.clock_ms,
            check_failure=check_failure,
        )
    )
    return OffloadParts(pool, dispatcher, uploader, index_builder, marks, loop)


def _upload_context(given: OffloadGiven, pool: LogBatchPool) -> UploadContext:
    settings, environment = given.settings, given.environment
    return UploadContext(
        archive=given.archive,
        writer=given.owner.writer,
        planner=CyclePlanner(
            given.table,
            given.tails,
            split_bytes=settings.split_bytes,
            skipped=SkippedLog.of(given.owner.writer.state),
        ),
        header_check=header_check_of(given.store, given.table, given.bound_source),
        tails=given.tails,
        pool=pool,
        codec=BlockCodec(settings.compression_level, settings.block_bytes, settings.compress_threads),
        policy=AttemptPolicy(timeout_ms_max=settings.attempt_timeout_ms),
        cluster=given.identity.cluster,
        broker=given.identity.broker,
        writer_name=given.identity.instance,
        clock_ms=environment.clock_ms,
        monotonic_s=time.monotonic,
        jitter=environment.jitter,
        claim=given.owner.claim,
        log=environment.log,
    )
