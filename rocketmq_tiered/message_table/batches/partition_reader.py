"""Reads one partition as Arrow batches in bounded memory, and handles damage by mode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rocketmq_tiered.message_table.batches.exploded import exploded
from rocketmq_tiered.message_table.batches.message_batches import BatchBuilder
from rocketmq_tiered.message_table.batches.views import view_chunks
from rocketmq_tiered.message_table.options.columns import CORRUPT_RECORD, Column, Cost
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import Mode, SourceOptions, View
from rocketmq_tiered.message_table.plan.archive_plan import archive_store, opened
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.archive_scan import archive_chunks
from rocketmq_tiered.message_table.scan.queue_scan import ArchiveScan
from rocketmq_tiered.message_table.scan.row_chunk import CorruptPlace, RowChunk
from rocketmq_tiered.message_table.scan.store_scan import LogRange, store_chunks
from tiered.errors import CorruptionError

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)


def read_partition(
    part: Slices | LogRange,
    options: SourceOptions,
    predicate: Predicate,
    columns: list[Column],
    schema: pa.Schema,
    skipped: Callable[[CorruptPlace], object] = lambda place: None,
) -> Iterator[pa.RecordBatch]:
    """The batches of ``part``. In mode FAILFAST, raises CorruptionError naming object and range; in the other one,
    ``skipped`` gets what was skipped."""
    damage = _Damage(options.mode, any(column.name == CORRUPT_RECORD for column in columns), skipped)
    builder = BatchBuilder(columns, schema, batch_bytes=options.batch_bytes, on_corrupt=damage)
    with_records = options.cost_of(columns) > Cost.FOOTER
    for chunk in _chunks(part, options, predicate, damage, with_records=with_records):
        yield from builder.batches(chunk)
        yield from map(builder.corrupt_batch, damage.drained())
    yield from map(builder.corrupt_batch, damage.drained())


def _chunks(
    part: Slices | LogRange,
    options: SourceOptions,
    predicate: Predicate,
    damage: _Damage,
    *,
    with_records: bool,
) -> Iterator[RowChunk]:
    explode = exploded if options.explode_batches else _unchanged
    if isinstance(part, LogRange):
        yield from map(explode, store_chunks(options, predicate, damage, part))
        return
    with opened(options) as store:
        scan = ArchiveScan(
            archive_store(store, part.archive.cluster, part.archive.broker),
            predicate,
            with_records=with_records,
            window_bytes=options.window_bytes,
            on_corrupt=damage,
            may_have_expired=not options.fail_on_data_loss,
        )
        if options.view is View.MESSAGES:
            yield from map(explode, archive_chunks(scan, part))
        else:
            yield from view_chunks(scan, part, options.view, explode)


def _unchanged(chunk: RowChunk) -> RowChunk:
    return chunk


class _Damage:
    """Handles damage by mode, and collects it for rows of its own."""

    def __init__(self, mode: Mode, wants_rows: bool, skipped: Callable[[CorruptPlace], object]) -> None:
        self._mode, self._skipped = mode, skipped
        self._wants_rows = wants_rows
        self._found: list[CorruptPlace] = []

    def __call__(self, place: CorruptPlace) -> None:
        if self._mode is Mode.FAILFAST:
            raise CorruptionError(place.message, hint="option mode=PERMISSIVE skips and reports damage")
        logger.warning("skipped: %s", place.message)
        self._skipped(place)
        if self._wants_rows:
            self._found.append(place)

    def drained(self) -> list[CorruptPlace]:
        """The damage found since the last call."""
        found, self._found = self._found, []
        return found
