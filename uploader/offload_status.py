"""Values an uploader reports: a snapshot while it runs, and the result of a run."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.archive.task import TaskStatus
from tiered.broker_store.pins import PinStatus
from tiered.catalog.state import CatalogState
from uploader.cycle_upload import UploadCounters


@dataclass(frozen=True)
class OffloadResult:
    """Counts of one run; offsets are physical."""

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
    shown_again: int
    missing: int
    duration_s: float
    excluded: tuple[str, ...] = ()
    """Topics that topics.include and topics.exclude exclude, if the log has messages of them."""
    excluded_before: tuple[str, ...] = ()
    """Topics that are selected now, and are not archived because earlier starts excluded them."""
    damaged_tables: tuple[str, ...] = ()
    """The broker's tables that could not be read, each with the reason."""


@dataclass(frozen=True)
class OffloadStatus:
    """A snapshot for status, metrics and progress; sizes in bytes, offsets physical."""

    committed_phys: int
    read_phys: int
    bound_phys: int
    written_phys: int
    """End of what may be written, at least ``bound_phys``."""
    epoch: int
    memory_used_bytes: int
    memory_budget_bytes: int
    last_error: str
    pins: PinStatus | None
    bound_reason: str
    counters: UploadCounters
    catalog: CatalogState
    index: TaskStatus | None = None
    """Index building."""
    index_files_rebuilt: int = 0
    """Damaged index files rebuilt by this process."""
    excluded: tuple[str, ...] = ()
    """Topics that topics.include and topics.exclude exclude, if messages of them were read."""
    damaged_tables: tuple[str, ...] = ()
    """The broker's tables that could not be read, each with the reason."""
    store_problem: str = ""
    """Why uploads or commits are being retried; empty if none is."""
