"""Runs the checks of ``tiered verify`` with objects checked in parallel on Spark's executors.

The driver checks the commit chain, the queues and the index; each task checks some objects, byte by byte if ``full``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import archive_store, archives, opened
from rocketmq_tiered.spark.jobs.tasks import SparkTasks
from tiered.archive.verify import VerifyReport, verify_archive
from tiered.archive.verify_segment import SegmentCheck, SegmentResult, check_segment
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_BYTES = 128 << 20
"""Approximate bytes that a task reads."""
TASKS_PER_STAGE = 16
"""Tasks of one stage for each core. Progress is reported after each stage."""


@dataclass(frozen=True)
class VerifyTask:
    """Check some objects of one archive at one catalog version."""

    source: SourceOptions
    cluster: str
    broker: str
    version: int
    checks: list[SegmentCheck]
    full: bool


@dataclass(frozen=True)
class ArchiveReport:
    """The result for one archive."""

    cluster: str
    broker: str
    report: VerifyReport


def verify(
    spark: SparkSession,
    source: SourceOptions,
    *,
    full: bool = True,
    tasks: SparkTasks | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[ArchiveReport]:
    """Verify every archive that ``source`` selects. ``report(bytes done, total)`` is called for each archive in turn.

    Raises NotFoundError if there is none, and what the store raises.
    """
    if source.topics or source.version is not None:
        raise UsageError(
            "verify takes no topic and no version: it checks whole archives at the newest version",
            hint="remove the options topic and version",
        )
    runner = tasks or SparkTasks(spark)
    reports = []
    with opened(source) as store:
        for archive in archives(store, source):
            task = VerifyTask(source, archive.cluster, archive.broker, 0, [], full)
            checked = verify_archive(
                archive.store,
                depth="full" if full else "tails",
                progress=report,
                segments=partial(_check_in_tasks, runner, task),
            )
            reports.append(ArchiveReport(archive.cluster, archive.broker, checked))
    return reports


def _check_in_tasks(
    runner: SparkTasks, archive: VerifyTask, state: CatalogState, checks: Iterable[SegmentCheck]
) -> Iterator[tuple[str, SegmentResult]]:
    """Check the objects of ``checks`` in Spark tasks, some of them in each, and yield key and result of each object
    when its stage (TASKS_PER_STAGE tasks for each core) ends. ``archive``: a task without objects, for what tasks of
    this archive have in common."""
    tasks = [replace(archive, version=state.version, checks=group) for group in _groups(checks, archive.full)]
    step = TASKS_PER_STAGE * runner.parallelism
    for first in range(0, len(tasks), step):
        for results in runner.run(check_objects, tasks[first : first + step], "verify"):
            yield from results


def _groups(checks: Iterable[SegmentCheck], full: bool) -> Iterator[list[SegmentCheck]]:
    """Divide the objects to check into groups, one for each task, of about TASK_BYTES to read: with ``full`` the whole
    objects, else only the index at the end of each."""
    group: list[SegmentCheck] = []
    size_bytes = 0
    for check in checks:
        cost = int(check.place["size_bytes" if full else "tail_bytes"])
        if group and size_bytes + cost > TASK_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(check)
        size_bytes += cost
    if group:
        yield group


def check_objects(task: VerifyTask) -> list[tuple[str, SegmentResult]]:
    """Checks the objects of one task, in a worker. Returns the key and the result of each."""
    with opened(task.source) as store:
        archive = archive_store(store, task.cluster, task.broker)
        state = _state(task.source, task.cluster, task.broker, task.version)
        return [(check.key, check_segment(archive, state, check, full=task.full)) for check in task.checks]


@lru_cache(maxsize=2)
def _state(source: SourceOptions, cluster: str, broker: str, version: int) -> CatalogState:
    """The catalog state, loaded once for the tasks of a worker process."""
    with opened(source) as store:
        return load(archive_store(store, cluster, broker), version=version)
