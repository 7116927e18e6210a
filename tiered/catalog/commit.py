"""Commits: their content and encoding.

A *draft* is the content; a *commit* is the draft at one version of the chain, with the put id by which its writer
recognises it. apply.py checks commits, catalog_writer.py writes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from tiered.catalog.embedded_pages import PARTS_MAJOR, container_in, with_embedded_pages
from tiered.catalog.index_refs import NO_INDEX_CHANGE, IndexChange, index_ref
from tiered.catalog.json_fields import fields, items, row, text, text_fields, texts, whole
from tiered.catalog.state import (
    NO_CHECK,
    NO_ROOT,
    REMOVED_DTYPE,
    LogCheck,
    Owner,
    PageRef,
    RootRef,
)
from tiered.errors import CorruptionError, TieredError
from tiered.formats.container import Container, decode_container, encode_container
from tiered.formats.keys import parse_part_key
from tiered.formats.queue_names import queue_table
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, OBJECT_DTYPE, QUEUE_DTYPE, RUN_DTYPE, Table
from tiered.object_store.interface import Body

COMMIT_KIND = b"RMQTCMIT"


class CommitKind(StrEnum):
    """Kind of a commit: its allowed author and changes."""

    CLAIM = "claim"
    """Starts the next epoch."""
    APPEND = "append"
    """The owner moves the cursor over a physical range."""
    LOG_HISTORY = "line"
    """The owner starts a new log history; the root page is the state after it."""
    MAINTENANCE = "maintenance"
    """Any actor, in the current epoch: replaces or expires runs, merges pages, changes the index, purges garbage."""
    RELEASE = "release"
    """The owner releases the epoch."""


class CommitInvalidError(TieredError):
    """The commit does not follow from the state; nothing was written. A bug, or superseded by another commit."""


@dataclass(frozen=True)
class PageChange:
    """Runs that a commit moves into pages. ``root`` is the state one version before, or of this version when it starts
    a log history."""

    root: RootRef = NO_ROOT
    spilled_version: int = 0
    """Runs in memory up to this version are now in ``added``."""
    added: Sequence[PageRef] = ()
    removed: Sequence[str] = ()
    resolved_version: int = 0
    """Tombstones up to this version are already applied to ``added``."""
    embedded: Sequence[bytes] = ()
    """Pages inside the commit, consecutive from EMBEDDED_BEGIN. Empty when read back."""


NO_PAGES = PageChange()


@dataclass(frozen=True)
class CommitDraft:
    """The content of a commit. Table columns ``queue`` index ``queues``; ``runs.object`` indexes ``objects``.

    ``queues`` may contain queues without runs. ``kind`` is a CommitKind. ``removed``: runs removed (maintenance).
    ``pending_deletions`` become garbage, ``restored`` ones are used again, ``purged`` ones may be deleted once this is
    committed. A replaced state object becomes garbage automatically.
    """

    kind: str
    history: int = 0
    from_phys: int = 0
    to_phys: int = 0
    check: LogCheck = NO_CHECK
    queues: Sequence[QueueKey] = ()
    runs: Table = field(default_factory=lambda: np.zeros(0, RUN_DTYPE))
    removed: Table = field(default_factory=lambda: np.zeros(0, REMOVED_DTYPE))
    objects: Table = field(default_factory=lambda: np.zeros(0, OBJECT_DTYPE))
    object_keys: Sequence[str] = ()
    gaps: Table = field(default_factory=lambda: np.zeros(0, GAP_DTYPE))
    hide: Sequence[QueueKey] = ()
    unhide: Sequence[QueueKey] = ()
    state_objects: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    pending_deletions: Sequence[str] = ()
    restored: Sequence[str] = ()
    purged: Sequence[str] = ()
    created_ms: int = 0
    owner: Owner | None = None
    common_version: int = 0
    pages: PageChange = NO_PAGES
    index: IndexChange = NO_INDEX_CHANGE


@dataclass(frozen=True)
class CommitPlace:
    """Position of a commit in the chain, and its author. ``root``: the newest root before this commit."""

    version: int
    epoch: int
    predecessor_put_id: str
    actor: str
    cluster: str
    broker: str
    root: RootRef


@dataclass(frozen=True)
class Commit:
    """A draft at its place."""

    draft: CommitDraft
    place: CommitPlace
    put_id: str

    @property
    def version(self) -> int:
        """Its number in the chain, from 1."""
        return self.place.version

    @property
    def root(self) -> RootRef:
        """The root page for readers of this version."""
        return self.draft.pages.root if self.draft.pages.root.key else self.place.root


def encode_commit(draft: CommitDraft, place: CommitPlace, nonce: str) -> tuple[Commit, bytes]:
    """The commit and its container. Equal content, place and ``nonce`` (of a writer process) give the same put id."""
    header, tables = _content(draft, place)
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=12)
    for name, table in tables.items():
        digest.update(name.encode())
        digest.update(table.tobytes())
    for page in draft.pages.embedded:
        digest.update(page)
    put_id = f"{nonce}-{digest.hexdigest()}"
    header["put_id"] = put_id
    major = major_of([draft.pages.root.key, place.root.key, *(page.key for page in draft.pages.added)])
    container = encode_container(COMMIT_KIND, header, tables, major=major)
    return Commit(draft, place, put_id), container


def commit_object(commit: Commit, container: bytes) -> Body:
    """The pieces of the object: the commit's container, with its embedded pages."""
    return with_embedded_pages(COMMIT_KIND, commit.draft.pages.embedded, container)


def major_of(page_keys: Iterable[str]) -> int | None:
    """Major version of an object that refers to these pages; None if programs without embedded pages can read it."""
    return PARTS_MAJOR if any(parse_part_key(key) for key in page_keys) else None


def decode_commit(data: bytes, *, source: str) -> Commit:
    """Check and parse a commit's object, or its end from the container on; raises CorruptionError naming ``source``,
    or UnsupportedFormatError."""
    container = decode_container(
        container_in(data, source=source), COMMIT_KIND, source=source, major_max=PARTS_MAJOR
    )
    header = container.header
    try:
        pages = header["pages"]
        draft = CommitDraft(
            kind=str(CommitKind(text(header["kind"]))),
            history=whole(header["line"]),
            from_phys=whole(header["from_phys"]),
            to_phys=whole(header["to_phys"]),
            check=row(LogCheck, header["check"]),
            queues=queue_keys(container),
            runs=container.table("runs", RUN_DTYPE),
            removed=container.table("removed", REMOVED_DTYPE),
            objects=container.table("objects", OBJECT_DTYPE),
            object_keys=tuple(texts(header["object_keys"])),
            gaps=container.table("gaps", GAP_DTYPE),
            hide=[row(QueueKey, item) for item in items(header["hide"])],
            unhide=[row(QueueKey, item) for item in items(header["unhide"])],
            state_objects=text_fields(header["state_objects"]),
            settings=fields(header["settings"]),
            pending_deletions=texts(header["doomed"]),
            restored=texts(header["undoomed"]),
            purged=texts(header["purged"]),
            created_ms=whole(header["created_ms"]),
            owner=row(Owner, header["owner"]) if header["owner"] else None,
            common_version=whole(header["common_version"]),
            pages=PageChange(
                root=row(RootRef, pages["root"]),
                spilled_version=whole(pages["spilled_version"]),
                added=[row(PageRef, item) for item in items(pages["added"])],
                removed=texts(pages["removed"]),
                resolved_version=whole(pages["resolved_version"]),
            ),
            index=_index_change(header),
        )
        place = CommitPlace(
            version=whole(header["version"]),
            epoch=whole(header["epoch"]),
            predecessor_put_id=text(header["predecessor_put_id"]),
            actor=text(header["actor"]),
            cluster=text(header["cluster"]),
            broker=text(header["broker"]),
            root=row(RootRef, header["root"]),
        )
        commit = Commit(draft, place, text(header["put_id"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{source}: commit does not parse: {error!r}") from error
    check_indexes(draft, source)
    return commit


def check_indexes(draft: CommitDraft, source: str) -> None:
    """Raises CorruptionError unless every index in the tables is inside the table it refers to."""
    for name, table, column, size in (
        ("runs", draft.runs, "queue", len(draft.queues)),
        ("runs", draft.runs, "object", len(draft.objects)),
        ("removed", draft.removed, "queue", len(draft.queues)),
        ("gaps", draft.gaps, "queue", len(draft.queues)),
        ("objects", draft.objects, "key", len(draft.object_keys)),
    ):
        if len(table) and int(table[column].max()) >= size:
            raise CorruptionError(f"{source}: {name}.{column} is outside its table of {size}")


def queue_keys(container: Container) -> list[QueueKey]:
    """The reverse of ``queue_table``, from the header's ``topics``; an index outside them is a ValueError."""
    container.charge_queues()
    topics, table = container.header["topics"], container.table("queues", QUEUE_DTYPE)
    if len(table) and int(table["topic"].max()) >= len(topics):
        raise ValueError("queue table refers to missing topics")
    topics = texts(topics)
    names = [topics[index] for index in table["topic"].tolist()]
    return list(map(QueueKey, names, table["queue_id"].tolist(), table["generation"].tolist()))


def _index_change(header: Mapping[str, Any]) -> IndexChange:
    """Absent in commits of format 1.0."""
    index = header.get("index")
    if index is None:
        return NO_INDEX_CHANGE
    return IndexChange([index_ref(item) for item in items(index["added"])], texts(index["removed"]))


def _content(draft: CommitDraft, place: CommitPlace) -> tuple[dict[str, Any], dict[str, Table]]:
    topics, queues = queue_table(draft.queues)
    pages = draft.pages
    header = {
        "kind": draft.kind, "line": draft.history, "from_phys": draft.from_phys, "to_phys": draft.to_phys,
        "check": draft.check, "topics": topics, "object_keys": list(draft.object_keys),
        "hide": list(draft.hide), "unhide": list(draft.unhide), "state_objects": dict(draft.state_objects),
        "settings": dict(draft.settings), "doomed": list(draft.pending_deletions), "undoomed": list(draft.restored),
        "purged": list(draft.purged), "created_ms": draft.created_ms, "owner": draft.owner,
        "common_version": draft.common_version,
        "pages": {
            "root": pages.root, "spilled_version": pages.spilled_version, "added": list(pages.added),
            "removed": list(pages.removed), "resolved_version": pages.resolved_version,
        },
        "index": {"added": list(draft.index.added), "removed": list(draft.index.removed)},
        "version": place.version, "epoch": place.epoch, "predecessor_put_id": place.predecessor_put_id,
        "actor": place.actor, "cluster": place.cluster, "broker": place.broker, "root": place.root,
    }  # fmt: skip
    tables = {
        "queues": queues, "runs": draft.runs, "removed": draft.removed,
        "objects": draft.objects, "gaps": draft.gaps,
    }  # fmt: skip
    return header, tables
