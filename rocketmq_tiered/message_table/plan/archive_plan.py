"""Plans partitions of archives from options: archives, catalog versions, queues, runs. Reads catalogs only."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing

from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import NEWEST, OLDEST, SourceOptions, View
from rocketmq_tiered.message_table.plan.filled_gaps import Layer
from rocketmq_tiered.message_table.plan.partitions import (
    ArchiveRef,
    OffsetRange,
    Slices,
    by_queue,
    cut,
    lmq_row_bytes,
    slices_of_page,
)
from rocketmq_tiered.message_table.plan.run_ranges import pages_of
from rocketmq_tiered.message_table.plan.superseded_plan import OnExpired, expired, later_layers
from tiered.catalog.archives import Archive, list_archives, open_archive
from tiered.catalog.catalog_reader import head_version, load, read_commit
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_HIDDEN, QUEUE_SUPERSEDED
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore

Names = tuple[str, str]
"""Cluster and broker."""


def opened(options: SourceOptions) -> closing[ObjectStore]:
    """The object store of ``options.path``, as a context manager."""
    return closing(open_store(options.path, options.store_options()))


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
    """The selected archives below the path. Raises NotFoundError if there are none."""
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
            raise NotFoundError(f"{store.url} has no archives")
        names = ", ".join("/".join(names) for names in every)
        raise NotFoundError(f"{store.url} has no archive with these names", hint=f"archives: {names}")
    return selected


def pinned_versions(options: SourceOptions) -> dict[Names, int]:
    """The catalog version to read of each archive: the given one, or the newest now."""
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
    """Partitions of all archives at ``versions``. The same arguments give the same partitions."""
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
    """The last version that was committed at or before ``time_ms``. Raises NotFoundError."""
    low, high = 0, head_version(archive.store)
    while low < high:
        middle = (low + high + 1) // 2
        try:
            is_before = read_commit(archive.store, middle).draft.created_ms <= time_ms
        except NotFoundError:  # gc deletes old commits
            is_before = True
        low, high = (middle, high) if is_before else (low, middle - 1)
    if low == 0:
        raise NotFoundError(
            f"{archive.store.url} has no catalog version at timestampAsOf", hint="use a later time"
        )
    return low


def require_topics(options: SourceOptions, found: Collection[str]) -> None:
    """Raises NotFoundError for a topic or pattern of ``options`` that matches none of ``found``."""
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
    """Check paths, archives, version and topics in the catalogs alone. Raises as ``plan``."""
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
    """The selected queues with their archived offsets. Raises NotFoundError for an unknown queue in the options."""
    found = {}
    for queue, row in state.queues():
        if options.generation is not None:
            is_selected = queue.generation == options.generation
        else:
            is_selected = options.all_generations or not int(row["flags"]) & QUEUE_HIDDEN
        if not options.with_superseded and int(row["flags"]) & QUEUE_SUPERSEDED:
            continue
        if is_selected and options.wants(queue.topic):
            found[queue] = OffsetRange(int(row["min_queue_offset"]), int(row["end_queue_offset"]))
    known = {(queue.topic, queue.queue_id) for queue in found} if options.starts or options.ends else set()
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
    """Slices of ``wanted`` by page, in the catalog's order. Other pages are not read."""
    row_bytes, found = lmq_row_bytes(state.table), {}
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
        """Slices of ``wanted`` at ``state``, even if pages of that version no longer exist.

        Raises NotFoundError for messages that a replaced log took back since, and for expired ones unless
        ``on_expired`` returns.
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
        ref = ArchiveRef(*self._names, state.version)
        return [
            one
            for layer in wanted
            for one in slices(self.run_index, state, ref, layer, predicate, is_header_only=is_header_only)
        ]
