"""The data source ``rocketmq-tiered``: Spark's Python DataSource API over archives and broker stores.

Spark runs it in Python processes beside the JVM: created in one, planned in another, read in workers. Only options
and plain data travel between them.

The archive as a Spark stream: each micro-batch is a range of offsets per queue at a recorded catalog version.

Exactly once: the content of a batch follows from its two offsets, which Spark logs before the batch runs.
archive_follower.py chooses the offsets.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rocketmq_tiered.message_table.options.columns import (
    CORRUPT_RECORD,
    INNER,
    SPARK_TYPES,
    TIMESTAMP,
    Column,
    Cost,
    chosen,
)
from rocketmq_tiered.message_table.options.predicate import NUMBER_COLUMNS, Predicate, push_down
from rocketmq_tiered.message_table.options.source_options import (
    SOURCE_NAME,
    Source,
    SourceOptions,
    Starting,
    View,
    parse_options,
)
from rocketmq_tiered.message_table.plan.archive_plan import Names, cut_for, pinned_versions, plan
from rocketmq_tiered.message_table.scan.store_scan import plan_ranges
from rocketmq_tiered.spark.source.archive_follower import (
    ArchiveFollower,
    StreamOffset,
    from_json,
    to_json,
)
from rocketmq_tiered.spark.source.worker import read_in_worker, short_trace
from tiered.errors import UsageError
from tiered.formats.fields import INNER_FIELD_TABLE

if TYPE_CHECKING:
    import pyarrow as pa


class MessageStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the micro-batches of one query. Its options travel to the workers, its open store does not."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Take the options and columns of a stream. Raises UsageError for options that have no meaning for a stream;
        ``since`` chooses where it starts, as a starting timestamp does."""
        if options.source is not Source.ARCHIVE:
            raise UsageError(
                "a stream cannot read a store directory, only archives",
                hint="read a store directory with spark.read",
            )
        if options.until_ms is not None or options.ends:
            raise UsageError(
                "streams do not take the options until and endingOffsets, as they have no end",
                hint="read a range with spark.read",
            )
        if options.version is not None or options.version_ms is not None:
            raise UsageError(
                "streams do not take the options version and timestampAsOf, as they follow the archive",
                hint="read a version with spark.read",
            )
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

    @short_trace()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names from here on
        """The start of a new query."""
        return to_json(self._archive.starting_offset())

    @short_trace()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch: everything, or as much as ``limit`` allows."""
        begin = from_json(start)
        newest = self._archive.with_hidden(self._newest(), begin)
        return to_json(self._archive.limited(begin, newest, limit))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """How much a micro-batch reads by the options maxRowsPerTrigger or maxBytesPerTrigger; without them
        everything."""
        if self._options.max_rows_per_trigger is not None:
            return ReadMaxRows(self._options.max_rows_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    @short_trace()
    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """The newest offset, for the progress of the query."""
        return to_json(self._newest())

    def _newest(self) -> StreamOffset:
        # With Trigger.AvailableNow, the run ends at the target, which may precede the first archived message.
        return self._archive.newest_offset() if self._target is None else self._target

    @short_trace()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Limit this run to what is archived now."""
        self._target = self._archive.newest_offset()

    @short_trace()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """What the tasks of the micro-batch between two offsets read. The same offsets always give the same
        messages."""
        is_header_only = self._options.cost_of(columns_of(self._schema)) <= Cost.FOOTER
        parts = self._archive.parts(from_json(start), from_json(end), is_header_only=is_header_only)
        return [InputPartition(part) for part in cut_for(self._options, parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition of a micro-batch in a worker, as Arrow batches."""
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


_PREFIX = "rocketmq-tiered-scan-"
_KEPT_S = 86_400.0


def note_scan(frame: str, what: str, scan: str, attempt: object) -> None:
    """Note in a temporary file of the DataFrame ``frame`` that one of its scans uses ``what`` (its filters, or one of
    its partitions). Raises UsageError if another scan did, or this one in the same ``attempt`` of its task: Spark would
    apply the filters of one scan to the other."""
    path = Path(tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}-{frame}")
    line = f"{what} {scan} {attempt}\n"
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = [one for one in file if one.startswith(f"{what} ")]
        file.write(line)
        if line in known or not all(one.startswith(f"{what} {scan} ") for one in known):
            raise UsageError(
                "with pushFilters a DataFrame can be scanned once: Spark would apply the filters of its first scan to "
                "a second one",
                hint="load a DataFrame for each scan, or omit pushFilters",
            )


def forget_old_scans() -> None:
    """Remove the notes of DataFrames older than a day."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{os.getuid()}-*"):
        with suppress(OSError):  # of another user, who planted it
            if time.time() - path.lstat().st_mtime > _KEPT_S:
                path.unlink()


_PUSHDOWN_MODULE = "pyspark.sql.worker.data_source_pushdown_filters"
_STORE_NUMBERS = tuple(name for name in NUMBER_COLUMNS if name != "generation")


class RocketmqTieredSource(DataSource):
    """``spark.read.format("rocketmq-tiered")``; options in source_options.py and docs/SPARK.md."""

    _versions: list[dict[Names, int]] | None = None
    """Catalog versions by archive, for each path."""
    _frame = ""
    """An id of the DataFrame, if ``load`` made one."""

    @classmethod
    def name(cls) -> str:
        """The name that ``format`` takes."""
        return SOURCE_NAME

    @short_trace()
    def schema(self) -> StructType:
        """The schema of the chosen columns. ``load`` calls this once, so that the catalog version of now is fixed for
        all actions on the DataFrame."""
        options = parse_options(dict(self.options))
        if options.source is Source.ARCHIVE and self._versions is None:
            self._versions = [pinned_versions(one) for one in options.each_path()]
        self._frame = uuid4().hex
        return schema_of(options.chosen_columns)

    @short_trace()
    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of one action."""
        options = parse_options(dict(self.options))
        options.refuse_stream_options()
        if options.push_filters and _takes_filters():
            return PushingReader(options, schema, self._versions, self._frame)
        return MessageReader(options, schema, self._versions)

    @short_trace()
    def streamReader(self, schema: StructType) -> MessageStreamReader:  # noqa: N802 - Spark's name
        """The reader of one query."""
        return MessageStreamReader(parse_options(dict(self.options)), schema)


def _takes_filters() -> bool:
    """Whether this is the process to which Spark passes filters.

    If a session has push-down off, Spark refuses a source that offers it in the planning process, and the source cannot
    read the setting. Filters are passed to a process of their own, started from _PUSHDOWN_MODULE only if push-down is
    on; no other process imports it.
    """
    return _PUSHDOWN_MODULE in sys.modules


class MessageReader(DataSourceReader):
    """Plans and reads. It is pickled into every task, so it has only options, names and numbers."""

    def __init__(
        self, options: SourceOptions, schema: StructType, versions: list[dict[Names, int]] | None
    ) -> None:
        self._options = options
        self._schema = schema
        self._versions = versions
        self._predicate = options.times

    @short_trace()
    def partitions(self) -> list[InputPartition]:
        """What the tasks of a scan read, about ``partitionBytes`` each, from one catalog version: each partition has
        its number, the options of its path, and the part of the archive or store."""
        parts: list[tuple[SourceOptions, object]] = []
        is_header_only = self._options.cost_of(columns_of(self._schema)) <= Cost.FOOTER
        for number, one in enumerate(self._options.each_path()):
            if one.source is Source.STORE:
                parts += [(one, part) for part in plan_ranges(one)]
                continue
            versions = pinned_versions(one) if self._versions is None else self._versions[number]
            slices = plan(one, versions, self._predicate, is_header_only=is_header_only)
            parts += [(one, part) for part in slices]
        return [InputPartition((number, *part)) for number, part in enumerate(parts)]

    @short_trace()
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition in a worker, as Arrow batches."""
        if partition.value is None:  # Spark's placeholder for "no partitions"
            return iter(())
        number, options, part = partition.value
        self._note(number)
        return read_in_worker(
            part,
            options,
            self._predicate,
            columns_of(self._schema),
            to_arrow_schema(self._schema, timezone="UTC"),
        )

    def _note(self, number: int) -> None:
        """Called in a worker before partition ``number`` is read."""


class PushingReader(MessageReader):
    """The reader to which Spark passes filters."""

    def __init__(
        self, options: SourceOptions, schema: StructType, versions: list[dict[Names, int]] | None, frame: str
    ) -> None:
        super().__init__(options, schema, versions)
        self._frame = frame

    @short_trace()
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Keep those of Spark's ``filters`` by which objects or rows need not be read, and return the ones that Spark
        must still apply."""
        forget_old_scans()
        if self._frame:
            note_scan(self._frame, "filters", " ".join(sorted(map(repr, filters))), uuid4().hex)
        options = self._options
        names = _STORE_NUMBERS if options.source is Source.STORE else NUMBER_COLUMNS
        if options.reads_records:  # rows are chosen or made from whole queues
            names = ("queueId", "generation")
        pushed, left = push_down(filters, names)
        pushed = replace(pushed, tags=None) if options.reads_records else pushed
        self._predicate = self._options.times.also(pushed)
        # Rows that report damage are null in every column: Spark must apply all filters to them.
        return filters if CORRUPT_RECORD in self._schema.fieldNames() else left

    def _note(self, number: int) -> None:
        """Note that this task reads partition ``number`` of the DataFrame. Raises UsageError if another scan has read
        it, or this one in the same attempt."""
        task = TaskContext.get()
        if self._frame and task is not None:
            note_scan(
                self._frame,
                f"partition-{number}",
                f"task-{task.stageId()}-{task.partitionId()}",
                task.taskAttemptId(),
            )


_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "boolean": BooleanType(),
    "binary": BinaryType(),
    "map<string,string>": MapType(StringType(), StringType(), valueContainsNull=False),
}
_TYPES[TIMESTAMP] = TimestampType()
_TYPES[INNER] = ArrayType(
    StructType([StructField(item.name, _TYPES[SPARK_TYPES[item.kind]]) for item in INNER_FIELD_TABLE])
)


def schema_of(columns: list[Column]) -> StructType:
    """The schema of ``columns``. With _corrupt_record all are nullable, as rows that report damage are mostly null."""
    reports = any(column.name == CORRUPT_RECORD for column in columns)
    return StructType(
        [
            StructField(column.name, _TYPES[column.spark_type], nullable=column.is_nullable or reports)
            for column in columns
        ]
    )


def columns_of(schema: StructType) -> list[Column]:
    """The columns of a schema. Raises UsageError for an unknown name or a wrong type."""
    columns = chosen(schema.fieldNames()) if schema.fieldNames() else []
    for field, column, own in zip(schema.fields, columns, schema_of(columns), strict=True):
        wanted = _TYPES[column.spark_type].simpleString()
        if field.dataType.simpleString() != wanted:
            raise UsageError(
                f"the schema has column {column.name} as {field.dataType.simpleString()}, but it is {wanted}",
                hint=f"read it as {wanted}, and cast it afterwards",
            )
        if own.nullable and not field.nullable:
            raise UsageError(
                f"the schema has column {column.name} as NOT NULL, but it can be null",
                hint="remove NOT NULL from the schema",
            )
    return columns
