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
    give_up: Callable[[UnavailableError], None],
    status: Callable[[], OffloadStatus | None] = lambda: None,
) -> Iterator[None]:
    """Run the block, but not longer than ``outage_limit_s`` after the object store began to refuse everything.

    ``retry_reason``: why a commit of the block is retried, empty if none is. ``give_up`` makes the block end. Raises
    UnavailableError when it did.
    """
    over = threading.Event()
    given_up: list[UnavailableError] = []
    outage_limit = OutageLimit(outage_limit_s, drain_s_max=0.0)

    def watch() -> None:
        while not over.wait(POLL_S):
            try:
                outage_limit.check(
                    status(), is_stopping=False, now_s=time.monotonic(), retry_reason=retry_reason()
                )
            except UnavailableError as error:
                given_up.append(error)
                give_up(error)
                return

    watching = threading.Thread(target=watch, name="outage_limit", daemon=True)
    watching.start()
    try:
        yield
    except UnavailableError as error:
        raise given_up[0] if given_up else error from None
    finally:
        over.set()
        watching.join()
