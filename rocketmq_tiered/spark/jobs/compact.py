"""Compacts one archive with the outputs of each round written in tasks. The driver plans, announces and commits once a
round, as `tiered compact` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rocketmq_tiered.maintenance.compaction_job import (
    CompactionReport,
    compact_archive,
    dry_run,
    rewrite_options,
)
from rocketmq_tiered.maintenance.prices import Prices
from rocketmq_tiered.spark.jobs.archive_target import ArchiveTarget
from rocketmq_tiered.spark.jobs.tasks import SparkTasks, TaskRunner
from tiered.archive.kept_offsets import KeptRows
from tiered.archive.rewrite.outputs import rewrite
from tiered.archive.rewrite.plan import Candidates, OutputPart, RewritePlan
from tiered.archive.rewrite.result import OutputIdentity, RewriteCost, RewriteOptions, RewriteResult
from tiered.catalog.archives import open_archive
from tiered.catalog.catalog_reader import load
from tiered.formats.segment import BlockCodec
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, Table, concatenated
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from tiered.object_store.store_options import StoreOptions
from tiered.settings.sections import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS_PER_STAGE = 4
"""Tasks of one stage for each core. Progress is reported after each stage."""


@dataclass(frozen=True)
class CompactTask:
    """Write some outputs of a plan: ``candidates`` and ``plan`` have only what these need."""

    target: ArchiveTarget
    candidates: Candidates
    plan: RewritePlan
    identity: OutputIdentity
    codec: BlockCodec
    spool: str
    spool_bytes: int


@dataclass(frozen=True)
class ArchiveCompaction:
    """The report of one archive."""

    cluster: str
    broker: str
    report: CompactionReport


def compact(
    spark: Callable[[], SparkSession] | SparkSession,
    url: str,
    settings: Settings,
    *,
    apply: bool = False,
    spool: str = "",
    prices: Prices | None = None,
    store: StoreOptions | None = None,
    report: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
    tasks: TaskRunner | None = None,
) -> ArchiveCompaction:
    """Compact the archive that ``settings.archive`` names below ``url``, or the only one there. Without ``apply`` only
    count, and leave ``spark`` alone, which may be a function that starts it. ``spool``: a directory of each worker.
    ``report(message bytes done, total)`` is called after each stage.

    Raises NotFoundError if there is none, UnavailableError if its pages change too fast, and what the store raises;
    committed rounds stay.
    """
    options = store or StoreOptions(settings.object_store)
    prices = prices or Prices()
    with closing(open_store(url, options)) as root:
        archive = open_archive(root, settings.archive.cluster or None, settings.archive.broker or None)
        state = load(archive.store)
        if not apply:
            found = dry_run(archive.store, state, settings, prices)
            return ArchiveCompaction(archive.cluster, archive.broker, found)
        runner = tasks or SparkTasks(spark() if callable(spark) else spark)
        writer = DistributedRewrite(ArchiveTarget(url, options), runner, settings.compaction.memory_bytes)
        place = rewrite_options(settings, Path(spool))
        found = compact_archive(
            archive.store, state, settings, place, prices, report=report, write=writer.write
        )
        return ArchiveCompaction(archive.cluster, archive.broker, found)


class DistributedRewrite:
    """Writes outputs in tasks instead of here."""

    def __init__(self, target: ArchiveTarget, runner: TaskRunner, task_bytes: int) -> None:
        self._target, self._runner, self._task_bytes = target, runner, task_bytes

    def write(
        self,
        store: ObjectStore,
        candidates: Candidates,
        plan: RewritePlan,
        identity: OutputIdentity,
        options: RewriteOptions,
    ) -> RewriteResult:
        """As rewrite."""
        groups = list(output_groups(plan, self._task_bytes))
        tasks = [
            CompactTask(
                self._target, *part_of(candidates, plan, group), identity, options.codec,
                str(options.spool_directory), options.spool_bytes_max,
            )
            for group in groups
        ]  # fmt: skip
        results: list[RewriteResult] = []
        step, done_bytes = TASKS_PER_STAGE * self._runner.parallelism, 0
        for first in range(0, len(tasks), step):
            some = tasks[first : first + step]
            results += self._runner.run(write_in_task, some, "compact")
            done_bytes += sum(_message_bytes(task.plan) for task in some)
            options.report(done_bytes)
        return joined_results(candidates, tasks, results)


def write_in_task(task: CompactTask) -> RewriteResult:
    """In a worker: write the outputs of ``task``. A repeated task finds the keys of its predecessor taken, and uses
    others."""
    spool = Path(task.spool or tempfile.gettempdir())
    with task.target.open(task.identity.cluster, task.identity.broker) as archive:
        options = RewriteOptions(spool, task.spool_bytes, task.codec)
        return rewrite(archive, task.candidates, task.plan, task.identity, options)


def output_groups(plan: RewritePlan, task_bytes: int) -> Iterator[set[int]]:
    """Outputs of ``plan``, in groups of about ``task_bytes`` of neighbours, which share sources."""
    sizes = np.zeros(len(plan.outputs), np.int64)
    for iteration in plan.iterations:
        for part in iteration:
            sizes[part.output] += part.message_bytes
    group: set[int] = set()
    size_bytes = 0
    for output, size in enumerate(sizes.tolist()):
        if group and size_bytes + size > task_bytes:
            yield group
            group, size_bytes = set(), 0
        group.add(output)
        size_bytes += size
    if group:
        yield group


def part_of(candidates: Candidates, plan: RewritePlan, outputs: set[int]) -> tuple[Candidates, RewritePlan]:
    """What is needed for ``outputs``. These keep their numbers, and so their keys."""
    iterations = [[part for part in iteration if part.output in outputs] for iteration in plan.iterations]
    iterations = [iteration for iteration in iterations if iteration]
    used = np.unique(np.concatenate([part.ranges["run"] for iteration in iterations for part in iteration]))
    runs = candidates.runs[used].copy()
    numbers, place = np.unique(runs["object"], return_inverse=True)
    queue_numbers, queue_place = np.unique(runs["queue"], return_inverse=True)
    runs["object"], runs["queue"] = place, queue_place
    objects = candidates.objects[numbers].copy()
    keys = [candidates.object_keys[int(row["key"])] for row in objects]
    objects["key"] = np.arange(len(objects))
    found = Candidates(
        queues=[candidates.queues[number] for number in queue_numbers.tolist()],
        runs=runs,
        objects=objects,
        object_keys=keys,
        is_set=candidates.is_set[numbers],
        floors=candidates.floors[queue_numbers],
        is_fixed=candidates.is_fixed[numbers],
        share=candidates.share[numbers],
        covers=candidates.covers,
    )
    mine = [[_renumbered(part, used) for part in iteration] for iteration in iterations]
    none, selection = np.zeros(0, np.int64), plan.selection
    if isinstance(selection, KeptRows):
        selection = KeptRows(
            {queue: selection.queues[queue] for queue in found.queues if queue in selection.queues}
        )
    return found, replace(
        plan,
        sources=np.arange(len(objects)),
        kept=none,
        iterations=mine,
        selection=selection,
        replaced=None,
        left=None if plan.left is None else plan.left[used],
    )


def _renumbered(part: OutputPart, used: np.ndarray[tuple[int], np.dtype[np.int64]]) -> OutputPart:
    ranges = part.ranges.copy()
    ranges["run"] = np.searchsorted(used, ranges["run"])
    return OutputPart(part.output, ranges)


def joined_results(
    candidates: Candidates, tasks: Sequence[CompactTask], results: Sequence[RewriteResult]
) -> RewriteResult:
    """One result, whose runs refer to the queues of ``candidates``."""
    numbers = {queue: number for number, queue in enumerate(candidates.queues)}
    runs: list[Table] = []
    objects: list[Table] = []
    keys: list[str] = []
    abandoned: list[str] = []
    cost = RewriteCost()
    for task, result in zip(tasks, results, strict=True):
        own = np.array([numbers[queue] for queue in task.candidates.queues], np.uint32)
        mine, places = result.runs.copy(), result.objects.copy()
        mine["queue"] = own[mine["queue"]]
        mine["object"] += len(keys)
        places["key"] += len(keys)
        runs.append(mine)
        objects.append(places)
        keys += result.object_keys
        abandoned += result.abandoned
        cost += result.cost
    return RewriteResult(
        concatenated(runs, RUN_DTYPE), concatenated(objects, OBJECT_DTYPE), keys, abandoned, cost
    )


def _message_bytes(plan: RewritePlan) -> int:
    return sum(part.message_bytes for iteration in plan.iterations for part in iteration)
