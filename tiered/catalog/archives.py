"""Finds archives under a URL, and opens the requested one."""

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
    """The (cluster, broker) of every archive under ``store``, sorted, also of those whose catalog is lost. Takes one or
    two LISTs of one key for each that has a catalog."""
    return sorted(_names(store, prefix) for prefix in _prefixes(store))


def find_archive(store: ObjectStore, cluster: str | None = None, broker: str | None = None) -> Archive:
    """The archive of this cluster and broker below ``store``. With both names nothing is read, and the archive may be
    empty; if one is omitted, only one archive may fit.

    Raises NotFoundError if none fits, and UsageError, which lists the choices, if several do.
    """
    if cluster is not None and broker is not None:
        return Archive(cluster, broker, PrefixedStore(store, archive_prefix(cluster, broker)))
    existing = list_archives(store)
    fitting = [names for names in existing if cluster in (None, names[0]) and broker in (None, names[1])]
    if not fitting:
        wanted = f" of {cluster or '*'}/{broker or '*'}" if cluster is not None or broker is not None else ""
        raise NotFoundError(f"{store.url} holds no archive{wanted}", hint=_known(existing))
    if len(fitting) > 1:
        raise UsageError(
            f"{store.url} holds {len(fitting)} archives: {', '.join('/'.join(names) for names in fitting)}",
            hint="choose one archive with --cluster and --broker",
        )
    return find_archive(store, *fitting[0])


def open_archive(store: ObjectStore, cluster: str | None = None, broker: str | None = None) -> Archive:
    """The archive with these names, like ``find_archive``, that is to be read. Raises what that raises, and if the
    archive has no commit, NotFoundError, CatalogLostError or UnsupportedFormatError."""
    found = find_archive(store, cluster, broker)
    if not head_version(found.store):
        error = without_commits(found.store)
        if isinstance(error, NotFoundError):
            missing = f"{store.url} holds no archive of {found.cluster}/{found.broker}"
            raise NotFoundError(missing, hint=_known(list_archives(store)))
        raise error
    return found


def _known(existing: list[tuple[str, str]]) -> str:
    """A hint that names the archives ``existing``; empty without any."""
    return f"it holds {', '.join('/'.join(names) for names in existing)}" if existing else ""


def _prefixes(store: ObjectStore) -> Iterator[str]:
    """Every ``<cluster>/<broker>`` of ``store`` below which an archive has objects. Takes a few LISTs of one key for
    each, as all other keys of an archive are skipped."""
    after = ""
    while True:
        info = next(iter(store.list("", start_after=after, limit=1)), None)
        if info is None:
            return
        folders = info.key.split("/")
        is_inside = len(folders) > 2
        prefix = "/".join(folders[:2])
        # Objects of others may be there: an archive's names are escaped, and it has at least one of these folders.
        kinds = (
            (CATALOG_PREFIX, DATA_PREFIX, SETS_PREFIX, PAGES_PREFIX)
            if is_inside and all(map(is_escape, folders[:2]))
            else ()
        )
        if any(next(iter(store.list(f"{prefix}/{kind}", limit=1)), None) is not None for kind in kinds):
            yield prefix
        # "0" is the character after "/": the first key that is not below the prefix.
        after = f"{prefix}0" if is_inside else info.key


def _names(store: ObjectStore, prefix: str) -> tuple[str, str]:
    """The (cluster, broker) of the archive below ``prefix``. A long name is only a hash in the prefix: then it is read
    from the archive's newest commit, or without commits from its objects. Raises CorruptionError if these are of
    another archive."""
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
        f"{archive.url} holds objects of {'/'.join(owners[0]) if owners else 'an unknown broker'}, "
        "whose archive has another prefix"
    )
