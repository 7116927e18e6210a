"""Plans partitions of archives from options: archives, catalog versions, queues, runs. Reads catalogs only."""

from __future__ import annotations

import fnmatch
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from operator import attrgetter

import numpy as np

from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import NEWEST, OLDEST, SourceOptions, View
from rocketmq_tiered.message_table.plan.partitions import (
    ArchiveRef,
    OffsetRange,
    Slices,
    by_queue,
    cut,
    fit,
    lmq_row_bytes,
    slices_of_page,
)
from tiered.catalog.archives import Archive, list_archives, open_archive
from tiered.catalog.catalog_reader import head_version, load, read_commit
from tiered.catalog.pages import Page, RunIndex, sorted_page
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError, SnapshotExpiredError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_HIDDEN, RUN_DTYPE, Table
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore


def pages_of(
    run_index: RunIndex, state: CatalogState, wanted: Mapping[QueueKey, OffsetRange]
) -> Iterator[tuple[int, Page]]:
    """The catalog pages that may list messages of the queues and offsets in ``wanted``, the newest first, each with its
    number in the catalog's order.

    As later commits have higher offsets, older pages are not read for a queue once a page has the begin of its range,
    except for queues with a gap that was filled later. Raises what reading pages raises.
    """
    left = {queue: one.begin for queue, one in wanted.items() if one.begin < one.end}
    names, place = sorted(left), {ref.key: number for number, ref in enumerate(state.pages)}
    if state.memory_runs and names:
        memory = sorted_page(state.queue_keys, state.memory)
        yield len(state.pages), memory
        _drop_reached(state, memory, left, names)
    for sequence in reversed(run_index.sequences(state)):
        for ref in reversed(sequence):
            if bisect_left(names, ref.first) < bisect_right(names, ref.last):
                page = run_index.living(state, run_index.page(ref))
                yield place[ref.key], page
                _drop_reached(state, page, left, names)


def runs_of(run_index: RunIndex, state: CatalogState, wanted: Layer) -> dict[QueueKey, Table]:
    """For each queue in ``wanted``, the runs (rows in one object) with messages of its range, in order of their
    offsets. Raises what ``pages_of`` raises."""
    found: dict[QueueKey, list[Table]] = {queue: [np.zeros(0, RUN_DTYPE)] for queue in wanted}
    for _, page in pages_of(run_index, state, wanted):
        runs = page.chunk.runs
        for number, (begin, end) in enumerate(_spans(page)):
            queue = page.queues[number]
            one = wanted.get(queue)
            if one is not None:
                mine = runs[begin:end]
                inside = (mine["end_queue_offset"] > one.begin) & (mine["base_queue_offset"] < one.end)
                found[queue].append(mine[inside])
    tables = {queue: np.concatenate(parts) for queue, parts in found.items()}
    return {queue: runs[np.argsort(runs["base_queue_offset"])] for queue, runs in tables.items()}


def _drop_reached(state: CatalogState, page: Page, left: dict[QueueKey, int], names: list[QueueKey]) -> None:
    """Remove from ``left`` and ``names`` the queues for which no older page has to be read, because ``page`` reaches
    down to the begin of their range."""
    runs, queues = page.chunk.runs, list(page.queues)
    present, first = np.unique(runs["queue"], return_index=True)
    for number, base in zip(present.tolist(), runs["base_queue_offset"][first].tolist(), strict=True):
        queue = queues[number]
        if queue in left and base <= left[queue]:
            row = state.row_of(queue)
            if row is not None and state.is_ordered(row):
                del left[queue]
                names.pop(bisect_left(names, queue))


def _spans(page: Page) -> list[tuple[int, int]]:
    """Where the runs of each queue begin and end."""
    cuts = np.searchsorted(page.chunk.runs["queue"], np.arange(len(page.queues) + 1)).tolist()
    return list(pairwise(cuts))


OnExpired = Callable[[QueueKey, OffsetRange], None]
"""Called with offsets of a queue that have expired: raises an error, or returns, and they are skipped."""
PLAN_AGAIN = "run the job again at the newest version"


def later_layers(
    store: ObjectStore,
    before: CatalogState,
    newest: CatalogState,
    wanted: Iterable[Layer],
    on_expired: OnExpired,
) -> list[Layer]:
    """The ranges that hold at catalog version ``newest`` the messages that ``wanted`` held at the earlier version
    ``before``. Messages that fill a gap of ``before`` are excluded. ``on_expired`` is called with the messages that
    have expired since.

    Raises NotFoundError for messages that are no longer in the archive because the broker's log was replaced, and what
    ``on_expired`` raises.
    """
    gaps, ends = gaps_in(before), KeptEnds(store, newest, before.version)
    pieces: dict[QueueKey, list[OffsetRange]] = {}
    for layer in wanted:
        for queue, one in layer.items():
            found = list(without(one, gaps.get(queue, ())))
            if not found:
                continue
            row = newest.queue(queue)
            floor = found[-1].end if row is None else int(row["min_queue_offset"])
            if found[0].begin < floor:
                on_expired(queue, OffsetRange(found[0].begin, min(floor, found[-1].end)))
                found = [
                    OffsetRange(max(piece.begin, floor), piece.end) for piece in found if piece.end > floor
                ]
            if found and found[-1].end > ends.of(queue):
                raise taken_back(queue, found[-1].end, before.version)
            pieces.setdefault(queue, []).extend(found)
    return list(layers(pieces))


class KeptEnds:
    """The offsets up to which queues have the same messages at ``newest`` as at ``version``."""

    def __init__(self, store: ObjectStore, newest: CatalogState, version: int) -> None:
        self.newest = newest
        self._commons = [
            load(store, version=history.common_version)
            for history in newest.log_histories
            if history.version > version and history.common_version > 0
        ]

    def of(self, queue: QueueKey) -> int:
        """The end of the common messages of ``queue``."""
        return min(_end(state, queue) for state in (self.newest, *self._commons))

    def before_divergence(self, queue: QueueKey) -> int | None:
        """The end of ``queue`` at the earliest divergence of the log since ``version``; None without one."""
        return min((_end(state, queue) for state in self._commons), default=None)


def _end(state: CatalogState, queue: QueueKey) -> int:
    row = state.queue(queue)
    return 0 if row is None else max(0, int(row["end_queue_offset"]))


def taken_back(queue: QueueKey, end: int, version: int) -> NotFoundError:
    """The error for messages of a log that was replaced."""
    return NotFoundError(
        f"{queue}: messages before offset {end} were superseded by a replaced log after catalog version {version}",
        hint=PLAN_AGAIN,
    )


def expired(queue: QueueKey, offsets: OffsetRange, version: int) -> SnapshotExpiredError:
    """The error for messages that retention deleted."""
    return SnapshotExpiredError(
        f"{queue}: offsets [{offsets.begin}, {offsets.end}) have expired since catalog version {version}",
        hint=PLAN_AGAIN,
    )


Gaps = Mapping[QueueKey, Sequence[OffsetRange]]
"""Ascending disjoint gaps, of the queues that have any."""
Layer = dict[QueueKey, OffsetRange]
"""One range for each of some queues."""
VERSIONS_KEPT = 8


def gaps_in(state: CatalogState) -> Gaps:
    """The recorded gaps of each queue, as ranges of offsets."""
    return gaps_by_queue(
        (state.key_of(queue), OffsetRange(begin, end))
        for queue, begin, end in zip(
            state.gaps["queue"].tolist(),
            state.gaps["begin_queue_offset"].tolist(),
            state.gaps["end_queue_offset"].tolist(),
            strict=True,
        )
    )


def gaps_by_queue(gaps: Iterable[tuple[QueueKey, OffsetRange]]) -> Gaps:
    """``gaps``, in any order, as Gaps."""
    found: dict[QueueKey, list[OffsetRange]] = {}
    for queue, gap in gaps:
        found.setdefault(queue, []).append(gap)
    return {queue: sorted(mine, key=lambda gap: gap.begin) for queue, mine in found.items()}


def filled(state: CatalogState, gaps: Gaps, within: Mapping[QueueKey, OffsetRange]) -> list[Layer]:
    """The offsets of earlier ``gaps`` that have messages at catalog version ``state``, because the gaps were filled
    since. Only offsets inside ``within`` that have not expired are returned."""
    if not gaps:
        return []
    now = gaps_in(state)
    pieces: dict[QueueKey, list[OffsetRange]] = {}
    for queue, before in gaps.items():
        row, limits = state.queue(queue), within.get(queue)
        if row is None or limits is None:
            continue
        low = max(limits.begin, int(row["min_queue_offset"]))
        pieces[queue] = [
            piece
            for gap in before
            for piece in without(
                OffsetRange(max(gap.begin, low), min(gap.end, limits.end)), now.get(queue, ())
            )
        ]
    return list(layers(pieces))


def without(wanted: OffsetRange, gaps: Sequence[OffsetRange]) -> Iterator[OffsetRange]:
    """The parts of the range ``wanted`` that lie in none of ``gaps``, which are ascending and do not overlap."""
    begin = wanted.begin
    for number in range(bisect_right(gaps, begin, key=attrgetter("end")), len(gaps)):
        gap = gaps[number]
        if gap.begin >= wanted.end:
            break
        if begin < gap.begin:
            yield OffsetRange(begin, gap.begin)
        begin = gap.end
    if begin < wanted.end:
        yield OffsetRange(begin, wanted.end)


def layers(pieces: Mapping[QueueKey, Sequence[OffsetRange]]) -> Iterator[Layer]:
    """The ranges of all queues, one range of each queue at a time."""
    for number in range(max(map(len, pieces.values()), default=0)):
        yield {queue: ranges[number] for queue, ranges in pieces.items() if number < len(ranges)}


class GapsByVersion:
    """Caches the gaps of the latest versions of one archive. A stream needs those of the version it has reached, whose
    state would have to be loaded again."""

    def __init__(self, load: Callable[[int], CatalogState]) -> None:
        self._load = load
        self._cached: Lru[int, Gaps] = Lru(VERSIONS_KEPT)

    def add(self, state: CatalogState) -> None:
        """Cache the gaps of ``state``."""
        if self._cached.get(state.version) is None:
            self._cached.add(state.version, gaps_in(state))

    def at(self, version: int) -> Gaps:
        """The gaps of ``version``. Raises what loading it raises."""
        found = self._cached.get(version)
        if found is None:
            found = gaps_in(self._load(version))
            self._cached.add(version, found)
        return found


Names = tuple[str, str]
"""Cluster and broker."""


def opened(options: SourceOptions) -> closing[ObjectStore]:
    """The object store of ``options.path``, as a context manager."""
    return closing(open_store(options.path, options.store))


def archive_store(root: ObjectStore, cluster: str, broker: str) -> ObjectStore:
    """The store of one archive in ``root``."""
    return PrefixedStore(root, archive_prefix(cluster, broker))


def states_at(
    root: ObjectStore, versions: Mapping[Names, int]
) -> Iterator[tuple[Names, ObjectStore, CatalogState]]:
    """(names, store, catalog state) of each archive at its version."""
    for names, version in sorted(versions.items()):
        archive = archive_store(root, *names)
        yield names, archive, load(archive, version=version)


def archives(store: ObjectStore, options: SourceOptions) -> list[Archive]:
    """The archives at the source's path that its options select. Raises NotFoundError if there are none, and then names
    those that are there."""
    if options.cluster is not None and options.broker is not None:
        return [open_archive(store, options.cluster, options.broker)]
    every = list_archives(store)
    selected = [
        Archive(cluster, broker, archive_store(store, cluster, broker))
        for cluster, broker in every
        if options.wants_archive(cluster, broker)
    ]
    if not selected:
        if not every:
            raise NotFoundError(
                f"{store.url} has no archives", hint="give the URL that archive.url has for tiered run"
            )
        names = ", ".join("/".join(names) for names in every)
        raise NotFoundError(
            f"{store.url} has no archive of that cluster and broker",
            hint=f"archives: {names}",
        )
    return selected


def pinned_versions(options: SourceOptions) -> dict[Names, int]:
    """For each archive the catalog version to read: the one that the options give, or else the newest at present."""
    with opened(options) as store:
        found = archives(store, options)
        if options.version_ms is not None:
            return {(one.cluster, one.broker): _version_at(one, options.version_ms) for one in found}
        if options.version is not None:
            if len(found) > 1:
                raise UsageError(
                    f"version {options.version} applies to one archive, but the path has {len(found)}",
                    hint="select one with cluster and broker",
                )
            newest = head_version(found[0].store)
            if options.version > newest:
                raise NotFoundError(
                    f"{found[0].store.url} has no catalog version {options.version}",
                    hint=f"the newest version is {newest}",
                )
            return {(found[0].cluster, found[0].broker): options.version}
        return {(one.cluster, one.broker): head_version(one.store) for one in found}


def plan(
    options: SourceOptions, versions: Mapping[Names, int], predicate: Predicate, *, is_header_only: bool
) -> list[Slices]:
    """Plan a read of all selected archives at ``versions``: partitions that Spark's tasks or a scan read independently.
    The same arguments give the same partitions."""
    parts: list[Slices] = []
    topics: set[str] = set()
    with opened(options) as store:
        for names, archive, state in states_at(store, versions):
            wanted = wanted_queues(state, options)
            topics |= {queue.topic for queue in wanted}
            parts += ArchivePlanner(archive, names).slices(
                state, [wanted], predicate, is_header_only=is_header_only
            )
    require_topics(options, topics)
    return cut_for(options, parts)


def cut_for(options: SourceOptions, parts: Sequence[Slices]) -> list[Slices]:
    """Partitions of ``parts``. Views of the last message of each key have one for each queue."""
    return cut(parts, options.partition_bytes) if options.view is View.MESSAGES else by_queue(parts)


def _version_at(archive: Archive, time_ms: int) -> int:
    """The newest catalog version that was committed at or before ``time_ms``, found by a binary search. Raises
    NotFoundError if there is none."""
    low, high = 0, head_version(archive.store)
    while low < high:
        middle = (low + high + 1) // 2
        try:
            is_before = read_commit(archive.store, middle).draft.created_ms <= time_ms
        except NotFoundError:  # garbage collection has deleted this commit, so it is old
            is_before = True
        low, high = (middle, high) if is_before else (low, middle - 1)
    if low == 0:
        raise NotFoundError(
            f"{archive.store.url} has no catalog version as old as timestampAsOf", hint="use a later time"
        )
    return low


def require_topics(options: SourceOptions, found: Collection[str]) -> None:
    """Raise NotFoundError for a topic name or pattern in the options that matches none of the topics ``found``."""
    for topic in options.topics:
        if not any(fnmatch.fnmatchcase(one, topic) for one in found):
            what = "topic that matches" if set("*?[") & set(topic) else "topic"
            raise NotFoundError(f"{options.path} has no {what} {topic}", hint="tiered ls lists topics")
    if options.topic_regex and not any(map(options.wants, found)):
        raise NotFoundError(
            f"{options.path} has no topic that matches subscribePattern {options.topic_regex}",
            hint="tiered ls lists topics",
        )


def check_archives(options: SourceOptions) -> None:
    """Check that the paths, archives, version and topics of the options exist, by the catalogs alone. Raises what
    ``plan`` raises."""
    for one in options.each_path():
        versions = pinned_versions(one)
        with opened(one) as store:
            topics = {
                queue.topic
                for _, _, state in states_at(store, versions)
                for queue in wanted_queues(state, one)
            }
        require_topics(one, topics)


def wanted_queues(state: CatalogState, options: SourceOptions) -> Layer:
    """The queues that the options select, each with the range of offsets to read. Raises NotFoundError if the options
    give offsets for a queue that the archive does not have."""
    if options.generation is not None:
        selected = state.table["generation"] == options.generation
    else:
        selected = (state.table["flags"] & QUEUE_HIDDEN == 0) | options.all_generations
    rows = np.flatnonzero(selected)
    offsets = (state.table[name][rows].tolist() for name in ("min_queue_offset", "end_queue_offset"))
    ranges = zip(state.queue_keys.taken(rows), map(OffsetRange, *offsets), strict=True)
    found = {queue: one for queue, one in ranges if options.wants(queue.topic)}
    if not options.starts and not options.ends:
        return found
    known = {(queue.topic, queue.queue_id) for queue in found}
    for topic, queue_id in (*options.starts, *options.ends):
        if (topic, queue_id) not in known:
            raise NotFoundError(
                f"{options.path} has no queue {queue_id} of topic {topic}", hint="tiered ls lists the queues"
            )
    return {queue: _limited(queue, one, options) for queue, one in found.items()}


def _limited(queue: QueueKey, one: OffsetRange, options: SourceOptions) -> OffsetRange:
    """The offsets from startingOffsets on and below endingOffsets."""
    place = queue.topic, queue.queue_id
    begin, end = options.starts.get(place, OLDEST), options.ends.get(place, NEWEST)
    low, high = ({NEWEST: one.end, OLDEST: one.begin}.get(offset, offset) for offset in (begin, end))
    high = min(max(high, one.begin), one.end)
    return OffsetRange(min(max(low, one.begin), high), high)


def slices(
    run_index: RunIndex,
    state: CatalogState,
    archive: ArchiveRef,
    wanted: dict[QueueKey, OffsetRange],
    predicate: Predicate,
    *,
    is_header_only: bool,
) -> list[Slices]:
    """What has to be read for the offsets ``wanted`` of each queue: the parts of runs, grouped by catalog page. Only
    pages that may list such runs are read."""
    row_bytes, found, wanted = lmq_row_bytes(state.table), {}, fit(wanted, predicate)
    for place, page in pages_of(run_index, state, wanted):
        found[place] = slices_of_page(
            archive, page, wanted, predicate, is_header_only=is_header_only, lmq_row_bytes=row_bytes
        )
    return [one for _, one in sorted(found.items()) if one is not None]


class ArchivePlanner:
    """Plans from one archive, at any version. Caches pages of runs."""

    def __init__(self, store: ObjectStore, names: Names) -> None:
        self._store = store
        self._names = names
        self.run_index = RunIndex(store)

    def slices(
        self,
        state: CatalogState,
        wanted: Sequence[Layer],
        predicate: Predicate,
        *,
        is_header_only: bool,
        on_expired: OnExpired | None = None,
    ) -> list[Slices]:
        """What has to be read for ``wanted`` at catalog version ``state``. If pages of that version no longer exist,
        the same messages are looked up at the newest version.

        Raises NotFoundError for messages that are no longer in the archive because the broker's log was replaced, and
        for expired ones unless ``on_expired`` is given and returns.
        """
        try:
            return self._slices(state, wanted, predicate, is_header_only)
        except NotFoundError:
            newest = load(self._store)
            if newest.version == state.version:
                raise

        def refuse(queue: QueueKey, offsets: OffsetRange) -> None:
            raise expired(queue, offsets, state.version)

        later = later_layers(self._store, state, newest, wanted, on_expired or refuse)
        return self._slices(newest, later, predicate, is_header_only)

    def _slices(
        self, state: CatalogState, wanted: Sequence[Layer], predicate: Predicate, is_header_only: bool
    ) -> list[Slices]:
        """What has to be read at one catalog version: parts of the runs that hold the offsets of each layer (a range
        for each queue) and may have rows that match the predicate."""
        ref = ArchiveRef(*self._names, state.version)
        return [
            one
            for layer in wanted
            for one in slices(self.run_index, state, ref, layer, predicate, is_header_only=is_header_only)
        ]
