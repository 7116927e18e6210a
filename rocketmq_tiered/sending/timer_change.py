"""Cancels a timer, or moves it to another time, by a commit: until its hand-over, so the answer is certain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rocketmq_tiered.sending.timer_delivery import put_timers
from tiered.archive.timers import TimerFiles
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.requirements import Requirements
from tiered.catalog.state import CatalogState
from tiered.catalog.timer_refs import TimerRef
from tiered.errors import NotFoundError, UnavailableError
from tiered.formats.timer_object import ENTRY_DTYPE, sorted_entries
from tiered.model.timer import EntryKind

ATTEMPTS = 10


def change_timer(
    commits: MaintenanceCommit, unique_key: str, deliver_ms: int | None = None, *, at_ms: int | None = None
) -> int:
    """Cancel the timer with ``unique_key``, or deliver it at ``at_ms``; returns its time so far. ``deliver_ms``: that
    time, if known: it is found faster.

    Raises NotFoundError if none is pending, and UnavailableError if others commit all the time.
    """
    for _ in range(ATTEMPTS):
        state = commits.refresh()
        found = TimerFiles(commits.store).find(state, unique_key, deliver_ms)
        if not len(found.table):
            raise NotFoundError(
                f"no timer with unique key {unique_key} is pending",
                hint="it may be handed over to the broker already, or was cancelled, or is not archived yet",
            )
        timer = found.table[0]
        entries = np.repeat(found.table[:1], 1 if at_ms is None else 2)
        entries["order"] += 1
        entries["kind"][0] = EntryKind.CANCEL
        if at_ms is not None:
            entries["deliver_ms"][1] = at_ms
        queues = [found.queues[int(timer["queue"])]]
        entries["queue"] = 0
        new = put_timers(commits, sorted_entries(entries.astype(ENTRY_DTYPE)), queues, state.epoch)
        if _commit(commits, state, [new], int(timer["deliver_ms"])):
            return int(timer["deliver_ms"])
    raise UnavailableError("timers change all the time", hint="run the command again")


def _commit(
    commits: MaintenanceCommit, state: CatalogState, new: Sequence[TimerRef], deliver_ms: int
) -> bool:
    """Unless a timer of that time may have been handed over, or changed, since ``state``."""
    before = {(ref.epoch, ref.number): ref for ref in state.timers}

    def change(newest: CatalogState) -> CommitDraft | None:
        for ref in newest.timers:
            known = before.get((ref.epoch, ref.number))
            is_other = ref.claimed != known.claimed if known else ref.begin_ms <= deliver_ms <= ref.end_ms
            if is_other and ref.begin_ms <= deliver_ms:
                return None
        if {(ref.epoch, ref.number) for ref in newest.timers} < before.keys():
            return None
        return CommitDraft(CommitKind.MAINTENANCE, timers=new)

    return commits.commit(change, Requirements(epoch=state.epoch))
