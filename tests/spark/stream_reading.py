"""Reads a stream batch by batch without a Spark session."""

import json
from typing import Any

from pyspark.sql.streaming.datasource import ReadLimit

from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.source_options import parse_options
from rocketmq_tiered.spark.source.data_source import MessageStreamReader, schema_of

COLUMNS = ["topic", "generation", "queueId", "queueOffset", "storeTimestamp", "storeSize"]


def stream_reader(url: str, **options: str) -> MessageStreamReader:
    return MessageStreamReader(parse_options({"path": url, **options}), schema_of(chosen(COLUMNS)))


def rows_of(reader: MessageStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    parts = reader.partitions(start, end)
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def drained(
    reader: MessageStreamReader, start: dict[str, Any], limit: ReadLimit
) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """(rows of each batch until nothing is left, the offset reached)."""
    batches = []
    while (end := reader.latestOffset(start, limit)) != start:
        end = json.loads(json.dumps(end))
        batches.append(rows_of(reader, start, end))
        start = end
    return batches, start
