"""``read``: an archive or a broker's store directory as a DataFrame."""

from __future__ import annotations

import json
import pickle  # nosec B403
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from rocketmq_tiered.message_table.options.columns import Column, Cost
from rocketmq_tiered.message_table.options.source_options import (
    SOURCE_NAME,
    Source,
    SourceOptions,
    parse_options,
)
from rocketmq_tiered.message_table.plan.archive_plan import Names, pinned_versions, plan
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.store_scan import LogRange, plan_ranges
from rocketmq_tiered.spark.source.data_source import columns_of, schema_of
from rocketmq_tiered.spark.source.session import register
from rocketmq_tiered.spark.source.worker import read_in_worker
from tiered.errors import UsageError
from tiered.timestamps import milliseconds

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

Part = Slices | LogRange


def frame_of(
    spark: SparkSession, options: SourceOptions, versions: Mapping[Names, int] | None = None
) -> DataFrame:
    """A DataFrame of the messages that ``options`` select. ``versions``: the catalog version of each archive at which
    it is read (default: the newest now)."""
    columns = options.chosen_columns
    parts: list[tuple[SourceOptions, Part]] = []
    for one in options.each_path():
        if one.source is Source.STORE:
            parts += [(one, part) for part in plan_ranges(one)]
        else:
            is_header_only = options.cost_of(columns) <= Cost.FOOTER
            pinned = pinned_versions(one) if versions is None else versions
            parts += [(one, part) for part in plan(one, pinned, one.times, is_header_only=is_header_only)]
    return frame_of_parts(spark, columns, parts)


def frame_of_parts(
    spark: SparkSession, columns: list[Column], parts: Sequence[tuple[SourceOptions, Part]]
) -> DataFrame:
    """The rows of ``parts``, each with the options of its path."""
    schema = schema_of(columns)
    if not parts:
        return spark.createDataFrame([], schema)
    numbers = spark.range(0, len(parts), 1, len(parts))  # one per partition
    return numbers.mapInArrow(ReadParts(parts, schema), schema)


class ReadParts:
    """Reads parts by number. It is pickled with the plan and sent to the workers.

    Spark sends it to each executor once if it is larger than a megabyte. A worker unpickles it for every task: each
    part is compressed bytes, and a task unpacks its own. Credentials are not shown: Spark prints the class name.
    """

    def __init__(self, parts: Sequence[tuple[SourceOptions, Part]], schema: StructType) -> None:
        self._schema = schema
        self._parts = [zlib.compress(pickle.dumps(part), 1) for part in parts]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read, in a worker, the parts whose numbers are in the only column of ``batches``."""
        columns = columns_of(self._schema)
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        for batch in batches:
            for number in batch.column(0).to_pylist():
                # Parts come from the driver, with the code that runs here.
                options, part = pickle.loads(zlib.decompress(self._parts[number]))  # nosec B301
                yield from read_in_worker(part, options, options.times, columns, arrow)


OptionValue = str | int | float | bool | datetime | Sequence[str] | Mapping[str, Mapping[int, int]] | None


def read(
    spark: SparkSession,
    url: str | Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    **options: OptionValue,
) -> DataFrame:
    """The messages at ``url``: archives, or with ``source="store"`` a broker's store directory. It may be a list.

    ``columns``: only these, in this order. ``options``: those of docs/SPARK.md by name (``topic="Orders"``,
    ``since=datetime(2026, 11, 1)``); None is ignored. The catalog version is fixed by the call, so all actions on the
    DataFrame read the same messages. Raises UsageError, NotFoundError and what the object store raises; with
    ``pushFilters`` Spark raises its own errors instead.
    """
    given = {"path": url} if isinstance(url, str) else {"paths": json.dumps(list(url))}
    texts = {
        name: option_text(value)
        for name, value in {**given, "columns": columns, **options}.items()
        if value is not None
    }
    chosen = parse_options(texts)
    chosen.refuse_stream_options()
    if not chosen.push_filters:
        return frame_of(spark, chosen)
    register(spark)
    return spark.read.format(SOURCE_NAME).options(**texts).load()


def option_text(value: OptionValue) -> str:
    """The value of an option as the text that the data source parses: lists with commas, times in ms since 1970,
    offsets as JSON, booleans as ``true`` or ``false``."""
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return str(milliseconds(value))
    if isinstance(value, str | int | float):
        return str(value)
    return ",".join(value or ())


def with_json(
    frame: DataFrame, *, schema: str | None = None, column: str = "text", sample_rows: int = 1000
) -> DataFrame:
    """``frame`` with a column ``json``, the struct that ``column`` holds as JSON; null for other text.

    ``schema``: DDL such as ``"id bigint, city string"``; without it inferred from the first ``sample_rows`` rows.
    Raises UsageError if none of them is a JSON object.
    """
    from pyspark.sql.functions import from_json, lit, schema_of_json

    if schema is None:
        rows = frame.select(column).limit(sample_rows).collect()
        objects = [row[0] for row in rows if _is_json_object(row[0])]
        if not objects:
            raise UsageError(
                f"none of the first {len(rows)} values of column {column} is a JSON object, so that no schema can be "
                "inferred",
                hint='give a schema, such as schema="id bigint, city string"',
            )
        sample = schema_of_json(lit(f"[{','.join(objects)}]")).alias("sample")
        (row,) = frame.sparkSession.range(1).select(sample).collect()
        schema = row["sample"].removeprefix("ARRAY<").removesuffix(">")
    return frame.withColumn("json", from_json(column, schema))


def _is_json_object(text: str | None) -> bool:
    try:
        return isinstance(json.loads(text or ""), dict)
    except ValueError:
        return False
