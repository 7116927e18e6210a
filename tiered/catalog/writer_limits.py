"""Limits of a catalog writer: pages, timeouts, retries. Values only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CatalogLimits:
    """Limits of one catalog writer. ``spill_runs``: so many runs, of 112 bytes each, are kept in the state before they
    move into pages of up to ``page_runs_max`` runs; ``merge_sequences`` sequences of pages are merged into one."""

    root_every: int = 64
    """Commits between two roots, at least."""
    root_every_max: int = 256
    """Commits between two roots, at most."""
    root_bytes_factor: float = 1.75
    """Between these two numbers, a root is due when the commits since the last root have so many times its bytes."""
    root_runs_max: int = 1024
    """If the state has more runs that are in no page, they move into pages before a root, which would repeat them."""
    spill_runs: int = 65_536
    page_runs_max: int = 16_384
    merge_sequences: int = 16
    merge_spills: int = 48
    """Like ``merge_sequences``, of level 0: pages of spills name few objects, so that more of them fit in memory."""
    spill_deletions: int = 512
    """When the state has so many pending deletions of one reason, they move into a list."""
    pack_bytes_max: int = 8 << 20
    """Pages are put together in objects of about this size."""
    put_timeout_s: float = 15.0
    put_bytes_per_s_min: int = 100_000
    """A PUT's timeout is ``put_timeout_s`` plus its size at this rate."""
    backoff_s_first: float = 0.1
    backoff_s_max: float = 15.0
    page_retry_commits: int = 8
    """Commits until the next attempt after a page could not be written."""

    def timeout_s(self, size_bytes: int) -> float:
        """Timeout of a PUT."""
        return self.put_timeout_s + size_bytes / self.put_bytes_per_s_min
