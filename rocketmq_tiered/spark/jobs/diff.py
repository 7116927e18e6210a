"""Compares an archive, all generations, with a broker's store directory: position, size and checksum of each record.

Messages older than the store's log, and those that key compaction dropped, are counted, not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import TYPE_CHECKING, Any

from rocketmq_tiered.message_table.options.source_options import Mode, Source, SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import Names, archives, opened, pinned_versions, plan
from rocketmq_tiered.message_table.scan.store_scan import open_store_of
from rocketmq_tiered.spark.source.reading import frame_of
from tiered.errors import UsageError
from tiered.model.tables import RunKind

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_PLACE = ("topic", "queueId", "queueOffset")
_KEY = (*_PLACE, "commitLogOffset")
_SAME, _OLDER, _COMPACTED = "same", "older", "compacted"
_COLUMNS = (*_KEY, "storeSize", "recCrc32", "innerNum", "_corrupt_record")


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
    """``counts`` of messages by kind, and the first differences as ``examples``. ``older``: messages the store has
    deleted; ``compacted``: those that key compaction dropped from the archive."""

    compared: int
    same: int
    older: int
    compacted: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[Difference, ...] = ()


def archive_of_store(archive: SourceOptions, store: SourceOptions) -> SourceOptions:
    """``archive`` limited to one: the named or only one, or that of the store's broker.

    Raises UsageError if that is not clear, and what opening both raises.
    """
    with opened(archive) as root:
        found = archives(root, archive)
        if len(found) > 1:
            with open_store_of(store) as opened_store:
                names = opened_store.names()
            fitting = [one for one in found if (one.cluster, one.broker) == (names.cluster, names.broker)]
            if not fitting:
                several = ", ".join(f"{one.cluster}/{one.broker}" for one in found)
                raise UsageError(
                    f"{archive.path} holds {len(found)} archives, and {store.path} does not name its broker",
                    hint=f"choose one with --cluster and --broker: {several}",
                )
            found = fitting
    return replace(archive, cluster=found[0].cluster, broker=found[0].broker)


def diff(
    spark: SparkSession, archive: SourceOptions, store: SourceOptions, *, limit: int = 100
) -> DiffReport:
    """Compare ``archive`` with ``store`` in the topics of ``archive``, with up to ``limit`` examples.

    Raises UsageError as ``archive_of_store``, and what opening them raises.
    """
    from pyspark.sql import functions

    archive = archive_of_store(archive, store)

    choices: dict[str, Any] = {"columns": _COLUMNS, "mode": Mode.PERMISSIVE, "topics": archive.topics}
    # Generations that ended when the log was replaced are not in the store.
    generations: dict[str, Any] = {"all_generations": True, "generation": None, "with_superseded": False}
    archive = replace(archive, source=Source.ARCHIVE, **generations, **choices)
    versions = pinned_versions(archive)
    archived = frame_of(spark, archive, versions)
    stored = frame_of(spark, replace(store, source=Source.STORE, with_deleted=True, **choices))
    with open_store_of(store) as opened:
        log_begin = opened.commit_log.min_phys
    judged = (
        _sides(archived, stored)
        .groupBy(*_KEY, "_corrupt_record")
        .agg(*_aggregates())
        .withColumn("kind", _kind(log_begin))
    )
    if sparse := _sparse_ranges(archive, versions):
        judged = _without_compacted(judged, spark.createDataFrame(sparse, _RANGES))
    found = judged.groupBy("kind").agg(functions.sum("messages").alias("messages")).collect()
    counts = {row["kind"]: int(row["messages"]) for row in found}
    same, older, compacted = (counts.pop(kind, 0) for kind in (_SAME, _OLDER, _COMPACTED))
    if not counts:
        return DiffReport(same, same, older, compacted)
    wrong = judged.where(~judged["kind"].isin(_SAME, _OLDER, _COMPACTED))
    return _explained(wrong, DiffReport(same, same, older, compacted), limit)


_RANGES = "sparseTopic string, sparseQueue int, begin bigint, end bigint"


def _sparse_ranges(archive: SourceOptions, versions: Mapping[Names, int]) -> list[tuple[str, int, int, int]]:
    """Offsets of the archive's sparse runs: (topic, queue id, begin, end), neighbours joined."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for part in plan(archive, versions, archive.times, is_header_only=True):
        for row in part.table[part.table["kind"] == RunKind.SPARSE]:
            queue = part.queues[int(row["queue"])]
            found.setdefault(queue[:2], []).append((int(row["begin"]), int(row["end"])))
    joined = []
    for (topic, queue_id), ranges in found.items():
        ranges.sort()
        begin, end = ranges[0]
        for low, high in [*ranges[1:], (1 << 62, 1 << 62)]:
            if low > end:
                joined.append((topic, queue_id, begin, end))
                begin = low
            end = max(end, high)
    return joined


def _without_compacted(judged: DataFrame, ranges: DataFrame) -> DataFrame:
    """``judged`` with missing messages in holes of sparse runs as compacted."""
    from pyspark.sql.functions import broadcast, expr

    inside = expr(
        "kind = 'missing' AND topic = sparseTopic AND queueId = sparseQueue"
        " AND queueOffset >= begin AND queueOffset < end"
    )
    found = judged.join(broadcast(ranges), inside, "left")
    kind = expr(f"CASE WHEN sparseTopic IS NULL THEN kind ELSE '{_COMPACTED}' END")
    return found.withColumn("kind", kind).drop(*ranges.columns)


def _sides(archived: DataFrame, stored: DataFrame) -> DataFrame:
    from pyspark.sql.functions import lit

    return archived.select("*", lit(1).alias("archived"), lit(0).alias("stored")).unionByName(
        stored.select("*", lit(0).alias("archived"), lit(1).alias("stored"))
    )


def _aggregates() -> list[Column]:
    """Copies of a message in the archive and in the store, and whether they agree (lowest value = highest)."""
    from pyspark.sql.functions import coalesce, lit
    from pyspark.sql.functions import max as most
    from pyspark.sql.functions import min as least
    from pyspark.sql.functions import sum as total

    return [
        total("archived").alias("archived"),
        total("stored").alias("stored"),
        most(coalesce("innerNum", lit(1))).alias("messages"),
        least("recCrc32").alias("crcLow"),
        most("recCrc32").alias("crcHigh"),
        least("storeSize").alias("sizeLow"),
        most("storeSize").alias("sizeHigh"),
    ]


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


def _explained(found: DataFrame, so_far: DiffReport, limit: int) -> DiffReport:
    """``so_far`` with differences. Missing and extra messages at one queue offset count as different ones."""
    from pyspark.sql import functions

    merged = found.groupBy(*_PLACE, "_corrupt_record").agg(
        functions.sum("messages").alias("sum"),
        functions.max("messages").alias("most"),
        functions.collect_set("kind").alias("kinds"),
        functions.min(functions.struct("kind", "commitLogOffset", "sizeLow", "crcLow")).alias("one"),
        functions.max(functions.struct("kind", "commitLogOffset", "sizeLow", "crcLow")).alias("other"),
    )
    both = functions.expr("array_contains(kinds, 'missing') AND array_contains(kinds, 'extra')")
    merged = merged.withColumn(
        "kind",
        functions.when(both, DifferenceKind.DIFFERENT.value).otherwise(functions.element_at("kinds", 1)),
    ).withColumn("messages", functions.when(both, functions.col("most")).otherwise(functions.col("sum")))
    merged = merged.persist()
    try:
        counted = merged.groupBy("kind").agg(functions.sum("messages").alias("messages")).collect()
        counts = {row["kind"]: int(row["messages"]) for row in counted}
        first = merged.orderBy("kind", *_PLACE).limit(limit).collect()
    finally:
        merged.unpersist()
    return replace(
        so_far,
        compared=so_far.same + sum(counts.values()),
        counts=dict(sorted(counts.items())),
        examples=tuple(map(_difference, first)),
    )


def _difference(row: Any) -> Difference:
    kind = DifferenceKind(row["kind"])
    one, other = row["one"], row["other"]
    if kind is DifferenceKind.UNREADABLE:
        offset = row["queueOffset"] or 0
        return Difference(kind, row["topic"] or "", row["queueId"] or 0, offset, row["_corrupt_record"])
    detail = f"{one['sizeLow']} bytes at physical offset {one['commitLogOffset']}"
    if kind is DifferenceKind.DIFFERENT and one["commitLogOffset"] != other["commitLogOffset"]:
        detail = f"physical offset {one['commitLogOffset']} in the archive, {other['commitLogOffset']} in the store"
    return Difference(kind, row["topic"], row["queueId"], row["queueOffset"], detail)
