"""One call that reads an archive, or a broker's store directory, into a DataFrame.

Owns how Python values become options. The options themselves are in source_options.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.session import register
from pipeline.source_options import SOURCE_NAME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OptionValue = str | int | float | bool | Sequence[str] | None


def read(
    spark: SparkSession, url: str, *, columns: Sequence[str] | None = None, **options: OptionValue
) -> DataFrame:
    """The messages at ``url``: an archive's address, or with ``source="store"`` a broker's store directory.

    ``columns``: only these, in this order; what they do not need is not read. ``options``: as in docs/SPARK.md, by
    their own names (``topic="Orders"``, ``mode="PERMISSIVE"``); None is left out. The catalog version is settled
    now, so every action on the DataFrame sees the same messages.
    """
    register(spark)
    reader = spark.read.format(SOURCE_NAME).option("path", url)
    for name, value in {"columns": columns, **options}.items():
        if value is not None:
            reader = reader.option(name, option_text(value))
    return reader.load()


def option_text(value: OptionValue) -> str:
    """How an option's value is written for Spark: lists with commas, truth as ``true`` and ``false``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    return ",".join(value or ())
