"""Verifies the small objects that the catalog names: roots, deletion lists, tables of the broker."""

from __future__ import annotations

from collections.abc import Iterator

from tiered.archive.verify_report import VerifyReport
from tiered.archive.verify_segment import AnomalyKind
from tiered.catalog.catalog_reader import read_root
from tiered.catalog.deletions import read_list
from tiered.catalog.garbage import KeySet
from tiered.catalog.page_bytes import read_page_bytes
from tiered.catalog.snapshot import decode_root
from tiered.catalog.state import CatalogState, RootRef
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.memory_bound import stored_bytes_max
from tiered.formats.state_object import decode_state
from tiered.object_store.interface import ObjectStore


def check_catalog_objects(store: ObjectStore, state: CatalogState, report: VerifyReport) -> None:
    """All roots: readers do without a damaged one, so that only this check reports it."""
    begins = (RootRef(history.root, history.version) for history in state.log_histories)
    newest = state.unread_root if state.unread_root.key else state.root
    for root in dict.fromkeys((newest, *state.kept_roots, *begins)):
        check_root(store, root, report)
    for history in state.log_histories:
        if history.hidden:
            check_root(store, RootRef(history.hidden, 0), report)


def check_root(store: ObjectStore, root: RootRef, report: VerifyReport) -> None:
    """One root; of version 0: any version."""
    if not root.key:
        return
    try:
        if root.version:
            read_root(store, root)
        else:
            decode_root(read_page_bytes(store, root.key), source=root.key)
    except NotFoundError:
        return  # reported with everything else that is named and does not exist
    except CorruptionError as error:
        report.add(AnomalyKind.ROOT, root.key, error.message)


def pending_of(store: ObjectStore, state: CatalogState, report: VerifyReport) -> KeySet:
    """Keys of all pending deletions; damaged lists of them are reported."""

    def keys() -> Iterator[str]:
        yield from state.pending_deletions
        for listed in state.deletion_lists:
            try:
                yield from read_list(store, listed)
            except NotFoundError:
                continue  # as above
            except CorruptionError as error:
                report.add(AnomalyKind.DELETIONS, listed.key, error.message)

    return KeySet(keys())


def check_state_objects(store: ObjectStore, state: CatalogState, report: VerifyReport) -> None:
    """The broker's tables, which archive mode needs. They are few and small."""
    for name, key in sorted(state.state_objects.items()):
        try:
            decode_state(store.get(key, stored_bytes_max()), name, source=key)
        except NotFoundError:
            continue  # as above
        except CorruptionError as error:
            report.add(AnomalyKind.DAMAGED, key, error.message)
