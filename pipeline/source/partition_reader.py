"""Reads one partition in a worker: from options and plain data to Arrow batches, within a bounded memory.

Owns what happens to damage: FAILFAST raises, PERMISSIVE reports and goes on. Everything a worker needs is opened here
and closed when the partition is done.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.batches.message_batches import BatchBuilder
from pipeline.options.columns import CORRUPT_RECORD, Column, Cost, cost_of
from pipeline.options.predicate import Predicate
from pipeline.options.source_options import Mode, SourceOptions
from pipeline.plan.archive_plan import opened
from pipeline.plan.partitions import Slices
from pipeline.scan.archive_scan import ArchiveScanner
from pipeline.scan.row_chunk import CorruptPlace, RowChunk
from pipeline.scan.store_scan import LogRange, StoreScanner
from pipeline.source.worker_memory import keep_freed_memory
from tiered.errors import CorruptionError
from tiered.formats.keys import archive_prefix
from tiered.object_store.prefixed import PrefixedStore

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_begun = _settled = False


def read_in_worker(
    part: Slices | LogRange,
    options: SourceOptions,
    predicate: Predicate,
    columns: list[Column],
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """``read_partition`` in a Spark worker, a process that does nothing else and collects all garbage after every task.

    After the first one what libraries and kernels keep is left out of that: it took longer than a small partition.
    """
    global _begun, _settled  # noqa: PLW0603 - of the process
    if not _begun:
        keep_freed_memory()
        _begun = True
    yield from read_partition(part, options, predicate, columns, schema)
    if not _settled:
        gc.collect()
        gc.freeze()
        _settled = True


def read_partition(
    part: Slices | LogRange,
    options: SourceOptions,
    predicate: Predicate,
    columns: list[Column],
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """The batches of ``part``. Raises CorruptionError naming object and range in mode FAILFAST."""
    damage = _Damage(options.mode, any(column.name == CORRUPT_RECORD for column in columns))
    builder = BatchBuilder(columns, schema, batch_bytes=options.batch_bytes, on_corrupt=damage)
    for chunk in _chunks(part, options, predicate, damage, with_records=cost_of(columns) > Cost.FOOTER):
        yield from builder.batches(chunk)
        yield from map(builder.corrupt_batch, damage.taken())
    yield from map(builder.corrupt_batch, damage.taken())


def _chunks(
    part: Slices | LogRange,
    options: SourceOptions,
    predicate: Predicate,
    damage: _Damage,
    *,
    with_records: bool,
) -> Iterator[RowChunk]:
    if isinstance(part, LogRange):
        log = StoreScanner(options, predicate, window_bytes=options.window_bytes, on_corrupt=damage)
        yield from log.chunks(part)
        return
    with opened(options) as store:
        scanner = ArchiveScanner(
            PrefixedStore(store, archive_prefix(part.archive.cluster, part.archive.broker)),
            predicate,
            with_records=with_records,
            window_bytes=options.window_bytes,
            on_corrupt=damage,
            may_have_expired=not options.fail_on_data_loss,
        )
        yield from scanner.chunks(part)


class _Damage:
    """What to do about bytes that fail a check, and what was found so far."""

    def __init__(self, mode: Mode, wants_rows: bool) -> None:
        self._mode = mode
        self._wants_rows = wants_rows
        self._found: list[CorruptPlace] = []

    def __call__(self, place: CorruptPlace) -> None:
        if self._mode is Mode.FAILFAST:
            raise CorruptionError(place.message, hint="option mode=PERMISSIVE skips and reports it")
        logger.warning("skipped: %s", place.message)
        if self._wants_rows:
            self._found.append(place)

    def taken(self) -> list[CorruptPlace]:
        """What was found since the last call, for rows of its own."""
        found, self._found = self._found, []
        return found
