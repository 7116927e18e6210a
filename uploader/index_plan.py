"""Plans index files: new ones over unindexed segments, and merges of existing ones. Pure.

New files cover whole catalog versions. Of a day that has not ended at most ``day_files_max`` are left: one more is
merged with the newest that were merged as often, so levels fall from the oldest file to the newest. Then k files hold
(k + w choose k) new ones if each item is rewritten at most w times. With k = w = 5 these are 252, about what a day with
a commit every 5 s makes. An item is rewritten at most MERGES_MAX times, and once more when an ended day becomes one
file. Only neighbours in the order of versions are merged, so coverage has no hole.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter

import numpy as np

from tiered.archive.index.footer import Covered, IndexMeta
from tiered.archive.index.layout import COVERED_DTYPE
from tiered.catalog.index_refs import IndexRef
from tiered.catalog.pages import Page
from tiered.catalog.state import CatalogState
from tiered.model.tables import RUN_DTYPE, Table, concatenated, picked

DAY_MS = 86_400_000
MERGES_MAX = 8
"""A file merged so often is not merged again on its day: with 5 files a day, every 1,300 new files or so."""
SEGMENT_RUNS = 10
"""A segment without its runs takes the memory of so many."""
MERGE_SHARE = 4
"""At the end of a backfill the files of the current day are merged unless the others are smaller than this part of
the largest."""


@dataclass(frozen=True)
class Segment:
    """A data object, and those of its ``runs`` (RUN_DTYPE) that one catalog version added. ``place``: the object's row
    (OBJECT_DTYPE); ``begin_ms`` and ``end_ms``: the first and the last store time of the runs."""

    key: str
    place: np.void
    runs: Table
    version: int
    begin_ms: int
    end_ms: int


@dataclass
class Group:
    """Segments of consecutive versions for one new file."""

    segments: list[Segment] = field(default_factory=list)

    def meta(self, from_version: int) -> IndexMeta:
        """The versions, times and commitlog offsets that the index file of these segments covers; its first version is
        ``from_version``, as versions without segments are covered too."""
        places = [segment.place for segment in self.segments]
        return IndexMeta(
            from_version,
            max(segment.version for segment in self.segments),
            min(segment.begin_ms for segment in self.segments),
            max(segment.end_ms for segment in self.segments),
            min(int(place["min_phys"]) for place in places),
            max(int(place["end_phys"]) for place in places),
        )

    def covered(self) -> Covered:
        """The data objects of these segments, each once, by commitlog offset."""
        places = {segment.key: segment.place for segment in self.segments}
        objects = np.zeros(len(places), COVERED_DTYPE)
        for number, place in enumerate(places.values()):
            objects[number] = (
                number,
                place["tail_crc32c"],
                place["size_bytes"],
                place["tail_bytes"],
                place["min_phys"],
                place["end_phys"],
                place["raw_bytes"],
            )
        keys = tuple(places)
        return Covered(objects[np.argsort(objects["min_phys"], kind="stable")], keys)


def segments_of(page: Page, first: int, last: int) -> list[Segment]:
    """The runs of ``page`` that the catalog versions ``first`` to ``last`` added, as segments: one for each object and
    version."""
    chunk = page.chunk
    versions = chunk.runs["version"]
    runs = picked(chunk.runs, (versions >= first) & (versions <= last))
    runs = picked(runs, np.lexsort((runs["object"], runs["version"])))
    cuts = np.flatnonzero((np.diff(runs["object"]) != 0) | (np.diff(runs["version"]) != 0)) + 1
    return [_segment(page, of_segment) for of_segment in np.split(runs, cuts) if len(of_segment)]


def combined(segments: Sequence[Segment]) -> list[Segment]:
    """``segments``, in which those of one object and version, whose runs were in several pages, are joined."""
    parts: dict[tuple[str, int], list[Segment]] = {}
    for segment in segments:
        parts.setdefault((segment.key, segment.version), []).append(segment)
    return list(map(_union, parts.values()))


def weight(segments: Sequence[Segment]) -> int:
    """What ``segments`` take of memory, counted in runs."""
    return sum(SEGMENT_RUNS + len(segment.runs) for segment in segments)


def oldest(segments: list[Segment], last: int, runs_max: int) -> tuple[list[Segment], int]:
    """Those of ``segments`` that belong to the oldest catalog versions, of a weight of about ``runs_max``, and at least
    all of one version; and the last of these versions, or ``last`` if all segments are taken."""
    if weight(segments) <= runs_max:
        return segments, last
    by_version = sorted(segments, key=attrgetter("version"))
    ends = np.cumsum([weight([segment]) for segment in by_version])
    first_left = by_version[int(np.searchsorted(ends, runs_max, side="right"))]
    last = max(by_version[0].version, first_left.version - 1)
    return [segment for segment in segments if segment.version <= last], last


@dataclass(frozen=True)
class Backlog:
    """Unindexed segments by catalog version, up to ``to_version``, found in the states of one ``identity``."""

    segments: list[Segment] = field(default_factory=list)
    to_version: int = 0
    identity: tuple[object, ...] = ()

    @staticmethod
    def identity_of(state: CatalogState) -> tuple[object, ...]:
        """A value that changes when runs are removed from the archive."""
        return state.log_histories, len(state.tombstones)

    def of(self, state: CatalogState) -> Backlog:
        """What is left of it in ``state``; nothing if runs were removed since, or may have been joined by compaction,
        which it does with runs that no index file covers only while there is no index file at all."""
        if self.identity != self.identity_of(state) or not state.indexes:
            return Backlog()
        left = [segment for segment in self.segments if segment.version > state.indexed_version]
        return replace(self, segments=left)


def _union(parts: Sequence[Segment]) -> Segment:
    """All parts of one object and version as one segment."""
    return replace(
        parts[0],
        runs=concatenated((part.runs for part in parts), RUN_DTYPE),
        begin_ms=min(part.begin_ms for part in parts),
        end_ms=max(part.end_ms for part in parts),
    )


def _segment(page: Page, runs: Table) -> Segment:
    """One segment to be indexed, from its runs in one page."""
    place = page.chunk.objects[int(runs["object"][0])]
    return Segment(
        page.chunk.object_keys[int(place["key"])],
        place,
        runs,
        int(runs["version"][0]),
        int(runs["min_store_timestamp"].min()),
        int(runs["max_store_timestamp"].max()),
    )


def groups_of(segments: Sequence[Segment], rows_max: int, objects_max: int) -> list[Group]:
    """``segments`` in groups, each for one new index file: in the order of catalog versions, which are not divided. A
    new group begins with a day, and where a file would have more rows than ``rows_max`` or objects than
    ``objects_max``."""
    groups: list[Group] = []
    day, rows = -1, 0
    by_version = attrgetter("version")
    for _, same_version in groupby(sorted(segments, key=by_version), key=by_version):
        added = list(same_version)
        added_day = max(segment.end_ms for segment in added) // DAY_MS
        added_rows = sum(int(segment.place["rows"]) for segment in added)
        if (
            not groups
            or added_day != day
            or rows + added_rows > rows_max
            or (len(groups[-1].segments) + len(added) > objects_max)
        ):
            groups.append(Group())
            rows = 0
        groups[-1].segments += added
        day, rows = added_day, rows + added_rows
    return groups


def mergeable(refs: Sequence[IndexRef], apart: Set[str]) -> list[list[IndexRef]]:
    """The index files ``refs``, which are in order, without those whose keys are in ``apart``, as lists of neighbours:
    only neighbours can be merged."""
    neighbours: list[list[IndexRef]] = [[]]
    for ref in refs:
        if ref.key in apart:
            neighbours.append([])
        else:
            neighbours[-1].append(ref)
    return neighbours


def plan_merge(
    refs: Sequence[IndexRef], day_files_max: int, *, is_final: bool = False, now_ms: int = 0
) -> list[IndexRef]:
    """The neighbouring index files that are to be merged into one: all of a day that has ended, or the newest of the
    current day when it has more than ``day_files_max``; empty if none are. ``is_final``: a backfill has ended, at
    ``now_ms``, so that no more files follow."""
    groups = _same_day(refs)
    for group in groups:
        if len(group) < 2:
            continue
        # By the order of files, not by dates: one message from the future would end every later day.
        if group is not groups[-1] or (is_final and (_is_past(group, now_ms) or _worth_it(group))):
            return group
        mergeable_again = _newest_up_to(MERGES_MAX - 1, group)
        if len(mergeable_again) > max(1, day_files_max):
            # Only those that were merged as often as the newest two: so a file is rewritten few times.
            return _newest_up_to(max(ref.level for ref in mergeable_again[-2:]), group)
    return []


def _same_day(refs: Sequence[IndexRef]) -> list[list[IndexRef]]:
    """Neighbouring index files whose newest messages are of the same UTC day: only those are merged."""
    groups: list[list[IndexRef]] = []
    for ref in refs:
        if groups and groups[-1][-1].end_ms // DAY_MS == ref.end_ms // DAY_MS:
            groups[-1].append(ref)
        else:
            groups.append([ref])
    return groups


def _is_past(group: Sequence[IndexRef], now_ms: int) -> bool:
    """Whether the day of the index files ``group`` has ended by the clock: all that the log has of it has been read."""
    return group[-1].end_ms // DAY_MS < now_ms // DAY_MS


def _worth_it(group: Sequence[IndexRef]) -> bool:
    sizes = sorted(ref.size_bytes for ref in group)
    return MERGE_SHARE * sum(sizes[:-1]) >= sizes[-1]


def _newest_up_to(level: int, group: Sequence[IndexRef]) -> list[IndexRef]:
    """The newest files merged at most ``level`` times."""
    begin = len(group)
    while begin and group[begin - 1].level <= level:
        begin -= 1
    return list(group[begin:])
