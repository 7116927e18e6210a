"""Key compaction of one archive in tasks, as `tiered compact-keys`: the same rows stay, by the same commits.

Tasks read runs and keep the last message of each key in them, a shuffle by hash of the key finds the last of all runs,
and tasks write what stays. The driver holds a bit for each offset, plans and commits.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.compaction_job import rewrite_options
from rocketmq_tiered.maintenance.key_job import IsKeyed, KeyCompactionReport, Report
from rocketmq_tiered.maintenance.key_job import compact_keys as compact_keys_here
from rocketmq_tiered.maintenance.key_queues import KeyedQueue
from rocketmq_tiered.maintenance.key_rounds import KeyFigures, KeyPass, divided, queue_entries, surviving
from rocketmq_tiered.process.loaded_archive import LoadedArchive
from rocketmq_tiered.spark.jobs.archive_target import ArchiveTarget
from rocketmq_tiered.spark.jobs.compact import DistributedRewrite
from rocketmq_tiered.spark.jobs.tasks import SparkTasks, TaskRunner
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.offset_map import ENTRY_DTYPE, OffsetMap
from tiered.catalog.state import selected
from tiered.model.queue import QueueKey
from tiered.model.tables import concatenated, picked
from tiered.object_store.store_options import StoreOptions
from tiered.settings.sections import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_BYTES = 128 << 20
"""Message bytes that a task reads."""
PART_MESSAGES = 4 << 20
"""Messages of a part of the shuffle at most, before those of equal keys are dropped."""
MEMORY_BYTES = 64 << 20


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
    tasks: TaskRunner | None = None,
) -> KeyCompactionReport:
    """Compact the keys of topics that ``is_keyed``, or count what that would do. ``spool``: a directory of each worker.

    Raises UnavailableError if the archive's pages change too fast, and what the store raises; committed rounds stay.
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
        self, target: ArchiveTarget, archive: LoadedArchive, runner: TaskRunner, keeps_keyless: bool
    ) -> None:
        self._target, self._names = target, (archive.cluster, archive.broker)
        self._runner, self._keeps_keyless = runner, keeps_keyless

    def read(self, queues: Sequence[KeyedQueue], found: KeyPass) -> None:
        """See ReadQueues."""
        rows = sum(int(one.chunk.runs["rows"].sum()) for one in queues)
        parts = max(self._runner.parallelism, -(-rows // PART_MESSAGES))
        tasks = [
            KeysTask(
                self._target,
                *self._names,
                number,
                part,
                parts,
                self._keeps_keyless,
                found.keeps_tombstones(one),
            )
            for number, one in enumerate(queues)
            for part in _parts_of(one)
        ]
        kept = [KeptOffsets(one.begin, one.cut) for one in queues]
        found.figures += KeyFigures(queues=len(queues))
        for pieces in self._runner.run_by_part(read_keys, tasks, latest_of_part, parts):
            for piece in pieces:
                kept[piece.number].keep(_offsets(piece.offsets))
                found.figures += piece.figures
                found.last_rows.update(piece.last_rows)
        found.report(sum(int(one.chunk.runs["byte_count"].sum()) for one in queues))
        found.kept.update({one.queue: mine for one, mine in zip(queues, kept, strict=True)})


def _parts_of(one: KeyedQueue) -> Iterator[KeyedQueue]:
    """The queue in parts of some runs each, with its own floor and cut."""
    size = np.cumsum(one.chunk.runs["byte_count"], dtype=np.int64)
    number = (size - one.chunk.runs["byte_count"]) // TASK_BYTES
    for runs in np.split(np.arange(len(number)), np.flatnonzero(np.diff(number)) + 1):
        yield replace(one, chunk=selected(one.chunk, runs), floor=one.begin)


def read_keys(task: KeysTask) -> list[tuple[int, KeysPiece]]:
    """In a worker: (part, piece) of the keys in some runs."""
    figures, free = KeyFigures(), list[NDArray[np.int64]]()
    last_rows: dict[tuple[QueueKey, int], int] = {}
    keys = OffsetMap(Path(tempfile.gettempdir()), MEMORY_BYTES)
    found: list[tuple[int, KeysPiece]] = []
    try:
        with task.target.open(task.cluster, task.broker) as archive:
            for entries in queue_entries(archive, task.queue, last_rows):
                keyed, offsets, more = divided(entries, keeps_keyless=task.keeps_keyless)
                figures += more
                free.append(offsets)
                keys.add(keyed)
        for latest in keys.latest():
            part = (latest["low"] % np.uint64(task.parts)).astype(np.int64)
            for number in np.unique(part).tolist():
                mine = zlib.compress(picked(latest, part == number).tobytes(), 1)
                found.append((number, KeysPiece(task.number, mine, task.keeps_tombstones)))
    finally:
        keys.close()
    stored = _stored(np.concatenate(free)) if free else b""
    rest = KeysPiece(task.number, offsets=stored, figures=figures, last_rows=last_rows)
    return [*found, (task.number % task.parts, rest)]


def latest_of_part(pieces: list[KeysPiece]) -> list[KeysPiece]:
    """In a worker: what stays of the keys of one part, and the pieces without keys as they are."""
    found = [piece for piece in pieces if not piece.entries]
    for number in sorted({piece.number for piece in pieces if piece.entries}):
        own = [piece for piece in pieces if piece.entries and piece.number == number]
        mine = [np.frombuffer(zlib.decompress(piece.entries), ENTRY_DTYPE) for piece in own]
        keys = OffsetMap(Path(tempfile.gettempdir()), 1 << 40)
        keys.add(concatenated(mine, ENTRY_DTYPE))
        for latest in keys.latest():
            offsets, figures = surviving(latest, keeps_tombstones=own[0].keeps_tombstones)
            found.append(KeysPiece(number, offsets=_stored(offsets), figures=figures))
    return found


def _stored(offsets: NDArray[np.int64]) -> bytes:
    return zlib.compress(np.diff(np.sort(offsets), prepend=0).astype("<i8").tobytes(), 1)


def _offsets(stored: bytes) -> NDArray[np.int64]:
    gaps = np.frombuffer(zlib.decompress(stored), "<i8") if stored else np.zeros(0, np.int64)
    found: NDArray[np.int64] = np.cumsum(gaps)
    return found
