"""Commits and root pages: their content and encoding.

A *draft* is the content; a *commit* is the draft at one version of the chain, with the put id by which its writer
recognises it. apply.py checks commits, catalog_writer.py writes them.

A *root page* is the whole state at one version as bytes, from which a reader starts. That of a state that starts a log
history lacks the state's put id: its commit, which is encoded later, names the page and has the put id.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from tiered.catalog.deletions import NO_DELETION_CHANGE, DeletionChange, DeletionList, PendingDeletion, Reason
from tiered.catalog.index_refs import NO_INDEX_CHANGE, IndexChange, index_ref
from tiered.catalog.json_fields import fields, items, row, text, text_fields, texts, whole
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.state import (
    NO_CHECK,
    NO_ROOT,
    REMOVED_DTYPE,
    CatalogState,
    LogCheck,
    LogCursor,
    LogHistory,
    Owner,
    PageRef,
    RootRef,
    RunChunk,
)
from tiered.catalog.timer_refs import TIMER_DTYPE, TimerRef, timer_refs, timer_table
from tiered.errors import CorruptionError, TieredError, UnsupportedFormatError
from tiered.formats.container import Container, decode_container, encode_container
from tiered.formats.memory_bound import LARGE
from tiered.formats.queue_names import queues_of
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import selection_of
from tiered.model.tables import (
    FLOOR_DTYPE,
    GAP_DTYPE,
    OBJECT_DTYPE,
    QUEUE_DTYPE,
    QUEUE_STATE_DTYPE,
    RUN_DTYPE,
    RunKind,
    Table,
)

COMMIT_KIND = b"RMQTCMIT"
_TABLES = {"queues", "runs", "removed", "objects", "gaps", "floors", "timers"}


class CommitKind(StrEnum):
    """Kind of a commit: its allowed author and changes."""

    CLAIM = "claim"
    """Starts the next epoch."""
    APPEND = "append"
    """The owner moves the cursor over a physical range."""
    LOG_HISTORY = "log_history"
    """The owner starts a new log history; the root page is the state after it."""
    MAINTENANCE = "maintenance"
    """Any actor, in the current epoch: replaces or expires runs, merges pages, changes the index, purges garbage."""
    REPAIR = "repair"
    """The whole state after a repair, in a root page; its version and epoch are above all others."""
    RELEASE = "release"
    """The owner releases the epoch."""


class CommitInvalidError(TieredError):
    """The commit may not follow the state; nothing was written. Another commit was made first, or it is a bug."""


@dataclass(frozen=True)
class PageChange:
    """What a commit changes in the pages of the catalog. ``root``: a new root page, of the state one version before, or
    of this version if the commit starts a log history. ``added`` pages take the place of ``removed`` ones, by key."""

    root: RootRef = NO_ROOT
    spilled_version: int = 0
    """The runs that versions up to this one added, and that were in no page, are now in ``added``."""
    added: Sequence[PageRef] = ()
    removed: Sequence[str] = ()
    resolved_version: int = 0
    """``added`` does not have the runs that versions up to this one removed."""


NO_PAGES = PageChange()


@dataclass(frozen=True)
class CommitDraft:
    """The content of a commit. Table columns ``queue`` index ``queues``; ``runs.object`` indexes ``objects``.

    ``kind`` is a CommitKind. ``queues`` may contain queues without runs. ``removed``: runs that maintenance removes.
    ``floors``: new minimum offsets, below which runs expire. Keys of objects: ``pending_deletions`` become garbage, for
    ``reason``; ``restored`` ones are used again; ``purged`` ones may be deleted once this is committed. ``deletions``
    changes the lists of pending deletions. A replaced state object becomes garbage automatically.
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
    reason: str = Reason.ABANDONED
    floors: Table = field(default_factory=lambda: np.zeros(0, FLOOR_DTYPE))
    deletions: DeletionChange = NO_DELETION_CHANGE
    created_ms: int = 0
    owner: Owner | None = None
    common_version: int = 0
    pages: PageChange = NO_PAGES
    index: IndexChange = NO_INDEX_CHANGE
    timers: Sequence[TimerRef] = ()
    """New objects with timers, and others with new progress, of which those that are done are removed."""


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
    kept_root: RootRef = NO_ROOT
    """The newest of the older root pages that are kept, for readers that no longer find ``root``."""


@dataclass(frozen=True)
class Commit:
    """A draft at its place in the chain. ``put_id`` identifies this very commit: another writer's commit of the same
    version has another one."""

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
    """The commit of ``draft`` at ``place`` and the bytes of its object. The put id, by which a writer recognises its
    own commit, is a digest of all this and of ``nonce``, which is unique to the writer."""
    header, tables = _content(draft, place)
    digest = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=12)
    for name, table in tables.items():
        digest.update(name.encode())
        digest.update(table.tobytes())
    put_id = f"{nonce}-{digest.hexdigest()}"
    header["put_id"] = put_id
    return Commit(draft, place, put_id), encode_container(COMMIT_KIND, header, tables, is_packed=True)


def decode_commit(data: bytes, *, source: str) -> Commit:
    """The commit whose object is ``data``. Raises CorruptionError, which names the object ``source``, if anything of it
    is damaged, and UnsupportedFormatError."""
    container = decode_container(data, COMMIT_KIND, source=source)
    header = container.header
    refuse_unknown(container, header.get("kind"), source)
    try:
        pages = header["pages"]
        draft = CommitDraft(
            kind=str(CommitKind(text(header["kind"]))),
            history=whole(header["log_history"]),
            from_phys=whole(header["from_phys"]),
            to_phys=whole(header["to_phys"]),
            check=row(LogCheck, header["check"]),
            queues=queues_of(container),
            runs=container.table("runs", RUN_DTYPE),
            removed=container.table("removed", REMOVED_DTYPE),
            objects=container.table("objects", OBJECT_DTYPE),
            object_keys=tuple(texts(header["object_keys"])),
            gaps=container.table("gaps", GAP_DTYPE),
            hide=[row(QueueKey, item) for item in items(header["hide"])],
            unhide=[row(QueueKey, item) for item in items(header["unhide"])],
            state_objects=text_fields(header["state_objects"]),
            settings=fields(header["settings"]),
            pending_deletions=texts(header["pending_deletions"]),
            restored=texts(header["restored"]),
            purged=texts(header["purged"]),
            reason=str(Reason(text(header["reason"]))),
            floors=container.table("floors", FLOOR_DTYPE),
            deletions=_deletion_change(header),
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
            timers=timers_of(container),
        )
        place = CommitPlace(
            version=whole(header["version"]),
            epoch=whole(header["epoch"]),
            predecessor_put_id=text(header["predecessor_put_id"]),
            actor=text(header["actor"]),
            cluster=text(header["cluster"]),
            broker=text(header["broker"]),
            root=row(RootRef, header["root"]),
            kept_root=row(RootRef, header["kept_root"]),
        )
        commit = Commit(draft, place, text(header["put_id"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{source}: this commit of the catalog is damaged: {error!r}") from error
    check_indexes(draft, source)
    return commit


def check_indexes(draft: CommitDraft, source: str) -> None:
    """Check that every number in the tables of ``draft`` that refers to a row of another table is inside that one.
    Raises CorruptionError, which names the object ``source``."""
    for name, table, column, size in (
        ("runs", draft.runs, "queue", len(draft.queues)),
        ("runs", draft.runs, "object", len(draft.objects)),
        ("removed", draft.removed, "queue", len(draft.queues)),
        ("gaps", draft.gaps, "queue", len(draft.queues)),
        ("floors", draft.floors, "queue", len(draft.queues)),
        ("objects", draft.objects, "key", len(draft.object_keys)),
    ):
        if len(table) and int(table[column].max()) >= size:
            raise CorruptionError(
                f"{source}: this commit of the catalog is damaged: a number in the column {name}.{column} refers to "
                f"row {int(table[column].max())} of a table that has {size} rows"
            )


def refuse_unknown(container: Container, kind: object, source: str) -> None:
    """Raise UnsupportedFormatError if a commit, root page or page has what a later minor version of the format may add
    and no reader may ignore: a table, a kind of commit or of run. ``kind``: that of a commit, else None."""
    unknown = {name for name, table in container.tables.items() if len(table)} - _TABLES - {"tombstones"}
    if unknown:
        what = f"table {sorted(unknown)[0]}"
    elif isinstance(kind, str) and kind not in list(CommitKind):
        what = f"kind {kind}"
    else:
        what = _unknown_runs(container.tables.get("runs"))
    if what:
        raise UnsupportedFormatError(
            f"{source}: this object of the catalog has {what}, which this program does not support",
            hint="upgrade this program",
        )


def _unknown_runs(runs: Table | None) -> str:
    """The first kind of ``runs`` that this program does not know, as text; empty if it knows all."""
    if runs is None or "kind" not in (runs.dtype.names or ()):
        return ""
    unknown = runs["kind"][runs["kind"] > max(RunKind)]
    return f"runs of kind {int(unknown[0])}" if len(unknown) else ""


def timers_of(container: Container) -> tuple[TimerRef, ...]:
    """The objects of the table ``timers``, which is absent without any. Raises ValueError."""
    return timer_refs(container.table("timers", TIMER_DTYPE)) if "timers" in container.tables else ()


def _index_change(header: Mapping[str, Any]) -> IndexChange:
    index = fields(header["index"])
    return IndexChange([index_ref(item) for item in items(index["added"])], texts(index["removed"]))


def _deletion_change(header: Mapping[str, Any]) -> DeletionChange:
    change = fields(header["deletions"])
    return DeletionChange(
        spilled=[row(DeletionList, item) for item in items(change["spilled"])],
        added=[row(DeletionList, item) for item in items(change["added"])],
        removed=texts(change["removed"]),
    )


def _content(draft: CommitDraft, place: CommitPlace) -> tuple[dict[str, Any], dict[str, Table]]:
    """The header and the tables that a commit is stored as."""
    topics, queues = selection_of(draft.queues).table()
    pages = draft.pages
    header = {
        "kind": draft.kind,
        "log_history": draft.history,
        "from_phys": draft.from_phys,
        "to_phys": draft.to_phys,
        "check": draft.check,
        "topics": topics,
        "object_keys": list(draft.object_keys),
        "hide": list(draft.hide),
        "unhide": list(draft.unhide),
        "state_objects": dict(draft.state_objects),
        "settings": dict(draft.settings),
        "pending_deletions": list(draft.pending_deletions),
        "restored": list(draft.restored),
        "purged": list(draft.purged),
        "reason": draft.reason,
        "deletions": {
            "spilled": list(draft.deletions.spilled),
            "added": list(draft.deletions.added),
            "removed": list(draft.deletions.removed),
        },
        "created_ms": draft.created_ms,
        "owner": draft.owner,
        "common_version": draft.common_version,
        "pages": {
            "root": pages.root,
            "spilled_version": pages.spilled_version,
            "added": list(pages.added),
            "removed": list(pages.removed),
            "resolved_version": pages.resolved_version,
        },
        "index": {"added": list(draft.index.added), "removed": list(draft.index.removed)},
        "version": place.version,
        "epoch": place.epoch,
        "predecessor_put_id": place.predecessor_put_id,
        "actor": place.actor,
        "cluster": place.cluster,
        "broker": place.broker,
        "root": place.root,
        "kept_root": place.kept_root,
    }
    tables = {
        "queues": queues,
        "runs": draft.runs,
        "removed": draft.removed,
        "objects": draft.objects,
        "gaps": draft.gaps,
        "floors": draft.floors,
    }
    if draft.timers:
        tables["timers"] = timer_table(draft.timers)
    return header, tables


ROOT_KIND = b"RMQTROOT"


def encode_root(state: CatalogState) -> bytes:
    """``state`` as bytes; equal states give equal bytes."""
    topics, queues = state.queue_keys.table()
    table = state.table.copy()
    table["topic"] = queues["topic"]
    memory = state.memory
    header = {
        "version": state.version,
        "epoch": state.epoch,
        "put_id": state.put_id,
        "owner": state.owner,
        "cluster": state.cluster,
        "broker": state.broker,
        "log_history": state.cursor.history,
        "phys": state.cursor.phys,
        "check": state.cursor.check,
        "started": state.started,
        "advanced_ms": state.advanced_ms,
        "created_ms": state.created_ms,
        "topics": topics,
        "object_keys": list(memory.object_keys),
        "pages": list(state.pages),
        "root": state.root,
        "kept_roots": list(state.kept_roots),
        "log_histories": list(state.log_histories),
        "state_objects": dict(state.state_objects),
        "settings": dict(state.settings),
        "pending_deletions": dict(state.pending_deletions),
        "deletion_lists": list(state.deletion_lists),
        "indexes": list(state.indexes),
    }
    tables = {
        "queues": table,
        "gaps": state.gaps,
        "tombstones": state.tombstones,
        "runs": memory.runs,
        "objects": memory.objects,
    }
    if state.timers:
        tables["timers"] = timer_table(state.timers)
    return encode_container(ROOT_KIND, header, tables, is_packed=True)


def decode_root(data: bytes, *, source: str) -> CatalogState:
    """The state whose root page is ``data``. Raises CorruptionError, which names the object ``source``, if anything of
    it is damaged, and UnsupportedFormatError."""
    container = decode_container(data, ROOT_KIND, source=source, allowance=LARGE)
    header = container.header
    refuse_unknown(container, None, source)
    try:
        table = container.table("queues", QUEUE_STATE_DTYPE)
        keys = queues_of(container)
        table["topic"] = 0
        memory = RunChunk(
            container.table("runs", RUN_DTYPE),
            container.table("objects", OBJECT_DTYPE),
            tuple(texts(header["object_keys"])),
        )
        check_chunk(memory, len(keys))
        cursor = LogCursor(
            whole(header["log_history"]), whole(header["phys"]), row(LogCheck, header["check"])
        )
        return CatalogState(
            version=whole(header["version"]),
            epoch=whole(header["epoch"]),
            put_id=text(header["put_id"]),
            owner=row(Owner, header["owner"]) if header["owner"] else None,
            cluster=text(header["cluster"]),
            broker=text(header["broker"]),
            cursor=cursor,
            started=bool(header["started"]),
            advanced_ms=whole(header["advanced_ms"]),
            created_ms=whole(header["created_ms"]),
            directory=QueueDirectory(keys),
            table=table,
            gaps=container.table("gaps", GAP_DTYPE),
            chunks=(memory,) if len(memory.runs) else (),
            pages=tuple(row(PageRef, item) for item in items(header["pages"])),
            tombstones=container.table("tombstones", REMOVED_DTYPE),
            root=row(RootRef, header["root"]),
            kept_roots=tuple(row(RootRef, item) for item in items(header["kept_roots"])),
            log_histories=tuple(row(LogHistory, item) for item in items(header["log_histories"])),
            state_objects=text_fields(header["state_objects"]),
            settings=fields(header["settings"]),
            pending_deletions={
                key: row(PendingDeletion, item) for key, item in fields(header["pending_deletions"]).items()
            },
            deletion_lists=tuple(row(DeletionList, item) for item in items(header["deletion_lists"])),
            indexes=tuple(index_ref(item) for item in items(header["indexes"])),
            timers=timers_of(container),
        )
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise CorruptionError(f"{source}: this root page of the catalog is damaged: {error!r}") from error


def check_chunk(chunk: RunChunk, queues: int) -> None:
    """Raise ValueError unless the runs of ``chunk`` refer to one of so many ``queues`` and to its objects, and these to
    its keys."""
    for name, table, column, size in (
        ("runs", chunk.runs, "queue", queues),
        ("runs", chunk.runs, "object", len(chunk.objects)),
        ("objects", chunk.objects, "key", len(chunk.object_keys)),
    ):
        if len(table) and int(table[column].max()) >= size:
            raise ValueError(
                f"its column {name}.{column} refers to row {table[column].max()} of a table that has only {size} rows"
            )


def describe(state: CatalogState) -> dict[str, object]:
    """``state`` as plain values that compare equal for equal states, by part; its runs that are in no page are
    sorted."""
    memory = state.memory
    names = [name for name in RUN_DTYPE.names or () if name not in ("queue", "object")]
    queue_of = map(state.directory.roster.keys.__getitem__, memory.runs["queue"].tolist())
    key_of = map(memory.object_keys.__getitem__, memory.objects["key"][memory.runs["object"]].tolist())
    runs = sorted(zip(queue_of, key_of, *(memory.runs[name].tolist() for name in names), strict=True))
    rows, begin, size = state.table.tobytes(), QUEUE_DTYPE.itemsize, state.table.itemsize
    # Rows are compared as bytes, without the queue's name in front: tuples of 100,000 queues would take 100 MiB.
    queues = {key: rows[row * size + begin : (row + 1) * size] for row, key in enumerate(state.queue_keys)}
    gaps = sorted((*state.key_of(int(gap["queue"])), *gap.tolist()[1:]) for gap in state.gaps)
    tombstones = sorted((*state.key_of(int(run["queue"])), *run.tolist()[1:]) for run in state.tombstones)
    plain = (
        state.version,
        state.epoch,
        state.put_id,
        state.owner,
        state.cluster,
        state.broker,
        state.cursor,
        state.started,
        state.advanced_ms,
        state.created_ms,
        state.root,
        state.kept_roots,
        state.log_histories,
    )
    return {
        "plain": plain,
        "queues": queues,
        "runs": runs,
        "gaps": gaps,
        "tombstones": tombstones,
        "pages": sorted(state.pages),
        "state_objects": dict(state.state_objects),
        "settings": json.loads(json.dumps(state.settings)),
        "pending_deletions": dict(state.pending_deletions),
        "deletion_lists": state.deletion_lists,
        "indexes": state.indexes,
        "timers": state.timers,
    }
