"""Cancels timers, or moves them to another time, by a commit: until their hand-over, so the answer is certain."""

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
    """Cancel all pending timers that ``name`` names, or move them to ``at_ms``. Returns the times of delivery, in ms,
    that they had until now.

    Raises NotFoundError if none is pending, and UnavailableError if others commit all the time.
    """
    for _ in range(ATTEMPTS):
        state = commits.refresh()
        timers, queues, topics, _ = TimerFiles(commits.store).find(state, name)
        # One entry cancels each timer; to move it, a second one sets it again at the new time. Entries of one message
        # come after each other by ``changes``.
        changes = np.concatenate([timers] if at_ms is None else [timers, timers])
        changes["changes"] += 1
        changes["late_hours"], changes["kind"] = 0, EntryKind.TIMER
        changes["kind"][: len(timers)] = EntryKind.CANCEL_PLACE
        if at_ms is not None:
            changes["moved_ms"][len(timers) :] += at_ms - timers["deliver_ms"]
            changes["deliver_ms"][len(timers) :] = at_ms
        changes_ref = put_timers(commits, [(changes, queues, topics)], state.epoch)
        if _commit(commits, state, changes_ref, timers["deliver_ms"]):
            return [int(ms) for ms in timers["deliver_ms"]]
    raise UnavailableError(
        f"the archive's timers changed during each of {ATTEMPTS} attempts; nothing was changed by this command",
        hint="run the command again",
    )


def _commit(
    commits: MaintenanceCommit, state: CatalogState, changes_ref: TimerRef, deliver_ms: Table
) -> bool:
    """Commit the object ``changes_ref``, which changes the timers of the times ``deliver_ms``. Returns False, and
    commits nothing, if these may have been handed over or changed since ``state``."""
    first_ms, last_ms = int(deliver_ms.min()), int(deliver_ms.max())

    def objects_of_these_times(catalog_state: CatalogState) -> set[TimerRef]:
        return {ref for ref in catalog_state.timers if ref.begin_ms <= last_ms and first_ms <= ref.end_ms}

    draft = CommitDraft(CommitKind.MAINTENANCE, timers=[changes_ref])
    expected = objects_of_these_times(state)
    return commits.commit(
        lambda newest: draft if objects_of_these_times(newest) == expected else None,
        Requirements(epoch=state.epoch),
    )
