"""How long a back-fill goes on against an object store that takes nothing, and what is said then. Pure.

A catalog commit is tried until it is known what became of it, for ever if need be, as suits a process that follows a
broker; a back-fill has somebody who waits for its exit code. Used by `tiered backfill` and by bulk back-fill.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered.errors import UnavailableError
from uploader.offload_status import OffloadStatus

AGAIN = "the same command continues where it stopped"


def nothing_stored(refused_s_max: float, why: str) -> UnavailableError:
    """Patience is at its end."""
    return UnavailableError(f"nothing stored for {refused_s_max:g} s: {why}", hint=AGAIN)


@dataclass
class Patience:
    """How long a back-fill goes on against a store that takes nothing, and how long it drains once stopped."""

    refused_s_max: float
    drain_s_max: float
    _refused_since_s: float | None = None
    _stopped_since_s: float | None = None

    def check(
        self, status: OffloadStatus | None, *, is_stopping: bool, now_s: float, retry_reason: str = ""
    ) -> None:
        """Raises UnavailableError at the outage limit. ``retry_reason``: why a commit is retried, if one is; a store
        may accept data but no commits, and the first commit precedes all data."""
        failing = bool(retry_reason) or (status is not None and status.counters.consecutive_failures > 0)
        why = status.last_error if status is not None else "the object store does not answer"
        why = retry_reason or why
        if is_stopping:
            self._stopped_since_s = now_s if self._stopped_since_s is None else self._stopped_since_s
            if now_s - self._stopped_since_s >= self.drain_s_max:
                raise UnavailableError(f"stopped before everything in flight was stored: {why}", hint=AGAIN)
        elif failing:
            self._refused_since_s = now_s if self._refused_since_s is None else self._refused_since_s
            if now_s - self._refused_since_s >= self.refused_s_max:
                raise nothing_stored(self.refused_s_max, why)
        else:
            self._refused_since_s = None
