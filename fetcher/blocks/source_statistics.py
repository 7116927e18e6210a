"""Counters of reading an archive, for metrics, benchmarks and tests."""

from __future__ import annotations

from typing import NamedTuple


class SourceStatistics(NamedTuple):
    """Totals since the start, but for what is held and in flight now. Sizes are bytes."""

    requests: int
    bytes_fetched: int
    bytes_fetched_twice: int
    gap_bytes: int
    hits: int
    misses: int
    joined: int
    waits: int
    """User reads that waited for the store, the disk or memory."""
    memory_refused: int
    disk_hits: int
    disk_misses: int
    corrupt_fetched: int
    corrupt_memory: int
    corrupt_disk: int
    expired_unread: int
    evicted_unread: int
    cached_bytes: int
    index_bytes: int
    charged_bytes: int
    peak_bytes: int
    blocks_loading: int
