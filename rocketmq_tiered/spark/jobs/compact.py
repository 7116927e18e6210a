"""Compacts one archive with the outputs of each round written in tasks. The driver plans, announces and commits once a
round, as `tiered compact` does.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.compaction_job import (
    CompactionReport,
    compact_archive,
    dry_run,
    rewrite_options,
)
from rocketmq_tiered.maintenance.cost import Prices
from rocketmq_tiered.maintenance.key_job import IsKeyed, KeyCompactionReport, Report
from rocketmq_tiered.maintenance.key_job import compact_keys as compact_keys_here
from rocketmq_tiered.maintenance.key_rounds import (
    KeyedQueue,
    KeyFigures,
    KeyPass,
    divided,
    queue_entries,
    surviving,
)
from rocketmq_tiered.process.loaded_archive import LoadedArchive
from rocketmq_tiered.spark.jobs.tasks import ArchiveTarget, SparkTasks
from tiered.archive.kept_offsets import KeptOffsets, KeptRows
from tiered.archive.offset_map import ENTRY_DTYPE, MEMORY_BYTES, OffsetMap
from tiered.archive.rewrite.outputs import rewrite
from tiered.archive.rewrite.plan import Candidates, OutputPart, RewritePlan
from tiered.archive.rewrite.result import OutputIdentity, RewriteCost, RewriteOptions, RewriteResult
from tiered.catalog.archives import open_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import selected
from tiered.formats.keys import archive_prefix
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, Table, concatenated, picked
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.settings.sections import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_BYTES = 128 << 20
"""Message bytes that a task reads."""
PART_MESSAGES = 4 << 20
"""Messages of a part of the shuffle at most, before those of equal keys are dropped."""


@dataclass(frozen=True)
class KeysTask:
    """Read the runs of ``queue``, number ``number`` of those read together, for a shuffle into ``parts``."""

    target: ArchiveTarget
    cluster: str
    broker: str
    number: int
    queue: KeyedQueue
    parts: int
    keeps_keyless: bool
    keeps_tombstones: bool


@dataclass(frozen=True)
class KeysPiece:
    """Of a queue: ``entries`` (ENTRY_DTYPE, compressed) of keys of one part, or what needs no shuffle: offsets that
    stay, figures, the last row of each run."""

    number: int
    entries: bytes = b""
    keeps_tombstones: bool = False
    offsets: bytes = b""
    figures: KeyFigures = field(default_factory=KeyFigures)
    last_rows: dict[tuple[QueueKey, int], int] = field(default_factory=dict)


def compact_keys(
    spark: Callable[[], SparkSession],
    archive: LoadedArchive,
    settings: Settings,
    is_keyed: IsKeyed,
    *,
    apply: bool = False,
    spool: str = "",
    report: Report = lambda what, done, total: None,
    tasks: SparkTasks | None = None,
) -> KeyCompactionReport:
    """Compact the keys of the topics for which ``is_keyed`` is true, by Spark tasks; without ``apply`` only count what
    that would drop. ``spool``: a directory on each worker for objects while they are made. ``report`` gets the
    progress.

    Raises UnavailableError if the archive changes too fast, and the store's errors; what was committed until then
    stays.
    """
    target = ArchiveTarget(archive.url, StoreOptions(settings.object_store))
    runner = tasks or SparkTasks(spark())
    reader = _DistributedKeys(target, archive, runner, settings.key_compaction.keyless == "keep")
    writer = DistributedRewrite(target, runner, settings.compaction.memory_bytes)
    options = rewrite_options(settings, Path(spool))
    return compact_keys_here(
        archive.store,
        archive.state,
        settings,
        options,
        is_keyed,
        apply=apply,
        report=report,
        write=writer.write,
        read=reader.read,
    )


class _DistributedKeys:
    """Reads the keys of queues in tasks."""

    def __init__(
        self, target: ArchiveTarget, archive: LoadedArchive, runner: SparkTasks, keeps_keyless: bool
    ) -> None:
        self._target, self._names = target, (archive.cluster, archive.broker)
        self._runner, self._keeps_keyless = runner, keeps_keyless

    def read(self, queues: Sequence[KeyedQueue], found: KeyPass) -> None:
        """Read the keys of ``queues`` by Spark tasks, shuffle them so that equal keys come together, and add to
        ``found`` which messages of each queue stay and which is the last row of each run; ``found.report`` gets the
        bytes that were read, for the progress."""
        rows = sum(int(one.chunk.runs["rows"].sum()) for one in queues)
        parts = max(self._runner.parallelism, -(-rows // PART_MESSAGES))
        tasks = [
            KeysTask(
                self._target,
                *self._names,
                number,
                some_runs,
                parts,
                self._keeps_keyless,
                found.keeps_tombstones(one),
            )
            for number, one in enumerate(queues)
            for some_runs in _divided_runs(one)
        ]
        kept = [KeptOffsets(one.begin, one.cut) for one in queues]
        found.figures += KeyFigures(queues=len(queues))
        for pieces in self._runner.run_by_part(read_keys, tasks, latest_of_part, parts):
            for piece in pieces:
                kept[piece.number].keep(_offsets(piece.offsets))
                found.figures += piece.figures
                found.last_rows.update(piece.last_rows)
        found.report(sum(int(one.chunk.runs["byte_count"].sum()) for one in queues))
        found.kept.update({one.queue: offsets for one, offsets in zip(queues, kept, strict=True)})


def _divided_runs(one: KeyedQueue) -> Iterator[KeyedQueue]:
    """The queue several times, each time with some of its runs (rows in one object), of about TASK_BYTES: one task
    reads them."""
    size = np.cumsum(one.chunk.runs["byte_count"], dtype=np.int64)
    number = (size - one.chunk.runs["byte_count"]) // TASK_BYTES
    for runs in np.split(np.arange(len(number)), np.flatnonzero(np.diff(number)) + 1):
        yield replace(one, chunk=selected(one.chunk, runs), floor=one.begin)


def read_keys(task: KeysTask) -> list[tuple[int, KeysPiece]]:
    """Read the keys of some runs of a queue, in a Spark worker. Returns pieces for the shuffle, each with the number of
    its part: the latest messages of keys by a hash of the key; and one more with the figures, the offsets that stay
    whatever their key, and the last row of each run, by queue and begin of the run."""
    figures, kept_anyway = KeyFigures(), list[NDArray[np.int64]]()
    last_rows: dict[tuple[QueueKey, int], int] = {}
    pieces: list[tuple[int, KeysPiece]] = []
    with closing(OffsetMap(Path(tempfile.gettempdir()), MEMORY_BYTES)) as keys:
        with task.target.open(task.cluster, task.broker) as archive:
            for entries in queue_entries(archive, [task.queue], last_rows):
                keyed, free, more = divided(entries, keeps_keyless=task.keeps_keyless)
                figures += more
                kept_anyway.append(free["offset"])
                keys.add(keyed)
        for latest in keys.latest():
            part = (latest["low"] % np.uint64(task.parts)).astype(np.int64)
            for number in np.unique(part).tolist():
                entries_of_part = zlib.compress(picked(latest, part == number).tobytes(), 1)
                pieces.append((number, KeysPiece(task.number, entries_of_part, task.keeps_tombstones)))
    stored = _stored(np.concatenate(kept_anyway)) if kept_anyway else b""
    rest = KeysPiece(task.number, offsets=stored, figures=figures, last_rows=last_rows)
    return [*pieces, (task.number % task.parts, rest)]


def latest_of_part(pieces: list[KeysPiece]) -> list[KeysPiece]:
    """Find which messages stay, of the keys in one part of the shuffle, in a Spark worker: the ``pieces`` have these
    keys of all tasks. Returns pieces with the offsets that stay; those without keys are returned as they are."""
    results = [piece for piece in pieces if not piece.entries]
    for number in sorted({piece.number for piece in pieces if piece.entries}):
        of_queue = [piece for piece in pieces if piece.entries and piece.number == number]
        tables = [np.frombuffer(zlib.decompress(piece.entries), ENTRY_DTYPE) for piece in of_queue]
        keys = OffsetMap(Path(tempfile.gettempdir()), 1 << 40)
        keys.add(concatenated(tables, ENTRY_DTYPE))
        for latest in keys.latest():
            values, figures = surviving(latest, keeps_tombstones=of_queue[0].keeps_tombstones)
            results.append(KeysPiece(number, offsets=_stored(values["offset"]), figures=figures))
    return results


def _stored(offsets: NDArray[np.int64]) -> bytes:
    return zlib.compress(np.diff(np.sort(offsets), prepend=0).astype("<i8").tobytes(), 1)


def _offsets(stored: bytes) -> NDArray[np.int64]:
    gaps = np.frombuffer(zlib.decompress(stored), "<i8") if stored else np.zeros(0, np.int64)
    found: NDArray[np.int64] = np.cumsum(gaps)
    return found


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
    tasks: SparkTasks | None = None,
) -> ArchiveCompaction:
    """Join small objects of the archive that ``settings.archive`` names below ``url``, or of the only one there, by
    Spark tasks. Without ``apply`` only forecast what that would do; ``spark``, the session or a function that starts
    one, is not needed for that. ``spool``: a directory on each worker for objects while they are made; ``prices``: for
    the costs in the report; ``store`` opens the archive (default: by the settings). ``report(message bytes done,
    total)`` is called after each stage.

    Raises NotFoundError if there is no archive, UnavailableError if it changes too fast, and the store's errors; what
    was committed until then stays.
    """
    options = store or StoreOptions(settings.object_store)
    prices = prices or Prices()
    with closing(open_store(url, options)) as root:
        archive = open_archive(root, settings.archive.cluster or None, settings.archive.broker or None)
        state = load(archive.store)
        if not apply:
            compacted = dry_run(archive.store, state, settings, prices)
            return ArchiveCompaction(archive.cluster, archive.broker, compacted)
        root.keys(archive_prefix(archive.cluster, archive.broker)).check()
        runner = tasks or SparkTasks(spark() if callable(spark) else spark)
        writer = DistributedRewrite(ArchiveTarget(url, options), runner, settings.compaction.memory_bytes)
        place = rewrite_options(settings, Path(spool))
        compacted = compact_archive(
            archive.store, state, settings, place, prices, report=report, write=writer.write
        )
        return ArchiveCompaction(archive.cluster, archive.broker, compacted)


class DistributedRewrite:
    """Writes outputs in tasks instead of here."""

    def __init__(self, target: ArchiveTarget, runner: SparkTasks, task_bytes: int) -> None:
        self._target, self._runner, self._task_bytes = target, runner, task_bytes

    def write(
        self,
        store: ObjectStore,
        candidates: Candidates,
        plan: RewritePlan,
        identity: OutputIdentity,
        options: RewriteOptions,
    ) -> RewriteResult:
        """Write the new objects of ``plan`` by Spark tasks, TASKS_PER_STAGE for each core at a time, and report the
        progress after each such stage."""
        groups = list(output_groups(plan, self._task_bytes))
        tasks = [
            CompactTask(
                self._target,
                *part_of(candidates, plan, group),
                identity,
                options.codec,
                str(options.spool_directory),
                options.spool_bytes_max,
            )
            for group in groups
        ]
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
        is_secret = task.target.options.settings.encrypts
        options = RewriteOptions(spool, task.spool_bytes, task.codec, is_secret=is_secret)
        return rewrite(archive, task.candidates, task.plan, task.identity, options)


def output_groups(plan: RewritePlan, task_bytes: int) -> Iterator[set[int]]:
    """Numbers of the objects that ``plan`` writes, in groups of about ``task_bytes`` message bytes: one task writes a
    group. Neighbours are in one group, as they are made of the same objects."""
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
    """The part of ``candidates`` and ``plan`` that a task needs to write the new objects number ``outputs``. These keep
    their numbers, and so the keys that the driver chose for them; runs, objects and queues are numbered again."""
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
    needed = Candidates(
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
    selection = plan.selection
    if isinstance(selection, KeptRows):
        selection = KeptRows(
            {queue: selection.queues[queue] for queue in needed.queues if queue in selection.queues}
        )
    return needed, replace(
        plan,
        sources=np.arange(len(objects)),
        kept=np.zeros(0, np.int64),
        iterations=[[_renumbered(part, used) for part in iteration] for iteration in iterations],
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
    """Join the ``results`` of ``tasks`` to one result of the whole rewrite, with the queue numbers of
    ``candidates``."""
    numbers = {queue: number for number, queue in enumerate(candidates.queues)}
    runs: list[Table] = []
    objects: list[Table] = []
    keys: list[str] = []
    abandoned: list[str] = []
    cost = RewriteCost()
    for task, result in zip(tasks, results, strict=True):
        queue_number = np.array([numbers[queue] for queue in task.candidates.queues], np.uint32)
        task_runs, task_objects = result.runs.copy(), result.objects.copy()
        task_runs["queue"] = queue_number[task_runs["queue"]]
        task_runs["object"] += len(keys)
        task_objects["key"] += len(keys)
        runs.append(task_runs)
        objects.append(task_objects)
        keys += result.object_keys
        abandoned += result.abandoned
        cost += result.cost
    return RewriteResult(
        concatenated(runs, RUN_DTYPE), concatenated(objects, OBJECT_DTYPE), keys, abandoned, cost
    )


def _message_bytes(plan: RewritePlan) -> int:
    return sum(part.message_bytes for iteration in plan.iterations for part in iteration)
