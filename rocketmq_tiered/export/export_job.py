"""Exports the messages archived since the last call, exactly once, in batches.

A batch has an intent recorded before its data and an end recorded after it (export_progress.py); what it writes follows
from the intent, so that after a kill the next call finishes the started batch first. Owns the order of these steps. How
a batch is written is passed in: Parquet files, an Iceberg table (iceberg_table.py), a Delta table (Spark).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from rocketmq_tiered.export.export_plan import BatchPlan, plan_batch, plan_document, plan_of, without_expired
from rocketmq_tiered.export.export_progress import (
    ArchiveVersion,
    Choices,
    Done,
    ExportProgress,
    Intent,
    PartDone,
)
from rocketmq_tiered.export.parquet_parts import PartTask
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.source_options import Source, SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import opened, pinned_versions, states_at
from tiered.console import counted, size_text
from tiered.errors import UsageError
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import parse_url
from tiered.timestamps import wall_ms

PARQUET, ICEBERG, DELTA = "parquet", "iceberg", "delta"
PARTS_PER_STAGE = 8
"""Parts of one stage for each core. A killed export repeats only unfinished parts."""

Report = Callable[[int, int], None]
"""(parts done, all parts)."""
WriteBatch = Callable[[Intent, SourceOptions, BatchPlan], list[PartDone]]
"""Writes a batch, which may have been written before."""


@dataclass(frozen=True)
class ExportReport:
    """The result of one call. ``rows_before``: those of ``rows`` that another export, or a killed one, had written.
    ``expired``: offsets that retention deleted before they were exported. ``unreadable``: damage that mode PERMISSIVE
    skipped in files."""

    target: str
    format: str
    batches: int = 0
    rows: int = 0
    files: int = 0
    size_bytes: int = 0
    expired: int = 0
    unreadable: tuple[str, ...] = ()
    rows_before: int = 0

    def lines(self) -> list[str]:
        """The report as text: how many rows and files were written, and what was exported before or has expired."""
        if self.batches == 0:
            return [f"{self.target}: no new messages"]
        expired = f"; {self.expired:,} offsets EXPIRED before they were exported" if self.expired else ""
        before = f", of which another export wrote {self.rows_before:,}" if self.rows_before else ""
        size = size_text(self.size_bytes)
        files = f"{counted(self.files, 'file')} ({self.format})"
        return [f"{self.target}: {counted(self.rows, 'row')} in {files}, {size}{before}{expired}"]


class ExportJob:
    """One call."""

    def __init__(
        self, source: SourceOptions, target: str, format: str, progress: ExportProgress, write: WriteBatch
    ) -> None:
        """An export of ``source`` to ``target``. ``progress`` records its batches in the target, ``write`` writes one.
        Raises UsageError for a source or a target that cannot be exported."""
        if source.source is not Source.ARCHIVE:
            raise UsageError(f"cannot export a {source.source.value} directory", hint="export an archive")
        if source.since_ms is not None or source.until_ms is not None:
            raise UsageError(
                "export does not take since and until: it continues after the last export",
                hint="write the DataFrame of rocketmq_tiered.spark.read",
            )
        refuse_inside(source.path, target)
        self._source, self._target, self._progress, self._write_batch = source, target, progress, write
        names = tuple(column.name for column in chosen(source.columns))
        self._choices = Choices(format, names, source.generation, source.all_generations)
        self._result = ExportReport(target, format)

    def run(self) -> ExportReport:
        """Finish a batch that an earlier export began and did not end, then export the messages archived since. Raises
        UsageError if the target was begun with other choices, or holds messages that are no longer in the archive
        because the broker's log was replaced; also raises what reading and writing raise."""
        number = self._progress.last_number()
        started = self._progress.intent(number) if number else None
        if started is not None and started.choices != self._choices:
            raise UsageError(
                f"{self._target} was started with {_text(started.choices)}, not {_text(self._choices)}",
                hint="use the same choices or another target",
            )
        last = self._progress.done(number)
        if last is None:
            before = self._progress.done(number - 1)
            assert started is not None and before is not None, "batches are numbered without holes"
            last = self._write(started, before)
        intent = self._intent(last.number + 1)
        if plan_batch(self._source_of(intent), intent, last.ends).parts:
            self._write(self._progress.begin(intent), last)
        return self._result

    def _intent(self, number: int) -> Intent:
        """What batch ``number`` is to export, recorded before it is written: everything up to the newest catalog
        version of each archive."""
        archives = []
        with opened(self._source) as store:
            for names, _, state in states_at(store, pinned_versions(self._source)):
                archives.append(ArchiveVersion(*names, state.version, state.cursor.history))
        return Intent(
            number,
            self._choices,
            self._source.topics,
            tuple(archives),
            self._source.partition_bytes,
            wall_ms(),
        )

    def _source_of(self, intent: Intent) -> SourceOptions:
        """The source of a batch: the topics and choices that its intent recorded, at the present address and with the
        present credentials."""
        return replace(
            self._source,
            topics=intent.topics,
            generation=intent.choices.generation,
            all_generations=intent.choices.all_generations,
            partition_bytes=intent.partition_bytes,
        )

    def _write(self, intent: Intent, before: Done) -> Done:
        """Plan, write and record the batch that ``intent`` announced, and add it to the report. ``before``: how the
        batch in front of it ended."""
        source = self._source_of(intent)
        plan = self._plan(intent, source, before)
        parts = self._write_batch(intent, source, plan)
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
            rows_before=so_far.rows_before + sum(part.rows_before for part in parts),
            unreadable=(*so_far.unreadable, *(line for part in parts for line in part.unreadable)),
        )
        return done

    def _plan(self, intent: Intent, source: SourceOptions, before: Done) -> BatchPlan:
        """The plan of a batch: the one that an earlier export recorded, without messages that have expired since
        (unless the user named a catalog version), or a new one, which is recorded."""
        kept = self._progress.plan(intent.number)
        plan = None if kept is None else plan_of(kept)
        if plan is not None:
            return plan if source.version is not None else without_expired(source, plan)
        plan = plan_batch(source, intent, before.ends)
        self._progress.keep_plan(intent.number, plan_document(plan))
        return plan


@dataclass(frozen=True)
class PartsWriter:
    """Writes a batch as Parquet files. ``run``: ``write_part`` on each task, ``parallelism`` at a time."""

    target: str
    store: StoreOptions
    run: Callable[[Sequence[PartTask]], list[PartDone]]
    parallelism: int
    report: Report
    is_table: bool = False

    def __call__(self, intent: Intent, source: SourceOptions, plan: BatchPlan) -> list[PartDone]:
        """Write the parts of a batch that are not written yet, some of them at a time, and report progress."""
        columns = intent.choices.columns
        todo = [
            PartTask(source, columns, part, intent.number, number, self.target, self.store, self.is_table)
            for number, part in enumerate(plan.parts)
        ]
        self.report(0, len(todo))
        done: list[PartDone] = []
        step = PARTS_PER_STAGE * self.parallelism
        for first in range(0, len(todo), step):
            done += self.run(todo[first : first + step])
            self.report(len(done), len(todo))
        return done


def refuse_inside(archive_url: str, target: str) -> None:
    """Raise UsageError if the target of an export lies inside the archive, whose objects it must not change."""
    archive, table = parse_url(archive_url), parse_url(target)
    inside = [
        (one.scheme, *PurePosixPath(one.place, one.prefix.strip("/")).parts) for one in (archive, table)
    ]
    if inside[1][: len(inside[0])] == inside[0]:
        raise UsageError(f"{target} is inside the archive {archive_url}", hint="use a target outside it")


def _text(choices: Choices) -> str:
    generation = "default generation" if choices.generation is None else f"generation {choices.generation}"
    generations = "all generations" if choices.all_generations else generation
    return f"{choices.format}, {generations}, columns {', '.join(choices.columns)}"
