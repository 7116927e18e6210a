"""The archive as a Spark stream: each micro-batch is a range of offsets per queue at a recorded catalog version.

Exactly once: the content of a batch follows from its two offsets, which Spark logs before the batch runs.
archive_follower.py chooses the offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from rocketmq_tiered.message_table.options.columns import Cost
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import Source, SourceOptions, Starting, View
from rocketmq_tiered.message_table.plan.archive_plan import cut_for
from rocketmq_tiered.spark.source.archive_follower import (
    ArchiveFollower,
    StreamOffset,
    from_json,
    to_json,
)
from rocketmq_tiered.spark.source.spark_types import columns_of
from rocketmq_tiered.spark.source.worker import read_in_worker, with_short_trace
from tiered.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa


class MessageStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the micro-batches of one query. Its options travel to the workers, its open store does not."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        if options.source is not Source.ARCHIVE:
            raise UsageError("streams read archives only", hint="read a store directory with spark.read")
        if options.until_ms is not None or options.ends:
            raise UsageError(
                "streams do not take until and endingOffsets", hint="read a range with spark.read"
            )
        if options.version is not None or options.version_ms is not None:
            raise UsageError("streams do not take version and timestampAsOf", hint="they follow the archive")
        if options.view is View.LATEST or options.more_paths:
            what = "view=latest" if options.view is View.LATEST else "a list of paths"
            raise UsageError(
                f"streams do not take {what}", hint="use view=changes, and a stream for each path"
            )
        if options.since_ms is not None:
            starting, since_ms = Starting.TIMESTAMP, options.since_ms
            options = replace(options, starting=starting, starting_timestamp=since_ms, since_ms=None)
        self._options = options
        self._schema = schema
        self._follower: ArchiveFollower | None = None
        self._target: StreamOffset | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_follower": None, "_target": None}

    @property
    def _archive(self) -> ArchiveFollower:
        if self._follower is None:
            self._follower = ArchiveFollower(self._options)
        return self._follower

    @with_short_trace
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names from here on
        """The start of a new query."""
        return to_json(self._archive.starting_offset())

    @with_short_trace
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch: everything, or as much as ``limit`` allows."""
        begin = from_json(start)
        newest = self._archive.with_hidden(self._newest(), begin)
        return to_json(self._archive.limited(begin, newest, limit))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """maxRowsPerTrigger or maxBytesPerTrigger."""
        if self._options.max_rows_per_trigger is not None:
            return ReadMaxRows(self._options.max_rows_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    @with_short_trace
    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """The newest offset, for the progress of the query."""
        return to_json(self._newest())

    def _newest(self) -> StreamOffset:
        # With Trigger.AvailableNow, the run ends at the target, which may precede the first archived message.
        return self._archive.newest_offset() if self._target is None else self._target

    @with_short_trace
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Limit this run to what is archived now."""
        self._target = self._archive.newest_offset()

    @with_short_trace
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The parts of one batch. The same offsets always give the same messages."""
        is_header_only = self._options.cost_of(columns_of(self._schema)) <= Cost.FOOTER
        parts = self._archive.parts(from_json(start), from_json(end), is_header_only=is_header_only)
        return [InputPartition(part) for part in cut_for(self._options, parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The batches of one partition, in a worker."""
        return read_in_worker(
            partition.value,
            self._options,
            Predicate(),
            columns_of(self._schema),
            to_arrow_schema(self._schema, timezone="UTC"),
        )

    def stop(self) -> None:
        """Close the archive when the query ends."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None
