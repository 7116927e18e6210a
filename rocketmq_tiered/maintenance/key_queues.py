"""Which runs of a queue key compaction may read and replace: those in ranges of pages that a round can replace, below
the first run that must stay, and never the newest.

Runs of commits that are too young stay: a log that diverges there would bring back what a dropped message had replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rocketmq_tiered.maintenance.compaction_ranges import PageRange, ranges_of
from tiered.catalog.living_runs import living_pages, memory_page
from tiered.catalog.pages import Page, RunIndex
from tiered.catalog.state import CatalogState, RunChunk, joined, selected
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH, QUEUE_FILLED, QUEUE_HIDDEN, QUEUE_LMQ, RunKind

RUNS_MIN = 2
"""Runs of a queue that are compacted together at least; the newest, which stays, does not count."""


@dataclass(frozen=True)
class KeyedQueue:
    """``chunk``: its runs below offset ``cut``, by offset, all of which may be replaced. ``floor``: its minimum offset.
    ``seen``: a cut up to which they were read before, and all stayed that is plain."""

    queue: QueueKey
    chunk: RunChunk
    cut: int
    floor: int = 0
    seen: int = 0
    is_filled: bool = False
    """A later commit may have added lower offsets: where rounds are several, a tombstone could go before them."""

    @property
    def begin(self) -> int:
        """The first offset that counts."""
        return max(self.floor, int(self.chunk.runs["base_queue_offset"][0]))

    @property
    def new_bytes(self) -> int:
        """Message bytes that were not compacted yet."""
        runs = self.chunk.runs
        is_new = (runs["kind"] == RunKind.PLAIN) & (runs["base_queue_offset"] >= self.seen)
        return int(runs["byte_count"][is_new].sum())

    @property
    def old_bytes(self) -> int:
        """Message bytes that an earlier round left."""
        return int(self.chunk.runs["byte_count"].sum()) - self.new_bytes


class Waiting(NamedTuple):
    """A queue of which nothing is compacted now, and why. ``version``: the first that is too young, or 0."""

    queue: QueueKey
    reason: str
    version: int = 0


YOUNG, UNINDEXED, FEW, OLD = (
    "committed less than key_compaction.min_age_ms ago",
    "not in the message index yet",
    f"fewer than {RUNS_MIN} runs below the newest one",
    "nothing new since the last round",
)
_EXCLUDED = (
    (QUEUE_LMQ, "an LMQ"),
    (QUEUE_BATCH, "a queue of batches"),
    (QUEUE_HIDDEN, "of a deleted topic, or an earlier generation"),
)


def page_ranges(state: CatalogState, before_version: int, runs_max: int) -> list[PageRange]:
    """All ranges of versions below ``before_version``, the oldest first."""
    return [one for found in ranges_of(state, before_version, runs_max) for one in found]


def keyed_queues(
    index: RunIndex,
    state: CatalogState,
    is_keyed: Callable[[str], bool],
    *,
    before_version: int,
    runs_max: int,
    damaged: Set[str] = frozenset(),
) -> list[KeyedQueue | Waiting]:
    """Queues of topics that ``is_keyed``: those with something new to compact, and why the others wait. ``damaged``
    objects stay, and what is above them. Raises what reading pages raises."""
    fixed = damaged | state.unindexed.keys()
    wanted: set[QueueKey] = set()
    excluded: list[KeyedQueue | Waiting] = []
    for row, queue in enumerate(state.directory.keys[: len(state.table)]):
        if is_keyed(queue.topic):
            flags = int(state.table["flags"][row])
            why = next((reason for flag, reason in _EXCLUDED if flags & flag), "")
            if why:
                excluded.append(Waiting(queue, why))
            else:
                wanted.add(queue)
    if not wanted:
        return excluded
    ranges = page_ranges(state, before_version, runs_max)
    keys = {page.key for chosen in ranges for page in chosen.pages}
    spilled = max((chosen.spilled_version for chosen in ranges), default=0)
    found: dict[QueueKey, list[RunChunk]] = {}
    stays: dict[QueueKey, tuple[int, int]] = {}
    names = sorted(wanted)
    for ref in state.pages:
        if any(ref.first <= queue <= ref.last for queue in names):
            for page in living_pages(index, state, [ref]):
                _sort(
                    page, wanted, found, stays, fixed=fixed, last_version=1 << 62 if ref.key in keys else -1
                )
    for page in memory_page(state):
        _sort(page, wanted, found, stays, fixed=fixed, last_version=spilled)
    return excluded + [
        _keyed(state, queue, found.get(queue, []), stays.get(queue, (1 << 62, 0)), before_version)
        for queue in names
    ]


def _sort(
    page: Page,
    wanted: set[QueueKey],
    found: dict[QueueKey, list[RunChunk]],
    stays: dict[QueueKey, tuple[int, int]],
    *,
    fixed: Set[str],
    last_version: int,
) -> None:
    """Add the runs of ``page`` up to ``last_version`` to ``found``, and note offset and version of the first of the
    others."""
    for number in (at for at, queue in enumerate(page.queues) if queue in wanted):
        queue, runs = page.queues[number], page.chunk.runs
        mine = np.flatnonzero(runs["queue"] == number)
        keys = [page.chunk.object_keys[key] for key in page.chunk.objects["key"].tolist()]
        is_fixed = np.array([key in fixed for key in keys], bool)
        is_old = (runs["version"][mine] <= last_version) & ~is_fixed[runs["object"][mine]]
        if is_old.any():
            found.setdefault(queue, []).append(selected(page.chunk, mine[is_old]))
        if not is_old.all():
            others = runs[mine[~is_old]]
            first = others[others["base_queue_offset"].argmin()]
            place = int(first["base_queue_offset"]), int(first["version"])
            stays[queue] = min(place, stays.get(queue, place))


def _keyed(
    state: CatalogState, queue: QueueKey, found: list[RunChunk], stays: tuple[int, int], before_version: int
) -> KeyedQueue | Waiting:
    chunk = joined(tuple(found))
    row = state.queue(queue)
    assert row is not None
    runs = chunk.runs
    runs["queue"] = 0
    newest = runs["end_queue_offset"] == row["end_queue_offset"]
    cut = min([stays[0], *runs["base_queue_offset"][newest].tolist()])
    order = np.argsort(runs["base_queue_offset"], kind="stable")
    order = order[runs["base_queue_offset"][order] < cut]
    chunk = selected(chunk, order)
    is_new = bool((chunk.runs["kind"] == RunKind.PLAIN).any())
    if len(order) < RUNS_MIN or not is_new:
        is_young = stays[1] >= before_version
        is_old = bool(len(order)) and not is_new
        reason = YOUNG if is_young else UNINDEXED if stays[1] else OLD if is_old else FEW
        return Waiting(queue, reason, stays[1] if is_young else 0)
    is_filled = bool(int(row["flags"]) & QUEUE_FILLED)
    end, minimum = int(chunk.runs["end_queue_offset"][-1]), int(row["min_queue_offset"])
    return KeyedQueue(queue, chunk, end, minimum, is_filled=is_filled)
