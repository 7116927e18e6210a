"""What a change of an archive was planned with, and must still stand when it is committed: values, no code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.state import CatalogState, LogHistory
from tiered.model.queue import QueueKey

LOG_HISTORY = "log history"
Histories = tuple[int, tuple[LogHistory, ...]]


def histories_of(state: CatalogState) -> Histories:
    """The number of the current log history, and the begins of log histories so far: equal as long as none begins."""
    return state.cursor.history, state.log_histories


@dataclass(frozen=True)
class Floors:
    """The minimum offset of each queue; 0 of an unknown one."""

    queues: Sequence[QueueKey]
    minimum: NDArray[np.int64]

    @classmethod
    def of(cls, state: CatalogState, queues: Sequence[QueueKey]) -> Floors:
        """Those of ``queues`` in ``state``."""
        rows = state.directory.rows(queues, len(state.table))
        return cls(queues, np.where(rows < 0, 0, state.table["min_queue_offset"][rows]).astype(np.int64))


@dataclass(frozen=True)
class IndexBegins:
    """The index files that begin at a catalog version up to ``last_version`` begin at one of ``allowed``. Some of these
    may be gone, as merged files begin where the first one did."""

    last_version: int
    allowed: frozenset[int]


@dataclass(frozen=True)
class Requirements:
    """What must still be so when a change is committed; None and empty sets require nothing. ``pages``,
    ``index_files``, ``announced`` (pending deletions): keys that must exist. ``tombstones``: how many removed runs are
    still in pages. ``memory``: a version, and how many runs that versions up to it added are in no page.
    ``uncompacted_since``: no round of compaction was committed after this version, which MaintenanceCommit checks."""

    epoch: int | None = None
    histories: Histories | None = None
    pages: frozenset[str] = frozenset()
    tombstones: int | None = None
    memory: tuple[int, int] | None = None
    floors: Floors | None = None
    index_files: frozenset[str] = frozenset()
    index_begins: IndexBegins | None = None
    indexed_version: int | None = None
    announced: frozenset[str] = frozenset()
    uncompacted_since: int | None = None

    def unmet(self, state: CatalogState) -> str:
        """The name of the first requirement that is no longer so in ``state``; empty if all are.

        Does not check ``uncompacted_since``, which takes reading commits."""
        index = {file.key: file.from_version for file in state.indexes}
        is_index_same = self.index_files <= index.keys()
        is_index_same = is_index_same and self.indexed_version in (None, state.indexed_version)
        if self.index_begins is not None:
            begins = {begin for begin in index.values() if begin <= self.index_begins.last_version}
            is_index_same = is_index_same and begins <= self.index_begins.allowed
        is_met = {
            # Keys carry the epoch: objects of an earlier one may be collected before a commit names them.
            "epoch": self.epoch in (None, state.epoch),
            LOG_HISTORY: self.histories in (None, histories_of(state)),
            "pages": self.pages <= {page.key for page in state.pages},
            "removed runs": self.tombstones in (None, len(state.tombstones)),
            "runs in memory": self.memory is None or _memory_runs(state, self.memory[0]) == self.memory[1],
            "index": is_index_same,
            "floors": self.floors is None
            or bool((Floors.of(state, self.floors.queues).minimum == self.floors.minimum).all()),
            "announced keys": self.announced <= state.pending_deletions.keys(),
        }
        return next((name for name, met in is_met.items() if not met), "")


def _memory_runs(state: CatalogState, version: int) -> int:
    """How many runs that versions up to ``version`` added are in no page."""
    return sum(int((chunk.runs["version"] <= version).sum()) for chunk in state.chunks)
