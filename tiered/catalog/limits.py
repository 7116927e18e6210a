"""When runs leave memory, and how long a writer of the catalog waits. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CatalogLimits:
    """When runs leave memory and how long a PUT may take. ``spill_runs`` of 112 bytes each are kept in memory."""

    root_every: int = 64
    spill_runs: int = 65_536
    page_runs_max: int = 32_768
    merge_sequences: int = 8
    put_timeout_s: float = 15.0
    backoff_s_first: float = 0.1
    backoff_s_max: float = 15.0
    page_retry_commits: int = 8
    """After a page could not be written, this many commits go by before the next try."""
