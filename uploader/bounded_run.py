"""Runs an uploader to the end of its log, and ends it when the object store stores nothing for too long.

A catalog commit is retried without limit, which suits a process that follows a broker. A backfill must end. Used by
`tiered backfill` and by each task of `tiered-spark backfill`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from tiered.errors import UnavailableError
from uploader.offload import Offloader
from uploader.offload_status import OffloadResult, OffloadStatus
from uploader.outage_limit import OutageLimit

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
