"""A Spark stream stopped under c922a86 continues from its checkpoint: every row once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from rocketmq_tiered.spark.options.columns import chosen
from rocketmq_tiered.spark.options.source_options import parse_options
from rocketmq_tiered.spark.options.spark_types import schema_of
from rocketmq_tiered.spark.source.stream_offsets import from_json, to_json
from rocketmq_tiered.spark.source.stream_reader import MessageStreamReader
from tests.upgrade.left_behind import QUEUES, left, packed

pytestmark = pytest.mark.integration

__all__ = ["left", "packed"]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = ("topic", "generation", "queueId", "queueOffset")
EXPECTED = Counter(
    (topic, 0, queue_id, offset) for (topic, queue_id), offsets in QUEUES.items() for offset in offsets
)
READ_BEFORE = Counter({place: 1 for place in EXPECTED if place[0] != "one" or place[3] < 10})


def written(out: Path) -> Counter[tuple[object, ...]]:
    """Rows of every file. The sink's own list of files names paths of another machine."""
    found: Counter[tuple[object, ...]] = Counter()
    for path in out.glob("*.parquet"):
        table = pq.read_table(path)
        found.update(zip(*(table[name].to_pylist() for name in COLUMNS), strict=True))
    return found


def test_the_last_offset_of_the_checkpoint_leads_to_the_rows_after_it(left: Path) -> None:
    url = (left / "reading" / "archive").as_uri()
    reader = MessageStreamReader(parse_options({"path": url}), schema_of(chosen(COLUMNS)))
    last = left / "stream" / "checkpoint" / "offsets" / "3"
    start = json.loads(last.read_text().splitlines()[-1])
    parts = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert Counter(tuple(row[name] for name in COLUMNS) for row in rows) == EXPECTED - READ_BEFORE


def test_offsets_written_today_are_the_same(left: Path) -> None:
    """A batch that is run again ends at the offset in the checkpoint."""
    for path in sorted((left / "stream" / "checkpoint" / "offsets").glob("?")):
        document = json.loads(path.read_text().splitlines()[-1])
        assert to_json(from_json(document)) == document


def test_a_query_continues_from_its_checkpoint(spark: SparkSession, left: Path) -> None:
    out = left / "stream" / "out"
    assert written(out) == READ_BEFORE
    query = (
        spark.readStream.format("rocketmq-tiered")
        .option("columns", ",".join(COLUMNS))
        .option("maxRowsPerTrigger", 6)
        .load((left / "reading" / "archive").as_uri())
        .writeStream.format("parquet")
        .option("checkpointLocation", str(left / "stream" / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(out))
    )
    assert query.awaitTermination(120)
    assert written(out) == EXPECTED
