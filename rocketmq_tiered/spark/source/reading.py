"""``read``: an archive or a broker's store directory as a DataFrame."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rocketmq_tiered.message_table.options.source_options import SOURCE_NAME, parse_options
from rocketmq_tiered.spark.source.planned_frame import frame_of
from rocketmq_tiered.spark.source.session import register
from tiered.errors import UsageError
from tiered.timestamps import milliseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
    """An option's value as text: lists with commas, times in ms, offsets as JSON, booleans as ``true`` or ``false``."""
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
                f"none of the first {len(rows)} values of {column} is a JSON object", hint="give a schema"
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
