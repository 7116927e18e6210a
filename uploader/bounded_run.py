"""Runs an uploader to the end of its log, and ends it when the object store stores nothing for too long.

A catalog commit is retried without limit, which suits a process that follows a broker. A backfill must end. Used by
`tiered backfill` and by each task of `tiered-spark backfill`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from tiered.errors import UnavailableError
from uploader.offload import Offloader
from uploader.offload_status import OffloadResult, OffloadStatus

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


POLL_S = 0.2
END_S = 5.0
"""How long an aborted uploader may take to end: its requests in flight."""


def run_bounded(
    offload: Callable[[], OffloadResult],
    offloader: Offloader,
    limit: OutageLimit,
    stop: threading.Event,
    observe: Callable[[OffloadStatus], None] = lambda status: None,
) -> OffloadResult:
    """Run ``offload``, a run of ``offloader``, in a thread; ``observe`` sees its status several times a second.

    Raises what ``offload`` raises, and UnavailableError at ``limit``, after ``offloader`` was aborted: it logs nothing
    after this error.
    """
    outcome: Future[OffloadResult] = Future()

    def work() -> None:
        try:
            outcome.set_result(offload())
        except BaseException as error:  # raised in the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=work, name="uploader", daemon=True).start()
    while not wait([outcome], POLL_S).done:
        status, now_s = offloader.status(), time.monotonic()
        try:
            limit.check(status, is_stopping=stop.is_set(), now_s=now_s, retry_reason=offloader.retry_reason)
        except UnavailableError as error:
            offloader.abort(error)
            wait([outcome], END_S)
            raise
        if status is not None:
            observe(status)
    return outcome.result()
