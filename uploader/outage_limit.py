"""The time limit after which a backfill ends because the object store stores nothing. Pure.

bounded_run.py applies it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered.errors import UnavailableError
from uploader.offload_status import OffloadStatus

OUTAGE_S_MAX = 60.0
"""A backfill ends after the object store has refused all requests for this long."""
AGAIN = "the same command continues where it stopped"


@dataclass
class OutageLimit:
    """Limits of an outage, and of the drain after a stop."""

    drain_s_max: float
    outage_s_max: float = field(default_factory=lambda: OUTAGE_S_MAX)
    _failing_since_s: float | None = None
    _stopping_since_s: float | None = None

    def check(
        self, status: OffloadStatus | None, *, is_stopping: bool, now_s: float, retry_reason: str = ""
    ) -> None:
        """Raises UnavailableError at the outage limit. ``retry_reason``: why a commit is retried, if one is; a store
        may accept data but no commits, and the first commit precedes all data."""
        failing = bool(retry_reason) or (status is not None and status.counters.consecutive_failures > 0)
        why = status.last_error if status is not None else "the object store does not answer"
        why = retry_reason or why
        if is_stopping:
            self._stopping_since_s = now_s if self._stopping_since_s is None else self._stopping_since_s
            if now_s - self._stopping_since_s >= self.drain_s_max:
                raise UnavailableError(f"stopped before all uploads in flight were stored: {why}", hint=AGAIN)
        elif failing:
            self._failing_since_s = now_s if self._failing_since_s is None else self._failing_since_s
            if now_s - self._failing_since_s >= self.outage_s_max:
                raise UnavailableError(f"nothing stored for {self.outage_s_max:g} s: {why}", hint=AGAIN)
        else:
            self._failing_since_s = None
