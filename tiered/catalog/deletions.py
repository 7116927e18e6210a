"""Pending deletions: objects that no state references any more, and lists of them in objects of their own.

Recent ones are part of the state. When there are many of one reason, they move into a list, so that roots stay small.
A list is collected as a whole, when the grace period of its newest entry is over.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from tiered.catalog.json_fields import texts
from tiered.catalog.page_bytes import read_page_bytes
from tiered.errors import CorruptionError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.memory_bound import LARGE
from tiered.object_store.interface import ObjectStore

LIST_KIND = b"RMQTDELS"
KEPT_MS = 1 << 62
"""``since_ms`` of an object that is kept: a time so late that its grace period never ends."""
ENTRY_DTYPE = np.dtype([("since_ms", "<i8"), ("version", "<i8")])


class Reason(StrEnum):
    """Why an object is garbage. It decides the grace period."""

    ABANDONED = "abandoned"
    """An upload attempt that no commit named."""
    REPLACED = "replaced"
    """A root, page, index file or table of the broker that a newer one replaces."""
    COMPACTED = "compacted"
    """Its messages are in a larger object."""
    EXPIRED = "expired"
    """All its messages expired."""
    DIVERGED = "diverged"
    """Its messages are not in the broker's log any more: the log was truncated or replaced."""
    QUARANTINE = "quarantine"
    """A repair has not used it: damaged, or its messages differ from others at the same offsets. Kept."""
    UNEXPLAINED = "unexplained"
    """Garbage collection does not know what its messages are. Kept, and judged again at each collection."""
    INTENT = "intent"
    """The output of a compaction in progress."""


class PendingDeletion(NamedTuple):
    """When, by which version and why an object became garbage."""

    since_ms: int
    version: int
    reason: str


class DeletionList(NamedTuple):
    """A list of ``entries`` pending deletions of one reason; ``version`` and the times are of its newest and oldest."""

    key: str
    reason: str
    entries: int
    version: int
    oldest_ms: int
    newest_ms: int
    size_bytes: int


@dataclass(frozen=True)
class DeletionChange:
    """What a commit changes in the lists of pending deletions. ``spilled``: lists that take over the state's entries of
    their reason up to their version. ``added``: lists of objects that become garbage with this commit. ``removed``:
    keys of lists that are collected, or replaced by ``added``."""

    spilled: Sequence[DeletionList] = ()
    added: Sequence[DeletionList] = ()
    removed: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.spilled or self.added or self.removed)


NO_DELETION_CHANGE = DeletionChange()


def encode_list(entries: Mapping[str, PendingDeletion]) -> bytes:
    """``entries``, by key of the object to be deleted, as the bytes of a list's object."""
    keys = sorted(entries)
    table = np.zeros(len(keys), ENTRY_DTYPE)
    for name in ENTRY_DTYPE.names or ():
        table[name] = [getattr(entries[key], name) for key in keys]
    return encode_container(LIST_KIND, {"keys": keys}, {"entries": table}, is_packed=True)


def list_of(key: str, entries: Mapping[str, PendingDeletion], size_bytes: int) -> DeletionList:
    """The catalog's entry for the list with ``entries``, which all have the same reason, in the object ``key``."""
    (reason,) = {pending.reason for pending in entries.values()}
    times = [pending.since_ms for pending in entries.values()]
    version = max(pending.version for pending in entries.values())
    return DeletionList(key, reason, len(entries), version, min(times), max(times), size_bytes)


def read_list(store: ObjectStore, listed: DeletionList) -> dict[str, PendingDeletion]:
    """The entries of one list. Raises CorruptionError, NotFoundError, or what the store raises."""
    return decode_list(read_page_bytes(store, listed.key), listed, source=f"{store.url}/{listed.key}")


def decode_list(data: bytes, listed: DeletionList, *, source: str) -> dict[str, PendingDeletion]:
    """The entries of ``listed``, whose object is ``data``. Raises CorruptionError that names ``source``."""
    container = decode_container(data, LIST_KIND, source=source, allowance=LARGE)
    try:
        keys, table = texts(container.header["keys"]), container.table("entries", ENTRY_DTYPE)
        if not len(keys) == len(table) == listed.entries:
            raise ValueError(
                f"the list has {len(keys)} keys and {len(table)} entries, but the catalog names {listed.entries}"
            )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{source}: this list of pending deletions is damaged: {error!r}") from error
    return {
        key: PendingDeletion(since_ms, version, listed.reason)
        for key, since_ms, version in zip(
            keys, table["since_ms"].tolist(), table["version"].tolist(), strict=True
        )
    }


def due_to_spill(pending: Mapping[str, PendingDeletion], count_min: int) -> list[dict[str, PendingDeletion]]:
    """The pending deletions that move out of the state, into a list for each reason that has at least ``count_min``.

    Announced outputs of compactions stay, as most are taken back soon, and so do unexplained objects, which each
    garbage collection judges again."""
    by_reason: dict[str, dict[str, PendingDeletion]] = {}
    for key, entry in pending.items():
        if entry.reason not in (Reason.INTENT, Reason.UNEXPLAINED):
            by_reason.setdefault(entry.reason, {})[key] = entry
    return [entries for entries in by_reason.values() if len(entries) >= count_min]


def after_change(
    pending: Mapping[str, PendingDeletion], lists: Iterable[DeletionList], change: DeletionChange
) -> tuple[dict[str, PendingDeletion], tuple[DeletionList, ...]]:
    """The pending deletions of a state, recent ones by key and ``lists`` of others, after a commit with ``change``.
    Raises ValueError if it removes an unknown list, or a list has other entries than those that move into it."""
    lists, removed = tuple(lists), set(change.removed)
    unknown = removed - {listed.key for listed in lists}
    if unknown:
        raise ValueError(
            f"it removes the list of pending deletions {sorted(unknown)[0]}, which the catalog does not have"
        )
    recent = dict(pending)
    for listed in change.spilled:
        spilled = [
            key
            for key, entry in recent.items()
            if entry.reason == listed.reason and entry.version <= listed.version
        ]
        if len(spilled) != listed.entries:
            raise ValueError(
                f"the list {listed.key} has {listed.entries} pending deletions, but the catalog has {len(spilled)} "
                f"with its reason, {listed.reason}, that may move into it"
            )
        for key in spilled:
            del recent[key]
    kept = (listed for listed in lists if listed.key not in removed)
    return recent, (*kept, *change.spilled, *change.added)
