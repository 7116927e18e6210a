"""Plans partitions of archives from options: archives, catalog versions, queues, runs. Reads catalogs only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing

from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.filled_gaps import Layer
from rocketmq_tiered.message_table.plan.partitions import (
    ArchiveRef,
    OffsetRange,
    Slices,
    cut,
    lmq_row_bytes,
    slices_of_page,
)
from rocketmq_tiered.message_table.plan.run_ranges import pages_of
from rocketmq_tiered.message_table.plan.superseded_plan import OnExpired, expired, later_layers
from tiered.catalog.archives import Archive, list_archives, open_archive
from tiered.catalog.catalog_reader import head_version, load
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
    return cut(parts, options.partition_bytes)


def require_topics(options: SourceOptions, found: Collection[str]) -> None:
    """Raises NotFoundError for a topic of the options that is no pattern and not in ``found``."""
    for topic in options.topics:
        if not set("*?[") & set(topic) and topic not in found:
            raise NotFoundError(f"{options.path} has no topic {topic}", hint="tiered ls lists topics")


def wanted_queues(state: CatalogState, options: SourceOptions) -> Layer:
    """The selected queues with their archived offsets."""
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
    return found


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
