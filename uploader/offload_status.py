"""What an uploader tells about itself: the moment's view and the result of a run. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.broker_store.pins import PinStatus
from uploader.cycle_upload import UploadCounters


@dataclass(frozen=True)
class OffloadResult:
    """What one run did."""

    messages: int
    raw_bytes: int
    stored_bytes: int
    commits: int
    objects: int
    from_phys: int
    to_phys: int
    gaps: int
    damaged: int
    lost: int
    hidden: int
    duration_s: float


@dataclass(frozen=True)
class OffloadStatus:
    """A moment's view, for status, metrics and progress; sizes in bytes, physical offsets in the commitlog."""

    committed_phys: int
    read_phys: int
    bound_phys: int
    log_min_phys: int
    written_phys: int
    """Not below ``bound_phys``: records may stand up to here, admitted or not."""
    lag_bytes: int
    lag_ms: int
    epoch: int
    version: int
    fenced: bool
    memory_used_bytes: int
    memory_budget_bytes: int
    last_error: str
    pins: PinStatus | None
    bound_reason: str
    counters: UploadCounters
    unindexed_objects: int = 0
    """Data objects that the message index leaves out, because they are damaged."""
    pending_deletions: int = 0
    """Objects that were given up and that `gc` has not deleted."""
    oldest_pending_deletion_ms: int | None = None
    index_files_rebuilt: int = 0
    """Damaged index files that this process made anew."""
