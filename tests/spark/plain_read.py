"""Reads a data source without a Spark session."""

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from rocketmq_tiered.message_table.batches.message_batches import read_partition
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import parse_options
from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from rocketmq_tiered.message_table.scan.store_scan import plan_ranges
from rocketmq_tiered.spark.source.data_source import schema_of


def read_without_spark(options: dict[str, str], columns: list[str]) -> Iterator[pa.RecordBatch]:
    """What the workers of a job would hand to Spark."""
    parsed = parse_options(options)
    wanted = chosen(columns)
    schema = to_arrow_schema(schema_of(wanted), timezone="UTC")
    parts = (
        plan_ranges(parsed)
        if options.get("source") == "store"
        else plan(parsed, pinned_versions(parsed), Predicate(), is_header_only=False)
    )
    for part in parts:
        for batch in read_partition(part, parsed, Predicate(), wanted, schema):
            assert batch.schema.equals(schema)
            batch.validate(full=True)
            yield batch
