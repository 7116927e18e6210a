"""Finds archives under a URL, and opens the requested one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiered.catalog.catalog_reader import head_version, read_commit
from tiered.catalog.holdings import holdings, without_commits
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.formats.keys import (
    CATALOG_PREFIX,
    DATA_PREFIX,
    PAGES_PREFIX,
    SETS_PREFIX,
    archive_prefix,
    is_escape,
    unescape,
)
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore


@dataclass(frozen=True)
class Archive:
    """The archive of one broker name; ``store`` is below its prefix."""

    cluster: str
    broker: str
    store: ObjectStore


def list_archives(store: ObjectStore) -> list[tuple[str, str]]:
    """(cluster, broker) of every archive under ``store``, sorted, also of those whose catalog is lost. One or two LISTs
    of one key for each with a catalog."""
    return sorted(_names(store, prefix) for prefix in _prefixes(store))


def find_archive(store: ObjectStore, cluster: str | None = None, broker: str | None = None) -> Archive:
    """The place of the archive with these names; an omitted name must be unique. With both it may be empty.

    Raises NotFoundError when there is none, UsageError listing the choices when there are several.
    """
    if cluster is not None and broker is not None:
        return Archive(cluster, broker, PrefixedStore(store, archive_prefix(cluster, broker)))
    every = list_archives(store)
    fitting = [names for names in every if cluster in (None, names[0]) and broker in (None, names[1])]
    if not fitting:
        wanted = f" of {cluster or '*'}/{broker or '*'}" if cluster is not None or broker is not None else ""
        raise NotFoundError(f"{store.url} holds no archive{wanted}", hint=_known(every))
    if len(fitting) > 1:
        raise UsageError(
            f"{store.url} holds {len(fitting)} archives: {', '.join('/'.join(names) for names in fitting)}",
            hint="choose one with --cluster and --broker",
        )
    return find_archive(store, *fitting[0])


def open_archive(store: ObjectStore, cluster: str | None = None, broker: str | None = None) -> Archive:
    """``find_archive`` for reading. Raises NotFoundError, CatalogLostError, or UnsupportedFormatError too, if there is
    no commit."""
    found = find_archive(store, cluster, broker)
    if not head_version(found.store):
        error = without_commits(found.store)
        if isinstance(error, NotFoundError):
            missing = f"{store.url} holds no archive of {found.cluster}/{found.broker}"
            raise NotFoundError(missing, hint=_known(list_archives(store)))
        raise error
    return found


def _known(every: list[tuple[str, str]]) -> str:
    return f"it holds {', '.join('/'.join(names) for names in every)}" if every else ""


def _prefixes(store: ObjectStore) -> Iterator[str]:
    """Every ``<cluster>/<broker>`` with objects of an archive. Skips all further keys below one."""
    after = ""
    while True:
        info = next(iter(store.list("", start_after=after, limit=1)), None)
        if info is None:
            return
        parts = info.key.split("/")
        prefix = "/".join(parts[:2])
        kinds = (
            (CATALOG_PREFIX, DATA_PREFIX, SETS_PREFIX, PAGES_PREFIX)
            if len(parts) > 2 and all(map(is_escape, parts[:2]))
            else ()
        )
        if any(next(iter(store.list(f"{prefix}/{kind}", limit=1)), None) is not None for kind in kinds):
            yield prefix
        # "0" is the character after "/": the first key that is not below the prefix.
        after = f"{prefix}0" if len(parts) > 2 else info.key


def _names(store: ObjectStore, prefix: str) -> tuple[str, str]:
    """The names of an archive from its prefix; long names are there as a hash, and the archive itself has them."""
    cluster, broker = (unescape(part) for part in prefix.split("/"))
    if cluster is not None and broker is not None:
        return cluster, broker
    archive = PrefixedStore(store, prefix)
    version = head_version(archive)
    place = read_commit(archive, version).place if version else None
    owners = [(place.cluster, place.broker)] if place else holdings(archive).owners
    for names in owners:
        if archive_prefix(*names) == prefix:
            return names
    raise CorruptionError(
        f"{archive.url} holds the archive of {'/'.join(owners[0]) if owners else 'no broker'}"
    )
