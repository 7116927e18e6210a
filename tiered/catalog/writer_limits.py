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
    embedded_bytes_max: int = 4 << 20
    """Pages up to so many bytes travel inside a commit, more are objects of their own."""
    pack_bytes_max: int = 8 << 20
    """About how many bytes of pages make one object."""
    put_timeout_s: float = 15.0
    put_bytes_per_s_min: int = 100_000
    """A PUT may take this much longer than ``put_timeout_s`` for its size."""
    backoff_s_first: float = 0.1
    backoff_s_max: float = 15.0
    page_retry_commits: int = 8
    """After a page could not be written, this many commits go by before the next try."""

    def timeout_s(self, size_bytes: int) -> float:
        """How long a PUT of so many bytes may take."""
        return self.put_timeout_s + size_bytes / self.put_bytes_per_s_min
