"""Objects that compaction cannot read: it leaves them where they are, joins the others, and reports their messages."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from rocketmq_tiered.maintenance.compaction_round import PlannedRound
from tiered.archive.unreadable import UnreadableRange
from tiered.archive.verify_segment import SegmentCheck, check_segment
from tiered.catalog.pages import Page, RunIndex, living_pages, memory_page
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import selection_of
from tiered.model.tables import picked
from tiered.object_store.interface import ObjectStore


class _Damaged(NamedTuple):
    check: SegmentCheck
    ranges: tuple[UnreadableRange, ...]


class DamagedSources:
    """The damaged sources found so far. Not thread-safe, except for ``ranges``."""

    def __init__(self) -> None:
        self._found: dict[str, _Damaged] = {}
        self.ranges: tuple[UnreadableRange, ...] = ()
        """The messages of the damaged sources, by queue and offset."""

    def __len__(self) -> int:
        return len(self._found)

    @property
    def keys(self) -> frozenset[str]:
        """The objects."""
        return frozenset(self._found)

    def add(self, store: ObjectStore, state: CatalogState, planned: PlannedRound) -> bool:
        """Read the objects that the round ``planned`` joins, and note those that cannot be read. Returns False if all
        can."""
        candidates, before = planned.candidates, len(self)
        for number in planned.plan.sources.tolist():
            runs = picked(candidates.runs, np.flatnonzero(candidates.runs["object"] == number))
            queues = selection_of(candidates.queues).taken(runs["queue"])
            key = candidates.object_keys[int(candidates.objects["key"][number])]
            self._check(store, state, SegmentCheck(key, candidates.objects[number], [runs], queues))
        self._changed()
        return len(self) > before

    def add_unindexed(self, store: ObjectStore, state: CatalogState) -> None:
        """Read the objects of ``state`` that are not in the message index yet, and note those that are damaged: the
        index is built without them, and compaction would wait for it for ever."""
        checks: dict[str, SegmentCheck] = {}
        for page in _pages_of(store, state, state.unindexed):
            chunk = page.chunk
            keys = [chunk.object_keys[number] for number in chunk.objects["key"].tolist()]
            for number in (at for at, key in enumerate(keys) if key in state.unindexed):
                runs = picked(chunk.runs, np.flatnonzero(chunk.runs["object"] == number))
                check = checks.setdefault(
                    keys[number], SegmentCheck(keys[number], chunk.objects[number], [], [])
                )
                check.runs.append(runs)
                queues = [*check.queues, *selection_of(page.queues).taken(runs["queue"])]
                checks[keys[number]] = replace(check, queues=queues)
        for key in checks.keys() - self._found.keys():
            self._check(store, state, checks[key])
        self._changed()

    def _check(self, store: ObjectStore, state: CatalogState, check: SegmentCheck) -> None:
        """Note the object of ``check``, the offsets of its messages in each queue, and why it cannot be read, if it
        cannot."""
        why = _damage(store, state, check)
        if not why:
            return
        bounds = (
            zip(
                runs["base_queue_offset"].tolist(),
                runs["end_queue_offset"].tolist(),
                runs["min_phys"].tolist(),
                strict=True,
            )
            for runs in check.runs
        )
        ranges = [
            UnreadableRange(*queue, begin, end, check.key, why, phys)
            for queue, (begin, end, phys) in zip(check.queues, chain.from_iterable(bounds), strict=True)
        ]
        self._found[check.key] = _Damaged(check, tuple(ranges))

    def check_again(self, store: ObjectStore, state: CatalogState) -> None:
        """Read the noted objects again, and forget those that are whole again, or whose messages have expired."""
        for key, (check, ranges) in [*self._found.items()]:
            is_alive = any(
                one.end > _minimum(state, QueueKey(one.topic, one.queue_id, one.generation)) for one in ranges
            )
            if not is_alive or not _damage(store, state, check):
                del self._found[key]
        self._changed()

    def _changed(self) -> None:
        self.ranges = tuple(sorted(one for found in self._found.values() for one in found.ranges))


def _damage(store: ObjectStore, state: CatalogState, check: SegmentCheck) -> str:
    """Why the object of ``check`` cannot be read; empty if it can."""
    found = check_segment(store, state, check, full=True)
    if found.anomalies:
        return found.anomalies[0].detail
    return "the key that encrypts it is missing" if "without_key" in found.counts else ""


def _pages_of(
    store: ObjectStore, state: CatalogState, objects: Mapping[str, Collection[int]]
) -> Iterator[Page]:
    """Pages that may have runs of ``objects``, whose versions are given."""
    if not objects:
        return iter(())
    versions = {version for versions_of_object in objects.values() for version in versions_of_object}
    refs = [ref for ref in state.pages if any(ref.overlaps(version, version) for version in versions)]
    return chain(living_pages(RunIndex(store), state, refs), memory_page(state))


def _minimum(state: CatalogState, queue: QueueKey) -> int:
    row = state.queue(queue)
    return 1 << 62 if row is None else int(row["min_queue_offset"])
