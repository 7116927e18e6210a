"""Runs an uploader to the end of its log, and ends it when the object store stores nothing for too long.

A catalog commit is retried without limit, which suits a process that follows a broker. A backfill must end. Used by
`tiered backfill` and by each task of `tiered-spark backfill`.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from tiered.errors import UnavailableError
from uploader.offload import Offloader
from uploader.offload_status import OffloadResult, OffloadStatus

OUTAGE_S_MAX = 60.0
"""A backfill ends with an error after the object store has stored nothing for so long."""
AGAIN = "the same command continues where it stopped"


@dataclass
class OutageLimit:
    """Limits how long uploads may fail (``outage_s_max``), and how long a stop may wait for uploads in flight
    (``drain_s_max``)."""

    drain_s_max: float
    outage_s_max: float = field(default_factory=lambda: OUTAGE_S_MAX)
    _failing_since_s: float | None = None
    _stopping_since_s: float | None = None

    def check(
        self, status: OffloadStatus | None, *, is_stopping: bool, now_s: float, retry_reason: str = ""
    ) -> None:
        """Note whether uploads fail now, and raise UnavailableError once they have failed for ``outage_s_max``, or a
        stop has taken ``drain_s_max``. Called several times a second with the uploader's ``status``, None before it has
        one. ``retry_reason``: why a commit is retried, empty if none is: a store may accept data but no commits."""
        is_failing = bool(retry_reason) or (status is not None and status.counters.consecutive_failures > 0)
        why = status.last_error if status is not None else "the object store does not answer"
        why = retry_reason or why
        if is_stopping:
            self._stopping_since_s = now_s if self._stopping_since_s is None else self._stopping_since_s
            if now_s - self._stopping_since_s >= self.drain_s_max:
                raise UnavailableError(f"stopped before all uploads in flight were stored: {why}", hint=AGAIN)
        elif is_failing:
            self._failing_since_s = now_s if self._failing_since_s is None else self._failing_since_s
            if now_s - self._failing_since_s >= self.outage_s_max:
                raise UnavailableError(
                    f"the object store has stored nothing for {self.outage_s_max:g} s: {why}", hint=AGAIN
                )
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
    """Do ``offload``, which runs ``offloader`` to the end of its log, in a thread, and return its result. ``observe``
    is called with the uploader's status several times a second.

    Raises what ``offload`` raises, and UnavailableError once the object store has failed for longer than ``limit``
    allows; ``offloader`` is aborted before, so that it logs nothing after this error.
    """
    outcome: Future[OffloadResult] = Future()

    def work() -> None:
        """The work of the thread: its result or error goes to ``outcome``."""
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
