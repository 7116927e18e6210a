"""``read``: an archive or a broker's store directory as a DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rocketmq_tiered.message_table.options.source_options import SOURCE_NAME, parse_options
from rocketmq_tiered.spark.source.planned_frame import frame_of
from rocketmq_tiered.spark.source.session import register
from tiered.timestamps import milliseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OptionValue = str | int | float | bool | datetime | Sequence[str] | None


def read(
    spark: SparkSession, url: str, *, columns: Sequence[str] | None = None, **options: OptionValue
) -> DataFrame:
    """The messages at ``url``: an archive, or with ``source="store"`` a broker's store directory.

    ``columns``: only these, in this order. ``options``: those of docs/SPARK.md by name (``topic="Orders"``,
    ``since=datetime(2026, 11, 1)``); None is ignored. The catalog version is fixed by the call, so all actions on the
    DataFrame read the same messages. Raises UsageError, NotFoundError and what the object store raises; with
    ``pushFilters`` Spark raises its own errors instead.
    """
    texts = {
        name: option_text(value)
        for name, value in {"path": url, "columns": columns, **options}.items()
        if value is not None
    }
    chosen = parse_options(texts)
    chosen.refuse_stream_options()
    if not chosen.push_filters:
        return frame_of(spark, chosen)
    register(spark)
    return spark.read.format(SOURCE_NAME).options(**texts).load()


def option_text(value: OptionValue) -> str:
    """An option's value as text: lists with commas, times in ms, booleans as ``true`` and ``false``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return str(milliseconds(value))
    if isinstance(value, str | int | float):
        return str(value)
    return ",".join(value or ())
