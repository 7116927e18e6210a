"""Root pages: the whole state at one version as bytes, from which a reader starts.

The put id of a state that starts a log history is not included: its commit names the page.
"""

from __future__ import annotations

import json

from tiered.catalog.commit import queue_keys, refuse_unknown, timers_of
from tiered.catalog.deletions import DeletionList, PendingDeletion
from tiered.catalog.index_refs import index_ref
from tiered.catalog.json_fields import fields, items, row, text, text_fields, texts, whole
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.state import (
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
from tiered.catalog.timer_refs import timer_table
from tiered.errors import CorruptionError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.memory_bound import LARGE
from tiered.formats.queue_names import queue_table
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, OBJECT_DTYPE, QUEUE_STATE_DTYPE, RUN_DTYPE

ROOT_KIND = b"RMQTROOT"


def encode_root(state: CatalogState) -> bytes:
    """``state`` as bytes; equal states give equal bytes."""
    topics, queues = queue_table(state.directory.keys[: state.queue_count])
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
    """Check and parse; raises CorruptionError naming ``source``, or UnsupportedFormatError."""
    container = decode_container(data, ROOT_KIND, source=source, allowance=LARGE)
    header = container.header
    refuse_unknown(container, None, source)
    try:
        table = container.table("queues", QUEUE_STATE_DTYPE)
        keys = queue_keys(container)
        table["topic"] = 0
        memory = RunChunk(
            container.table("runs", RUN_DTYPE),
            container.table("objects", OBJECT_DTYPE),
            tuple(texts(header["object_keys"])),
        )
        _check_chunk(memory, len(keys))
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
        raise CorruptionError(f"{source}: root page does not parse: {error!r}") from error


def _check_chunk(chunk: RunChunk, queues: int) -> None:
    runs, objects = chunk.runs, chunk.objects
    if len(runs) and (int(runs["queue"].max()) >= queues or int(runs["object"].max()) >= len(objects)):
        raise ValueError("runs refer to missing queues or objects")
    if len(objects) and int(objects["key"].max()) >= len(chunk.object_keys):
        raise ValueError("objects refer to missing keys")


def describe(state: CatalogState) -> dict[str, object]:
    """A state as comparable plain values, runs in memory sorted; for tests and ``--json`` dumps."""
    memory = state.memory
    runs = sorted(
        (
            *state.key_of(int(run["queue"])),
            memory.object_keys[int(memory.objects["key"][run["object"]])],
            *(int(run[name]) for name in RUN_DTYPE.names or () if name not in ("queue", "object")),
        )
        for run in memory.runs
    )
    queues = {QueueKey(*key): tuple(row.tolist())[3:] for key, row in state.queues()}
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
