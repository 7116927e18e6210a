"""The selected runs of an archive by physical offset, in windows: memory follows a window, not the archive."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rocketmq_tiered.maintenance.restore.selection import Selection
from tiered.archive.verify_runs import LivingRuns, WindowObjects
from tiered.catalog.pages import Page
from tiered.catalog.state import CatalogState, renumbered, selected
from tiered.errors import CorruptionError
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import taken
from tiered.model.tables import RunKind, Table
from tiered.object_store.interface import ObjectStore

WINDOW_RUNS = 262_144
_END = np.iinfo(np.int64).max


class OrderedRun(NamedTuple):
    """A run, the object that has it (size and tail in bytes), and its queue."""

    min_phys: int
    key: str
    size_bytes: int
    tail_bytes: int
    run: np.void
    queue: QueueKey


class LogOrder:
    """``windows``: bounds [begin, end) of the runs' first physical offsets. ``oldest_phys``: of a record that is
    certainly selected. ``has_holes``: key compaction dropped rows inside runs. Raises CorruptionError if a page of the
    archive cannot be read, and what the store raises."""

    def __init__(self, store: ObjectStore, state: CatalogState, selection: Selection) -> None:
        self._runs = LivingRuns(store, state)
        self._version, self._selection = state.version, selection
        starts = [np.zeros(0, np.int64)]
        self.total_bytes, self.oldest_phys, self.has_holes = 0, _END, False
        for page in self._pages(0, _END):
            runs = page.chunk.runs
            starts.append(np.array(runs["min_phys"]))
            self.total_bytes += int(runs["byte_count"].sum())
            self.has_holes |= bool((runs["kind"] == RunKind.SPARSE).any())
            whole = runs["min_phys"][selection.whole_runs(page)]
            self.oldest_phys = min(self.oldest_phys, int(whole.min(initial=_END)))
        first = np.sort(np.concatenate(starts))
        cuts = [0, *np.unique(first[WINDOW_RUNS::WINDOW_RUNS]).tolist(), _END]
        self.windows = [(begin, end) for begin, end in pairwise(cuts) if len(first)]
        if self._runs.unreadable:
            key, reason = next(iter(self._runs.unreadable.items()))
            raise CorruptionError(f"{key}: {reason}", hint="tiered verify lists all damage")

    def objects(self, window: tuple[int, int]) -> list[list[OrderedRun]]:
        """The runs with bytes of ``window``, object by object, the one that begins first first."""
        found: dict[str, list[OrderedRun]] = {}
        for item in self._ordered(window):
            if int(item.run["kind"]) != RunKind.LMQ:
                found.setdefault(item.key, []).append(item)
        return list(found.values())

    def runs(self) -> Iterator[OrderedRun]:
        """All runs, so that those of one queue come in the order of their offsets."""
        for window in self.windows:
            yield from self._ordered(window)

    def _ordered(self, window: tuple[int, int]) -> list[OrderedRun]:
        objects = WindowObjects(self._pages(*window))
        found = []
        for key, check in objects.items():
            size_bytes, tail_bytes = int(check.place["size_bytes"]), int(check.place["tail_bytes"])
            (runs,) = check.runs
            found += [
                OrderedRun(int(run["min_phys"]), key, size_bytes, tail_bytes, run, queue)
                for run, queue in zip(runs, check.queues, strict=True)
            ]
        return sorted(found, key=lambda item: (item.min_phys, item.key, int(item.run["ordinal"])))

    def _pages(self, begin: int, end: int) -> Iterator[Page]:
        for page in self._runs.between(0, self._version):
            runs: Table = page.chunk.runs
            wanted = self._selection.runs(page) & (runs["min_phys"] >= begin) & (runs["min_phys"] < end)
            if wanted.any():
                chunk = selected(page.chunk, wanted)
                used, chunk.runs["queue"] = renumbered(chunk.runs["queue"], len(page.queues))
                yield Page(taken(page.queues, used), chunk)
