"""Publish latencies from the archive: commit times against store timestamps.

Owns reading them back. Does not own limits.
"""

from dataclasses import dataclass

from tests.integration.live import Sidecar
from tiered.catalog.catalog_reader import head_version, read_commit
from tiered.catalog.commit import CommitKind


@dataclass(frozen=True)
class CommitTime:
    """One commit of messages: physical range [from_phys, to_phys), and how long after it was stored its oldest
    message became visible (when the commit was built, which is what its own record says)."""

    version: int
    epoch: int
    from_phys: int
    to_phys: int
    created_ms: int
    latency_ms: int


def commit_times(sidecar: Sidecar) -> list[CommitTime]:
    """All commits of messages, oldest first."""
    store = sidecar.open_archive()
    found = []
    for version in range(1, head_version(store) + 1):
        commit = read_commit(store, version)
        draft = commit.draft
        if draft.kind == CommitKind.APPEND and len(draft.runs):
            latency_ms = draft.created_ms - int(draft.runs["min_store_timestamp"].min())
            found.append(
                CommitTime(
                    version, commit.place.epoch, draft.from_phys, draft.to_phys, draft.created_ms, latency_ms
                )
            )
    return found


def quantile(values: list[int], q: float) -> int:
    """The ``q``-quantile of ``values``, 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0
