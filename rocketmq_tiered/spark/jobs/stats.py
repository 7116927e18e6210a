"""Statistics of an archive: by topic, queue and tag, over time, by size, and frequent keys.

Counts, bytes, sizes and rates come from footers; tags and keys require the records. Stored bytes come from the catalog:
a topic's share of an object is its share of the object's raw bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rocketmq_tiered.message_table.options.source_options import Source, SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import (
    Names,
    opened,
    pinned_versions,
    states_at,
    wanted_queues,
)
from rocketmq_tiered.spark.source.reading import frame_of
from tiered.catalog.living_runs import living_runs
from tiered.catalog.pages import RunIndex

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

BUCKETS = 96
_S, _MIN, _HOUR, _DAY = 1_000, 60_000, 3_600_000, 86_400_000
_WIDTHS_MS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    _S,
    2 * _S,
    5 * _S,
    10 * _S,
    15 * _S,
    30 * _S,
    _MIN,
    2 * _MIN,
    5 * _MIN,
    10 * _MIN,
    15 * _MIN,
    30 * _MIN,
    _HOUR,
    2 * _HOUR,
    4 * _HOUR,
    6 * _HOUR,
    12 * _HOUR,
    _DAY,
    2 * _DAY,
    7 * _DAY,
)
PERCENTILES = (0.5, 0.9, 0.99)
_QUEUE_COLUMNS = ("cluster", "brokerName", "topic", "queueId", "storeSize", "innerNum")
NAMES_SHOWN = 50


@dataclass(frozen=True)
class TopicStats:
    """One topic. ``stored_bytes``: compressed size in objects, 0 if unknown. Percentiles of the record size are
    approximate."""

    topic: str
    queues: int
    messages: int
    message_bytes: int
    stored_bytes: int
    p50_bytes: int
    p90_bytes: int
    p99_bytes: int
    max_bytes: int
    first_ms: int
    last_ms: int

    @property
    def ratio(self) -> float:
        """The compression ratio; 0 if unknown."""
        return self.message_bytes / self.stored_bytes if self.stored_bytes else 0.0


@dataclass(frozen=True)
class QueueStats:
    """One queue of one broker."""

    cluster: str
    broker: str
    topic: str
    queue_id: int
    messages: int
    message_bytes: int


@dataclass(frozen=True)
class NamedCount:
    """A tag or a key of a topic. An empty name counts messages without one."""

    topic: str
    name: str
    messages: int
    message_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Messages of a topic stored in [begin_ms, begin_ms + width)."""

    topic: str
    begin_ms: int
    messages: int
    message_bytes: int


@dataclass(frozen=True)
class Stats:
    """All statistics. ``sizes``: (power of two, messages with a record of at least that and less than twice that)."""

    title: str
    topics: Sequence[TopicStats]
    queues: Sequence[QueueStats]
    buckets: Sequence[Bucket]
    bucket_ms: int
    sizes: Sequence[tuple[int, int]]
    tags: Sequence[NamedCount] = ()
    keys: Sequence[NamedCount] = ()
    has_records: bool = True


def stats(spark: SparkSession, source: SourceOptions, *, headers_only: bool = False) -> Stats:
    """Statistics of the messages that ``source`` selects. ``headers_only`` reads no records: no tags, no keys."""
    from pyspark.sql import functions

    versions = pinned_versions(source) if source.source is Source.ARCHIVE else {}
    names = ("topic", "queueId", "storeSize", "storeTimestamp", "innerNum")
    headers = frame_of(spark, replace(source, columns=names), versions)
    topics = (
        headers.groupBy("topic")
        .agg(
            *_sums(),
            functions.percentile_approx("storeSize", list(PERCENTILES)).alias("sizes"),
            functions.max("storeSize").alias("largest"),
            functions.min("storeTimestamp").alias("first"),
            functions.max("storeTimestamp").alias("last"),
        )
        .collect()
    )
    queues = _queues(frame_of(spark, replace(source, columns=_QUEUE_COLUMNS), versions))
    queue_count = Counter(one.topic for one in queues)
    is_whole = source.source is Source.ARCHIVE and source.since_ms is None and source.until_ms is None
    stored = _stored_bytes(source, versions) if is_whole else {}
    found = sorted(
        (
            TopicStats(
                topic=row["topic"],
                queues=queue_count[row["topic"]],
                messages=row["messages"],
                message_bytes=row["bytes"],
                stored_bytes=stored.get(row["topic"], 0),
                p50_bytes=row["sizes"][0],
                p90_bytes=row["sizes"][1],
                p99_bytes=row["sizes"][2],
                max_bytes=row["largest"],
                first_ms=row["first"],
                last_ms=row["last"],
            )
            for row in topics
        ),
        key=lambda one: (-one.message_bytes, one.topic),
    )
    first = min((one.first_ms for one in found), default=0)
    last = max((one.last_ms for one in found), default=0)
    width = bucket_width_ms(first, last)
    tags, keys = ([], []) if headers_only or not found else _names(spark, source, versions)
    return Stats(
        source.path,
        found,
        queues,
        _buckets(headers, width),
        width,
        _sizes(headers),
        tags,
        keys,
        has_records=not headers_only,
    )


def _sums() -> list[Column]:
    """Messages, as consumers count them, and bytes of records."""
    from pyspark.sql import functions

    return [functions.sum("innerNum").alias("messages"), functions.sum("storeSize").alias("bytes")]


def bucket_width_ms(first_ms: int, last_ms: int) -> int:
    """The smallest round width with at most BUCKETS buckets."""
    span = max(last_ms - first_ms, 1)
    for width in _WIDTHS_MS:
        if span <= width * BUCKETS:
            return width
    return -(-span // BUCKETS)


def _queues(headers: DataFrame) -> list[QueueStats]:
    rows = headers.groupBy(*_QUEUE_COLUMNS[:-2]).agg(*_sums()).collect()
    return sorted(
        (QueueStats(*(row[name] for name in (*_QUEUE_COLUMNS[:-2], "messages", "bytes"))) for row in rows),
        key=lambda one: (one.topic, one.cluster, one.broker, one.queue_id),
    )


def _buckets(headers: DataFrame, width_ms: int) -> list[Bucket]:
    from pyspark.sql import functions

    begin = functions.expr(f"storeTimestamp - storeTimestamp % {width_ms}").alias("begin")
    rows = headers.groupBy("topic", begin).agg(*_sums()).collect()
    return sorted(
        (Bucket(row["topic"], row["begin"], row["messages"], row["bytes"]) for row in rows),
        key=lambda one: (one.begin_ms, one.topic),
    )


def _sizes(headers: DataFrame) -> list[tuple[int, int]]:
    from pyspark.sql import functions

    power = functions.expr("CAST(floor(log2(storeSize)) AS INT)").alias("power")
    rows = headers.groupBy(power).agg(*_sums()).collect()
    return sorted((1 << row["power"], row["messages"]) for row in rows)


def _names(
    spark: SparkSession, source: SourceOptions, versions: Mapping[Names, int]
) -> tuple[list[NamedCount], list[NamedCount]]:
    """Frequent tags and keys, in one pass over the records."""
    from pyspark.sql import functions

    records = frame_of(
        spark, replace(source, columns=("topic", "storeSize", "innerNum", "tags", "keys")), versions
    )
    named = records.select(
        "topic",
        "storeSize",
        "innerNum",
        functions.expr(
            "concat(array(named_struct('what', 'tag', 'name', coalesce(tags, ''))),"
            " transform(filter(split(coalesce(keys, ''), ' '), one -> one != ''),"
            " one -> named_struct('what', 'key', 'name', one)))"
        ).alias("names"),
    ).select("topic", "storeSize", "innerNum", functions.inline("names"))
    counted = named.groupBy("what", "topic", "name").agg(*_sums())
    order = (functions.desc("messages"), functions.col("topic"), functions.col("name"))
    counted = counted.persist()
    try:
        tags, keys = (
            [
                NamedCount(row["topic"], row["name"], row["messages"], row["bytes"])
                for row in counted.where(f"what = '{what}'").orderBy(*order).limit(NAMES_SHOWN).collect()
            ]
            for what in ("tag", "key")
        )
    finally:
        counted.unpersist()
    return tags, keys


def _stored_bytes(source: SourceOptions, versions: Mapping[Names, int]) -> dict[str, int]:
    """Bytes in objects by topic."""
    found: dict[str, float] = {}
    with opened(source) as store:
        for _, archive, state in states_at(store, versions):
            wanted = wanted_queues(state, source)
            for page in living_runs(RunIndex(archive), state):
                runs = page.chunk.runs
                objects = page.chunk.objects[runs["object"]]
                share = runs["byte_count"] / np.maximum(objects["raw_bytes"], 1) * objects["size_bytes"]
                sums = np.bincount(runs["queue"], weights=share, minlength=len(page.queues))
                for number in np.flatnonzero(sums).tolist():
                    queue = page.queues[number]
                    if queue in wanted:
                        found[queue.topic] = found.get(queue.topic, 0.0) + float(sums[number])
    return {topic: round(size) for topic, size in found.items()}
