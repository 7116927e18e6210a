"""Ends a bulk backfill whose object store refuses every request, by the rule of uploader/outage_limit.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tiered.errors import UnavailableError
from uploader.offload_status import OffloadStatus
from uploader.outage_limit import OutageLimit

POLL_S = 0.2


@contextmanager
def bounded(
    outage_limit_s: float,
    retry_reason: Callable[[], str],
    abort: Callable[[UnavailableError], None],
    status: Callable[[], OffloadStatus | None] = lambda: None,
) -> Iterator[None]:
    """Run the block, at most ``outage_limit_s`` after the object store began to refuse every request.

    ``retry_reason``: why a commit of the block is retried, empty if none is. ``abort`` ends the block. Raises
    UnavailableError after it did.
    """
    over = threading.Event()
    aborted: list[UnavailableError] = []
    outage_limit = OutageLimit(outage_limit_s, drain_s_max=0.0)

    def watch() -> None:
        while not over.wait(POLL_S):
            try:
                outage_limit.check(
                    status(), is_stopping=False, now_s=time.monotonic(), retry_reason=retry_reason()
                )
            except UnavailableError as error:
                aborted.append(error)
                abort(error)
                return

    watching = threading.Thread(target=watch, name="outage_limit", daemon=True)
    watching.start()
    try:
        yield
    except UnavailableError as error:
        raise aborted[0] if aborted else error from None
    finally:
        over.set()
        watching.join()
