"""Cancels timers, or moves them to another time, by a commit: until their hand-over, so the answer is certain."""

from __future__ import annotations

import numpy as np

from rocketmq_tiered.sending.timer_delivery import put_timers
from tiered.archive.timers import TimerFiles, TimerName
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.requirements import Requirements
from tiered.catalog.state import CatalogState
from tiered.catalog.timer_refs import TimerRef
from tiered.errors import UnavailableError
from tiered.model.tables import Table
from tiered.model.timer import EntryKind, TimerPlace

ATTEMPTS = 10


def change_timers(
    commits: MaintenanceCommit, name: TimerName | TimerPlace, *, at_ms: int | None = None
) -> list[int]:
    """Cancel all timers that ``name`` names, or deliver them at ``at_ms``; returns the time of each so far.

    Raises NotFoundError if none is pending, and UnavailableError if others commit all the time.
    """
    for _ in range(ATTEMPTS):
        state = commits.refresh()
        timers, queues, topics, _ = TimerFiles(commits.store).find(state, name)
        changed = np.concatenate([timers] if at_ms is None else [timers, timers])
        changed["order"] += 1
        changed["late_hours"], changed["kind"] = 0, EntryKind.TIMER
        changed["kind"][: len(timers)] = EntryKind.CANCEL_PLACE
        if at_ms is not None:
            changed["deliver_ms"][len(timers) :] = at_ms
        new = put_timers(commits, [(changed, queues, topics)], state.epoch)
        if _commit(commits, state, new, timers["deliver_ms"]):
            return [int(ms) for ms in timers["deliver_ms"]]
    raise UnavailableError(
        f"the archive's timers changed during each of {ATTEMPTS} attempts; nothing was changed by this command",
        hint="run the command again",
    )


def _commit(commits: MaintenanceCommit, state: CatalogState, new: TimerRef, times: Table) -> bool:
    """Unless a timer of these times may have been handed over, or changed, since ``state``."""
    first_ms, last_ms = int(times.min()), int(times.max())

    def near(one: CatalogState) -> set[TimerRef]:
        return {ref for ref in one.timers if ref.begin_ms <= last_ms and first_ms <= ref.end_ms}

    draft = CommitDraft(CommitKind.MAINTENANCE, timers=[new])
    return commits.commit(
        lambda newest: draft if near(newest) == near(state) else None, Requirements(epoch=state.epoch)
    )
