"""What an archive grows by in a day at the rate of its newest commits, and how many objects compaction leaves of that.

From the outside it takes a listing of up to 1,000 commits and one of each kind of catalog page since then; the writer's
process knows what it wrote. The runs are those in memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits
from rocketmq_tiered.process.report import StatusReport
from tiered.catalog.state import CatalogState
from tiered.formats.keys import CATALOG_PREFIX, PAGES_PREFIX, parse_catalog_key
from tiered.object_store.interface import ObjectStore

DAY_MS = 86_400_000
COMMITS = 1_000
SPAN_MS_MIN = 60_000
"""Commits of a shorter time, as those of a backfill, have no rate."""
SAMPLES = 60
"""One a minute."""
_PAGE_KINDS = ("root", "runs", "deletions")


@dataclass(frozen=True)
class ArchiveGrowth:
    """A day's growth. ``compacted_objects``: those that `tiered compact` joins ``objects`` to, about. Both are None
    while no run is in memory, for a commit."""

    commits: int
    catalog_bytes: int
    objects: int | None = None
    compacted_objects: int | None = None


def archive_growth(store: ObjectStore, state: CatalogState) -> ArchiveGrowth | None:
    """The growth of the archive at ``store``, its own prefix; None without enough recent commits, or without an owner.

    Raises what the store raises.
    """
    if state.owner is None or state.owner.released:
        return None
    commits = [
        (version, info)
        for info in islice(store.list(CATALOG_PREFIX, limit=COMMITS), COMMITS)
        if (version := parse_catalog_key(info.key)) is not None
    ]
    if len(commits) < 2:
        return None
    oldest_version, oldest = commits[-1]
    span_ms = commits[0][1].modified_ms - oldest.modified_ms
    if span_ms < SPAN_MS_MIN:
        return None
    size_bytes = sum(info.size_bytes for _, info in commits[:-1])
    for kind in _PAGE_KINDS:
        after = f"{PAGES_PREFIX}{kind}-{oldest_version:020d}-~"
        pages = store.list(f"{PAGES_PREFIX}{kind}-", start_after=after, limit=COMMITS)
        size_bytes += sum(info.size_bytes for info in pages)
    days = span_ms / DAY_MS
    commits_a_day = (len(commits) - 1) / days
    return _growth(state, commits_a_day, size_bytes / days)


class GrowthMeter:
    """Growth of the archive that this process writes, at the rate of about the last hour. Sends no request."""

    def __init__(self, now_s: float) -> None:
        self._samples = deque([(now_s, 0, 0)], SAMPLES)
        self._last: ArchiveGrowth | None = None

    def measure(
        self, now_s: float, state: CatalogState, commits: int, catalog_bytes: int
    ) -> ArchiveGrowth | None:
        """The growth, as measured in the last minute; None in the first. ``commits``, ``catalog_bytes``: written since
        the process began."""
        if now_s - self._samples[-1][0] >= SPAN_MS_MIN / 1000:
            begun_s, commits_before, bytes_before = self._samples[0]
            days = (now_s - begun_s) * 1000 / DAY_MS
            self._samples.append((now_s, commits, catalog_bytes))
            self._last = _growth(
                state, (commits - commits_before) / days, (catalog_bytes - bytes_before) / days
            )
        return self._last


def _growth(state: CatalogState, commits_a_day: float, catalog_bytes_a_day: float) -> ArchiveGrowth:
    growth = ArchiveGrowth(round(commits_a_day), round(catalog_bytes_a_day))
    if not state.memory_runs:
        return growth
    runs = state.memory.runs
    # Commits that add no runs, such as those of maintenance, are few.
    share = commits_a_day / len(np.unique(runs["version"]))
    queue_bytes = np.bincount(runs["queue"], weights=runs["byte_count"]) * share
    objects = round(len(np.unique(runs["object"])) * share)
    return replace(growth, objects=objects, compacted_objects=min(objects, _compacted(queue_bytes)))


def with_growth(report: StatusReport, growth: ArchiveGrowth | None) -> StatusReport:
    """``report`` with a day's growth, if it is known."""
    if growth is None:
        return report
    return replace(
        report,
        commits_a_day=growth.commits,
        objects_a_day=growth.objects,
        catalog_bytes_a_day=growth.catalog_bytes,
        compacted_objects_a_day=growth.compacted_objects,
    )


def _compacted(queue_bytes: NDArray[np.floating[Any]]) -> int:
    """Objects of a day's messages: of queues above the split size their own ones, of all others a few sets."""
    limits = CompactionLimits()
    is_own = queue_bytes > limits.split_bytes
    own = np.ceil(queue_bytes[is_own] / limits.object_bytes_max).sum()
    return max(1, int(own + np.ceil(queue_bytes[~is_own].sum() / limits.set_bytes_max)))
