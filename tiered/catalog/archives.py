"""Finds archives under a URL, and opens the requested one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiered.catalog.catalog_reader import head_version, read_commit
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.formats.keys import CATALOG_PREFIX, archive_prefix, unescape
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore


@dataclass(frozen=True)
class Archive:
    """The archive of one broker name; ``store`` is below its prefix."""

    cluster: str
    broker: str
    store: ObjectStore


def list_archives(store: ObjectStore) -> list[tuple[str, str]]:
    """(cluster, broker) of every archive under ``store``, sorted. One or two LISTs of one key for each."""
    return sorted(_names(store, prefix) for prefix in _prefixes(store))


def open_archive(store: ObjectStore, cluster: str | None = None, broker: str | None = None) -> Archive:
    """The archive with these names; an omitted name must be unique.

    Raises NotFoundError when there is none, UsageError listing the choices when there are several.
    """
    if cluster is not None and broker is not None:
        found = Archive(cluster, broker, PrefixedStore(store, archive_prefix(cluster, broker)))
        if head_version(found.store) == 0:
            raise NotFoundError(
                f"{store.url} holds no archive of {cluster}/{broker}", hint=_known(list_archives(store))
            )
        return found
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
    ((cluster, broker),) = fitting
    return Archive(cluster, broker, PrefixedStore(store, archive_prefix(cluster, broker)))


def _known(every: list[tuple[str, str]]) -> str:
    return f"it holds {', '.join('/'.join(names) for names in every)}" if every else ""


def _prefixes(store: ObjectStore) -> Iterator[str]:
    """Every ``<cluster>/<broker>`` with a catalog. Skips all further keys below one."""
    after = ""
    while True:
        info = next(iter(store.list("", start_after=after, limit=1)), None)
        if info is None:
            return
        parts = info.key.split("/")
        prefix = "/".join(parts[:2])
        if len(parts) > 2 and next(iter(store.list(f"{prefix}/{CATALOG_PREFIX}", limit=1)), None) is not None:
            yield prefix
        # "0" is the character after "/": the first key that is not below the prefix.
        after = f"{prefix}0" if len(parts) > 2 else info.key


def _names(store: ObjectStore, prefix: str) -> tuple[str, str]:
    cluster, broker = (unescape(part) for part in prefix.split("/"))
    if cluster is not None and broker is not None:
        return cluster, broker
    archive = PrefixedStore(store, prefix)
    place = read_commit(archive, head_version(archive)).place
    if archive_prefix(place.cluster, place.broker) != prefix:
        raise CorruptionError(f"{archive.url} holds the archive of {place.cluster}/{place.broker}")
    return place.cluster, place.broker
