"""Puts a whole object in the place of a damaged one, by one commit of maintenance.

Only if no message is lost: what is left of the object, and the broker's log, have all of its rows. `tiered repair` does
the rest.
"""

import random
from collections.abc import Callable

import numpy as np

from tiered.archive.run_passes import LivingRuns
from tiered.archive.salvage import Lost, Salvage, salvaged
from tiered.archive.verify_segment import SegmentCheck
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind
from tiered.catalog.deletions import Reason
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.requirements import Requirements, histories_of
from tiered.catalog.state import REMOVED_DTYPE, CatalogState
from tiered.clock import Clock
from tiered.formats.keys import data_key, set_key
from tiered.formats.segment import BlockCodec, SegmentMeta
from tiered.formats.segment_writer import WrittenSegment
from tiered.model.tables import Table
from tiered.object_store.interface import ObjectStore

PUT_TIMEOUT_S = 300.0
PutObject = Callable[[str, list[bytes]], object]


class Healed:
    """A new object: its ``key``, ``segment``, and ``runs`` for the catalog, whose queues are the segment's."""

    def __init__(self, key: str, segment: WrittenSegment, runs: Table, objects: Table) -> None:
        self.key, self.segment, self.runs, self.objects = key, segment, runs, objects


def put_salvaged(
    found: Salvage, state: CatalogState, epoch: int, now_ms: int, put: PutObject
) -> Healed | None:
    """Write what was read of a damaged object as a new object, with a key of ``epoch``. None: nothing was readable."""
    place = found.check.place
    attempt = random.SystemRandom().getrandbits(40)
    meta = SegmentMeta(
        cluster=state.cluster,
        broker=state.broker,
        epoch=epoch,
        attempt=attempt,
        log_history=state.cursor.history,
        catalog_version=state.version,
        from_phys=int(place["min_phys"]),
        to_phys=int(place["end_phys"]),
        created_ms=now_ms,
        writer="repair",
    )
    written = found.written(BlockCodec(), meta)
    if written is None:
        return None
    blocks, segment, runs = written
    queue = segment.queues[int(runs["queue"][0])]
    if len(np.unique(runs["queue"])) > 1:
        key = set_key(f"{int(runs['min_phys'].min()):020d}", epoch, attempt)
    else:
        key = data_key(queue, int(runs["base_queue_offset"][0]), epoch, attempt)
    put(key, [blocks, segment.keys, segment.tail])
    return Healed(key, segment, runs, segment.object_row(epoch, int(place["ttl_class_days"])))


def heal(commits: MaintenanceCommit, key: str, log: CommitLog | None, clock: Clock) -> list[Lost] | None:
    """Replace the damaged object ``key`` by a whole one, made of what is readable and of the broker's ``log``. Returns
    an empty list if it was replaced, else the messages that neither has: then nothing is changed. None: the catalog no
    longer names the object as before. Raises the store's errors."""
    state = commits.refresh()
    check = checked(commits.store, state, key)
    if check is None:
        return None
    salvage = salvaged(commits.store, state, check, log)
    if salvage.lost:
        return salvage.lost
    new = put_salvaged(
        salvage,
        state,
        state.epoch,
        clock.wall_ms(),
        lambda key, body: commits.put(key, body, timeout_s=PUT_TIMEOUT_S),
    )
    assert new is not None, "an object has rows"
    numbers = {queue: number for number, queue in enumerate(new.segment.queues)}
    removed = np.zeros(len(salvage.runs), REMOVED_DTYPE)
    for name in ("rows", "base_queue_offset", "end_queue_offset", "version"):
        removed[name] = salvage.runs[name]
    removed["queue"] = [numbers[queue] for queue in check.queues]
    draft = CommitDraft(
        CommitKind.MAINTENANCE,
        queues=new.segment.queues,
        runs=new.runs,
        removed=removed,
        objects=new.objects,
        object_keys=[new.key],
        pending_deletions=[key],
        reason=Reason.REPLACED,
    )
    # A page may have a joined run by now, which a commit cannot take a part of.
    required = Requirements(epoch=state.epoch, histories=histories_of(state), uncompacted_since=state.version)
    try:
        is_committed = commits.commit(lambda _state: draft, required)
    except CommitInvalidError:
        return None  # compacted or expired since
    return [] if is_committed else None


def checked(store: ObjectStore, state: CatalogState, key: str) -> SegmentCheck | None:
    """What ``state`` expects of the object ``key``; None: it does not name it."""
    return LivingRuns(store, state).of_objects({key}).get(key)
