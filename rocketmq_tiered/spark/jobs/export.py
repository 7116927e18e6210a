"""Exports an archive as Parquet files or a Delta table, partitioned by topic and day, with Spark's tasks.

The steps are those of every export (rocketmq_tiered/export/export_job.py). A Delta batch is one transaction with the
batch's number, which Delta accepts once. Readers that list Parquet files see a batch grow; Delta readers see it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import orjson

from rocketmq_tiered.export.export_job import (
    DELTA,
    PARQUET,
    ExportJob,
    ExportReport,
    PartsWriter,
    WriteBatch,
)
from rocketmq_tiered.export.export_plan import BatchPlan
from rocketmq_tiered.export.export_progress import ExportProgress, Intent, PartDone
from rocketmq_tiered.export.parquet_parts import DAY_MS, FIRST_DAY, LAST_DAY, write_part
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.spark.jobs.delta_table import DeltaTable, table_address
from rocketmq_tiered.spark.jobs.tasks import SparkTasks, TaskRunner
from rocketmq_tiered.spark.source.planned_frame import frame_of_parts
from tiered.errors import UsageError
from tiered.object_store.open_store import open_store
from tiered.object_store.store_options import StoreOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS = (PARQUET, DELTA)


def export(
    spark: SparkSession,
    source: SourceOptions,
    target: str,
    *,
    format: str = PARQUET,
    store: StoreOptions | None = None,
    tasks: TaskRunner | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Export the messages of ``source`` that are not in ``target`` (file:///directory or s3://bucket/prefix) yet.

    ``source`` selects topics, columns and generations; columns and generations cannot change after the first call.
    ``store`` opens the target (default: options of the source). ``report(parts done, total)``. Raises UsageError if the
    target was started with other choices or has rows that a replaced log took back, and what reading and writing raise.
    """
    if format not in FORMATS:
        raise UsageError(
            f"cannot export archive as {format}", hint=f"export an archive as {' or '.join(FORMATS)}"
        )
    table_address(target)
    store_options = store or source.store_options()
    with closing(open_store(target, store_options)) as target_store:
        write: WriteBatch
        if format == DELTA:
            write = _DeltaWriter(spark, target, store_options)
        else:
            runner = tasks or SparkTasks(spark)
            write = PartsWriter(
                target,
                store_options,
                lambda todo: runner.run(write_part, todo, "export"),
                runner.parallelism,
                report,
            )
        return ExportJob(source, target, format, ExportProgress(target_store), write).run()


class _DeltaWriter:
    """Writes a batch as transaction ``intent.number``, which writes nothing if it was committed before."""

    def __init__(self, spark: SparkSession, target: str, store: StoreOptions) -> None:
        self._spark, self._target, self._store = spark, target, store

    def __call__(self, intent: Intent, source: SourceOptions, plan: BatchPlan) -> list[PartDone]:
        """See WriteBatch."""
        table = DeltaTable(self._spark, self._target, self._store)
        rows = batch_frame(self._spark, source, intent.choices.columns, plan.parts)
        metadata = orjson.dumps({"batch": intent.number, "archives": intent.archives}).decode()
        appended = table.append(rows, intent.number, metadata)
        return [PartDone(appended.rows, appended.files, appended.size_bytes)]


def batch_frame(
    spark: SparkSession, source: SourceOptions, names: Sequence[str], parts: list[Slices]
) -> DataFrame:
    """The rows of ``parts`` with a column ``date``, one Spark partition each."""
    from pyspark.sql import functions

    every = tuple(dict.fromkeys((*names, "topic", "storeTimestamp")))
    columns = chosen(every)
    frame = frame_of_parts(spark, columns, [(source, part) for part in parts])
    stamp = f"greatest(least(storeTimestamp, {LAST_DAY * DAY_MS}L), {FIRST_DAY * DAY_MS}L)"
    day = f"CAST(({stamp} - pmod({stamp}, {DAY_MS}L)) DIV {DAY_MS}L AS INT)"  # DIV rounds towards 1970
    frame = frame.withColumn("date", functions.expr(f"date_from_unix_date({day})"))
    return frame if "storeTimestamp" in names else frame.drop("storeTimestamp")
