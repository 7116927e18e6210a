"""Compares an archive, all generations, with a broker's store directory: position, size and checksum of each record.

Messages older than the store's log are counted, not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import TYPE_CHECKING, Any

from rocketmq_tiered.message_table.options.source_options import Mode, Source, SourceOptions
from rocketmq_tiered.message_table.scan.store_scan import open_store_of
from rocketmq_tiered.spark.source.planned_frame import frame_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_PLACE = ("topic", "queueId", "queueOffset")
_KEY = (*_PLACE, "commitLogOffset")
_SAME, _OLDER = "same", "older"
_COLUMNS = (*_KEY, "storeSize", "recCrc32", "_corrupt_record")


class DifferenceKind(StrEnum):
    """Kind of a difference."""

    MISSING = "missing"
    """In the store, but not in the archive."""
    EXTRA = "extra"
    """In the archive, but not in the store, whose log reaches back that far."""
    DIFFERENT = "different"
    """In both at one queue offset, with different bytes or physical offsets."""
    DUPLICATE = "duplicate"
    """More than once in the same position."""
    UNREADABLE = "unreadable"
    """Damaged in the store or in the archive."""


@dataclass(frozen=True)
class Difference:
    """One message that differs."""

    kind: DifferenceKind
    topic: str
    queue_id: int
    queue_offset: int
    detail: str

    def __str__(self) -> str:
        where = f"{self.topic}/{self.queue_id} at {self.queue_offset}: " if self.topic else ""
        return f"{self.kind}: {where}{self.detail}"


@dataclass(frozen=True)
class DiffReport:
    """``counts`` by kind, and the first differences as ``examples``. ``older``: messages the store has deleted."""

    compared: int
    same: int
    older: int
    counts: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[Difference, ...] = ()


def diff(
    spark: SparkSession, archive: SourceOptions, store: SourceOptions, *, limit: int = 100
) -> DiffReport:
    """Compare ``archive`` with ``store`` in the topics of ``archive``, with up to ``limit`` examples.

    Raises what opening them raises.
    """
    from pyspark.sql import functions

    choices: dict[str, Any] = {"columns": _COLUMNS, "mode": Mode.PERMISSIVE, "topics": archive.topics}
    # Generations that ended when the log was replaced are not in the store.
    generations: dict[str, Any] = {"all_generations": True, "generation": None, "with_superseded": False}
    archived = frame_of(spark, replace(archive, source=Source.ARCHIVE, **generations, **choices))
    stored = frame_of(spark, replace(store, source=Source.STORE, **choices))
    with open_store_of(store) as opened:
        log_begin = opened.commit_log.min_phys
    judged = (
        _sides(archived, stored)
        .groupBy(*_KEY, "_corrupt_record")
        .agg(*_aggregates())
        .withColumn("kind", _kind(log_begin))
    )
    found = judged.groupBy("kind").agg(functions.count("*").alias("messages")).collect()
    counts = {row["kind"]: int(row["messages"]) for row in found}
    same, older = counts.pop(_SAME, 0), counts.pop(_OLDER, 0)
    if not counts:
        return DiffReport(same, same, older)
    return _explained(judged.where(~judged["kind"].isin(_SAME, _OLDER)), same, older, limit)


def _sides(archived: DataFrame, stored: DataFrame) -> DataFrame:
    from pyspark.sql.functions import lit

    return archived.select("*", lit(1).alias("archived"), lit(0).alias("stored")).unionByName(
        stored.select("*", lit(0).alias("archived"), lit(1).alias("stored"))
    )


def _aggregates() -> list[Column]:
    """Copies of a message in the archive and in the store, and whether they agree (lowest value = highest)."""
    from pyspark.sql.functions import max as most
    from pyspark.sql.functions import min as least
    from pyspark.sql.functions import sum as total

    return [
        total("archived").alias("archived"), total("stored").alias("stored"),
        least("recCrc32").alias("crcLow"), most("recCrc32").alias("crcHigh"),
        least("storeSize").alias("sizeLow"), most("storeSize").alias("sizeHigh"),
    ]  # fmt: skip


def _kind(begin_phys: int) -> Column:
    from pyspark.sql.functions import col, when

    choices = [
        (col("_corrupt_record").isNotNull(), DifferenceKind.UNREADABLE.value),
        ((col("stored") == 0) & (col("commitLogOffset") < begin_phys), _OLDER),
        ((col("archived") > 1) | (col("stored") > 1), DifferenceKind.DUPLICATE.value),
        (col("archived") == 0, DifferenceKind.MISSING.value),
        (col("stored") == 0, DifferenceKind.EXTRA.value),
        (
            (col("crcLow") != col("crcHigh")) | (col("sizeLow") != col("sizeHigh")),
            DifferenceKind.DIFFERENT.value,
        ),
    ]
    first, *rest = choices
    chain = reduce(lambda so_far, one: so_far.when(*one), rest, when(*first))
    return chain.otherwise(_SAME)


def _explained(found: DataFrame, same: int, older: int, limit: int) -> DiffReport:
    """The report. A missing and an extra message at one queue offset count as one different message."""
    from pyspark.sql import functions

    merged = found.groupBy(*_PLACE, "_corrupt_record").agg(
        functions.count("*").alias("rows"),
        functions.collect_set("kind").alias("kinds"),
        functions.min(functions.struct("kind", "commitLogOffset", "sizeLow", "crcLow")).alias("one"),
        functions.max(functions.struct("kind", "commitLogOffset", "sizeLow", "crcLow")).alias("other"),
    )
    both = functions.expr("array_contains(kinds, 'missing') AND array_contains(kinds, 'extra')")
    merged = merged.withColumn(
        "kind",
        functions.when(both, DifferenceKind.DIFFERENT.value).otherwise(functions.element_at("kinds", 1)),
    ).withColumn("messages", functions.when(both, 1).otherwise(functions.col("rows")))
    merged = merged.persist()
    try:
        counted = merged.groupBy("kind").agg(functions.sum("messages").alias("messages")).collect()
        counts = {row["kind"]: int(row["messages"]) for row in counted}
        first = merged.orderBy("kind", *_PLACE).limit(limit).collect()
    finally:
        merged.unpersist()
    return DiffReport(
        same + sum(counts.values()), same, older, dict(sorted(counts.items())), tuple(map(_difference, first))
    )


def _difference(row: Any) -> Difference:
    kind = DifferenceKind(row["kind"])
    one, other = row["one"], row["other"]
    if kind is DifferenceKind.UNREADABLE:
        return Difference(kind, row["topic"] or "", row["queueId"] or 0, 0, row["_corrupt_record"])
    detail = f"{one['sizeLow']} bytes at physical offset {one['commitLogOffset']}"
    if kind is DifferenceKind.DIFFERENT and one["commitLogOffset"] != other["commitLogOffset"]:
        detail = f"physical offset {one['commitLogOffset']} in the archive, {other['commitLogOffset']} in the store"
    return Difference(kind, row["topic"], row["queueId"], row["queueOffset"], detail)
