"""Runs exports without Spark and reads their files back."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import SparkSession

from rocketmq_tiered.export.export_job import ExportReport
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.spark.jobs.export import export
from tests.spark.jobs.inline_tasks import InlineTasks

NO_SPARK = cast("SparkSession", None)


PARTITION_BYTES = 1 << 20


def source(archive: Path, **more: Any) -> SourceOptions:
    return replace(SourceOptions(f"file://{archive}", partition_bytes=PARTITION_BYTES), **more)


def run(options: SourceOptions, target: Path, tasks: InlineTasks | None = None) -> ExportReport:
    return export(NO_SPARK, options, f"file://{target}", tasks=tasks or InlineTasks())


def exported(target: Path) -> Counter[tuple[str, int, int, int]]:
    """(topic, queue id, generation, queue offset) of every row that a reader of the files sees."""
    directories = ds.partitioning(pa.schema([("topic", pa.string()), ("date", pa.date32())]), flavor="hive")
    table = ds.dataset(target, format="parquet", partitioning=directories).to_table(
        columns=["topic", "queueId", "generation", "queueOffset"]
    )
    return Counter(zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True))
