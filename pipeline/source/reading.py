"""One call that reads an archive, or a broker's store directory, into a DataFrame.

Owns how Python values become options, and by which way Spark gets the rows: planned here, or by the data source where
Spark shall hand its filters over. The options themselves are in source_options.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from pipeline.options.source_options import SOURCE_NAME, parse_options
from pipeline.source.planned_frame import frame_of
from pipeline.source.session import register
from tiered.instant import milliseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OptionValue = str | int | float | bool | datetime | Sequence[str] | None


def read(
    spark: SparkSession, url: str, *, columns: Sequence[str] | None = None, **options: OptionValue
) -> DataFrame:
    """The messages at ``url``: an archive's address, or with ``source="store"`` a broker's store directory.

    ``columns``: only these, in this order; what they do not need is not read. ``options``: as in docs/SPARK.md, by
    their own names (``topic="Orders"``, ``since=datetime(2026, 11, 1)``); None is left out. The catalog version is
    settled now, so every action on the DataFrame sees the same messages. Raises UsageError for options that are none,
    NotFoundError and what the object store raises; with ``pushFilters`` Spark raises its own errors instead.
    """
    texts = {
        name: option_text(value)
        for name, value in {"path": url, "columns": columns, **options}.items()
        if value is not None
    }
    chosen = parse_options(texts)
    chosen.refuse_of_a_stream()
    if not chosen.push_filters:
        return frame_of(spark, chosen)
    register(spark)
    return spark.read.format(SOURCE_NAME).options(**texts).load()


def option_text(value: OptionValue) -> str:
    """How an option's value is written for Spark: lists with commas, times in ms, truth as ``true`` and ``false``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return str(milliseconds(value))
    if isinstance(value, str | int | float):
        return str(value)
    return ",".join(value or ())
