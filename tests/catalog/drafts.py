"""Builds commits the way an uploader would, and a slow, obvious account of what they should lead to."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tiered.catalog.catalog_reader import history_spans, newest_log_check
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import Commit, CommitDraft, CommitKind, CommitPlace, decode_commit, encode_commit
from tiered.catalog.state import CatalogState, LogCheck, Owner
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, OBJECT_DTYPE, RUN_DTYPE, GapReason, RunKind
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

RECORD_BYTES = 100
ROW_PHYS = 200
NOW_MS = 1_700_000_000_000


class Bucket(MemoryStore):
    """Stamps objects with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS
        super().__init__(clock=Clock(wall_ms=lambda: self.now_ms))


def queue(topic: str = "t", queue_id: int = 0, generation: int = 0) -> QueueKey:
    """A queue's name."""
    return QueueKey(topic, queue_id, generation)


def clock_ms() -> int:
    """A clock that stands."""
    return NOW_MS


def small_limits(**changes: float) -> CatalogLimits:
    """Pages after a handful of runs, and without waiting."""
    small = CatalogLimits(
        root_every=5, spill_runs=12, page_runs_max=5, merge_sequences=3, merge_spills=3, page_retry_commits=2
    )
    return replace(small, **changes)


def writer(store: ObjectStore, instance: str = "w1", kind: str = "run", **options: object) -> CatalogWriter:
    """A writer of cluster c, broker b, with small pages and no real waiting."""
    defaults: dict[str, object] = {
        "limits": small_limits(),
        "wait": lambda seconds: None,
        "clock": Clock(wall_ms=clock_ms),
    }
    return CatalogWriter(
        store, cluster="c", broker="b", instance=instance, kind=kind, host="h", **(defaults | options)
    )  # type: ignore[arg-type]


def append_draft(
    state: CatalogState,
    rows: Mapping[QueueKey, int],
    *,
    first: Mapping[QueueKey, int] | None = None,
    gap: Mapping[QueueKey, int] | None = None,
    objects: int = 1,
    keys: Sequence[str] | None = None,
    epoch: int | None = None,
) -> CommitDraft:
    """An append of ``rows`` rows to each queue, one record after another in the log, one run each.

    ``first``: base offset of a queue that is new. ``gap``: offsets lost in front of the queue's run.
    """
    phys = state.cursor.phys
    epoch = state.epoch if epoch is None else epoch
    queues = list(rows)
    runs = np.zeros(len(queues), RUN_DTYPE)
    gaps = []
    for index, key in enumerate(queues):
        known = state.queue(key)
        end = (first or {}).get(key, 0) if known is None else int(known["end_queue_offset"])
        lost = (gap or {}).get(key, 0)
        if lost:
            gaps.append((index, GapReason.BROKER_DELETED, end, end + lost))
        base, count = end + lost, rows[key]
        runs[index] = (
            index,
            index % objects,
            index // objects,
            RunKind.PLAIN,
            0,
            base,
            base + count,
            0,
            count,
            0 if known is None else known["end_byte"],
            count * RECORD_BYTES,
            phys,
            phys,
            phys,
            phys + count * ROW_PHYS,
        )
        phys += count * ROW_PHYS
    used = min(objects, len(queues))
    table = np.zeros(used, OBJECT_DTYPE)
    table["key"] = np.arange(used)
    table["epoch"] = epoch
    table["rows"] = [int(runs["rows"][runs["object"] == number].sum()) for number in range(used)]
    attempt = 1000 * state.version
    names = keys or [
        f"sets/00/{state.cursor.phys:020d}-{epoch}-{attempt + number}.sso" for number in range(used)
    ]
    return CommitDraft(
        CommitKind.APPEND,
        history=state.cursor.history,
        from_phys=state.cursor.phys,
        to_phys=phys,
        check=LogCheck(max(0, phys - 50), phys, phys % 1009),
        queues=queues,
        runs=runs,
        objects=table,
        object_keys=names,
        gaps=np.array(gaps, GAP_DTYPE) if gaps else np.zeros(0, GAP_DTYPE),
        created_ms=NOW_MS,
    )


def log_checks(store: ObjectStore, state: CatalogState) -> Iterator[tuple[int, LogCheck, int]]:
    """(version, check, physical end) of every commit of the log the archive is made from, newest first."""
    for first, last in history_spans(state):
        entry = newest_log_check(store, first, last)
        while entry is not None:
            yield entry
            entry = newest_log_check(store, first, entry[0] - 1)


def at(state: CatalogState, draft: CommitDraft, actor: str = "w1") -> Commit:
    """``draft`` at the place after ``state``, through its bytes."""
    step = 1 if draft.kind == CommitKind.CLAIM else 0
    place = CommitPlace(state.version + 1, state.epoch + step, state.put_id, actor, "c", "b", state.root)
    made, data = encode_commit(draft, place, "nonce")
    read = decode_commit(data, source="test")
    assert read.put_id == made.put_id
    return read


def claim_draft(actor: str = "w1", kind: str = "run") -> CommitDraft:
    """A claim."""
    return CommitDraft(CommitKind.CLAIM, owner=Owner(actor, kind, "h", NOW_MS, False), created_ms=NOW_MS)
