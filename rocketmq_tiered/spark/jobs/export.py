"""Exports an archive as Parquet files or a Delta table, partitioned by topic and day.

Each call exports the messages archived since the last one, exactly once, in a batch with an intent recorded before its
data and an end recorded after it (export_progress.py). File names of a Parquet batch follow from the intent; a Delta
batch is one transaction with the batch's number, which Delta accepts once. After a kill, the next call finishes the
started batch first. Readers that list Parquet files see a batch grow; Delta readers see it whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import orjson

from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.source_options import Source, SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import opened, pinned_versions, states_at
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.spark.jobs.delta_table import DeltaTable, table_address
from rocketmq_tiered.spark.jobs.export_plan import BatchPlan, plan_batch
from rocketmq_tiered.spark.jobs.export_plan_record import plan_document, plan_of, without_expired
from rocketmq_tiered.spark.jobs.export_progress import (
    ArchiveVersion,
    Choices,
    Done,
    ExportProgress,
    Intent,
    PartDone,
)
from rocketmq_tiered.spark.jobs.parquet_parts import DAY_MS, FIRST_DAY, LAST_DAY, PartTask, write_part
from rocketmq_tiered.spark.jobs.tasks import SparkTasks, TaskRunner
from rocketmq_tiered.spark.source.planned_frame import frame_of_parts
from tiered.errors import UsageError
from tiered.object_store.open_store import open_store, parse_url
from tiered.object_store.store_options import StoreOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARQUET, DELTA = "parquet", "delta"
FORMATS = (PARQUET, DELTA)
PARTS_PER_STAGE = 8
"""Parts of one stage for each core. A killed export repeats only unfinished parts."""


@dataclass(frozen=True)
class ExportReport:
    """The result of one call. ``expired``: offsets that retention deleted before they were exported. ``unreadable``:
    damage that mode PERMISSIVE skipped in an export to Parquet."""

    target: str
    format: str
    batches: int = 0
    rows: int = 0
    files: int = 0
    size_bytes: int = 0
    expired: int = 0
    unreadable: tuple[str, ...] = ()


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
    if format not in FORMATS or source.source is not Source.ARCHIVE:
        raise UsageError(
            f"cannot export {source.source.value} as {format}",
            hint=f"export an archive as {' or '.join(FORMATS)}",
        )
    if source.since_ms is not None or source.until_ms is not None:
        raise UsageError(
            "export does not take since and until: it continues after the last export",
            hint="write the DataFrame of rocketmq_tiered.spark.read",
        )
    _refuse_target(source, target)
    store_options = store or source.store_options()
    with closing(open_store(target, store_options)) as target_store:
        job = _Export(spark, source, target, format, store_options, ExportProgress(target_store))
        return job.run(tasks, report)


class _Export:
    """One call."""

    def __init__(
        self,
        spark: SparkSession,
        source: SourceOptions,
        target: str,
        format: str,
        store: StoreOptions,
        progress: ExportProgress,
    ) -> None:
        self._spark = spark
        self._source = source
        self._target = target
        self._store = store
        self._progress = progress
        names = tuple(column.name for column in chosen(source.columns))
        self._choices = Choices(format, names, source.generation, source.all_generations)
        self._result = ExportReport(target, format)

    def run(self, tasks: TaskRunner | None, report: Callable[[int, int], None]) -> ExportReport:
        """Finish a started batch, then export new messages."""
        number = self._progress.last_number()
        last = self._progress.done(number)
        if last is None:
            started = self._progress.intent(number)
            before = self._progress.done(number - 1)
            assert started is not None and before is not None, "batches are numbered without holes"
            last = self._write(started, before, tasks, report)
        else:
            started = self._progress.intent(number) if number else None
        if started is not None and started.choices != self._choices:
            raise UsageError(
                f"{self._target} was started with {_text(started.choices)}, not {_text(self._choices)}",
                hint="use the same choices or another target",
            )
        intent = self._intent(last.number + 1)
        if plan_batch(self._source_of(intent), intent, last.ends).parts:
            self._write(self._progress.begin(intent), last, tasks, report)
        return self._result

    def _intent(self, number: int) -> Intent:
        archives = []
        with opened(self._source) as store:
            for names, _, state in states_at(store, pinned_versions(self._source)):
                archives.append(ArchiveVersion(*names, state.version, state.cursor.history))
        return Intent(
            number, self._choices, self._source.topics, tuple(archives), self._source.partition_bytes,
            time.time_ns() // 1_000_000,
        )  # fmt: skip

    def _source_of(self, intent: Intent) -> SourceOptions:
        """The current address and credentials with the choices of the batch."""
        return replace(
            self._source,
            topics=intent.topics,
            generation=intent.choices.generation,
            all_generations=intent.choices.all_generations,
            partition_bytes=intent.partition_bytes,
        )

    def _write(
        self, intent: Intent, before: Done, tasks: TaskRunner | None, report: Callable[[int, int], None]
    ) -> Done:
        source = self._source_of(intent)
        plan = self._plan(intent, source, before)
        report(0, len(plan.parts))
        if intent.choices.format == DELTA:
            parts = [self._write_delta(intent, source, plan)]
        else:
            parts = self._write_parquet(intent, source, plan, tasks or SparkTasks(self._spark), report)
        report(len(plan.parts), len(plan.parts))
        done = Done(
            intent.number,
            sum(part.rows for part in parts),
            sum(part.files for part in parts),
            sum(part.size_bytes for part in parts),
            plan.ends,
        )
        self._progress.finish(done)
        so_far = self._result
        self._result = replace(
            so_far,
            batches=so_far.batches + 1,
            rows=so_far.rows + done.rows,
            files=so_far.files + done.files,
            size_bytes=so_far.size_bytes + done.size_bytes,
            expired=so_far.expired + plan.expired,
            unreadable=(*so_far.unreadable, *(line for part in parts for line in part.unreadable)),
        )
        return done

    def _plan(self, intent: Intent, source: SourceOptions, before: Done) -> BatchPlan:
        """The first plan of the batch; without messages that expired since, unless a version was requested."""
        kept = self._progress.plan(intent.number)
        plan = None if kept is None else plan_of(kept)
        if plan is not None:
            return plan if source.version is not None else without_expired(source, plan)
        plan = plan_batch(source, intent, before.ends)
        self._progress.keep_plan(intent.number, plan_document(plan))
        return plan

    def _write_parquet(
        self,
        intent: Intent,
        source: SourceOptions,
        plan: BatchPlan,
        tasks: TaskRunner,
        report: Callable[[int, int], None],
    ) -> list[PartDone]:
        todo = [
            PartTask(source, intent.choices.columns, part, intent.number, number, self._target, self._store)
            for number, part in enumerate(plan.parts)
        ]
        done: list[PartDone] = []
        step = PARTS_PER_STAGE * tasks.parallelism
        for first in range(0, len(todo), step):
            done += tasks.run(write_part, todo[first : first + step], "export")
            report(len(done), len(todo))
        return done

    def _write_delta(self, intent: Intent, source: SourceOptions, plan: BatchPlan) -> PartDone:
        """Write the batch as transaction ``intent.number``, which writes nothing if it was committed before."""
        table = DeltaTable(self._spark, self._target, self._store)
        rows = batch_frame(self._spark, source, intent.choices.columns, plan.parts)
        metadata = orjson.dumps({"batch": intent.number, "archives": intent.archives}).decode()
        appended = table.append(rows, intent.number, metadata)
        return PartDone(appended.rows, appended.files, appended.size_bytes)


def _refuse_target(source: SourceOptions, target: str) -> None:
    """Raises UsageError for a target of an unsupported scheme or inside the archive."""
    archive, table = parse_url(source.path), table_address(target)
    inside = [
        (one.scheme, *PurePosixPath(one.place, one.prefix.strip("/")).parts) for one in (archive, table)
    ]
    if inside[1][: len(inside[0])] == inside[0]:
        raise UsageError(f"{target} is inside the archive {source.path}", hint="use a target outside it")


def batch_frame(
    spark: SparkSession, source: SourceOptions, names: Sequence[str], parts: list[Slices]
) -> DataFrame:
    """The rows of ``parts`` with a column ``date``, one Spark partition each."""
    from pyspark.sql import functions

    every = tuple(dict.fromkeys((*names, "topic", "storeTimestamp")))
    columns = chosen(every)
    frame = frame_of_parts(spark, source, columns, parts)
    stamp = f"greatest(least(storeTimestamp, {LAST_DAY * DAY_MS}L), {FIRST_DAY * DAY_MS}L)"
    day = f"CAST(({stamp} - pmod({stamp}, {DAY_MS}L)) DIV {DAY_MS}L AS INT)"  # DIV rounds towards 1970
    frame = frame.withColumn("date", functions.expr(f"date_from_unix_date({day})"))
    return frame if "storeTimestamp" in names else frame.drop("storeTimestamp")


def _text(choices: Choices) -> str:
    generation = "default generation" if choices.generation is None else f"generation {choices.generation}"
    generations = "all generations" if choices.all_generations else generation
    return f"{choices.format}, {generations}, columns {', '.join(choices.columns)}"
