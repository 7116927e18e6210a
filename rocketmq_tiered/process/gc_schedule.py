"""Expiry and garbage collection inside `tiered run`, while this process owns the archive.

With gc.every_ms 0 another process collects; messages expire here all the same, once a day.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rocketmq_tiered.maintenance.gc import Deletions, run_gc
from tiered.catalog.catalog_reader import load, refresh
from tiered.catalog.state import CatalogState
from tiered.console import counted, size_text
from tiered.errors import NotFoundError, TieredError
from tiered.object_store.interface import ObjectStore
from tiered.settings.retention_sections import GcSettings

logger = logging.getLogger(__name__)

DAY_MS = 24 * 3_600_000
FIRST_AFTER_S = 600.0
"""Wait after the start: short, so that a process that restarts often collects too."""


class GcSchedule:
    """Expires and collects every ``interval_ms`` in a thread, between ``start`` and ``stop``. ``store`` is the
    archive's. ``expire``: a pass over a state, before the collection; whether retention.max_share stopped it."""

    def __init__(
        self,
        store: ObjectStore,
        settings: GcSettings,
        instance: str,
        *,
        expire: Callable[[ObjectStore, CatalogState], bool] | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._store, self._settings, self._instance, self._clock_ms = store, settings, instance, clock_ms
        self._expire = expire
        self._stopped = threading.Event()
        self.last_gc_ms: int | None = None
        self.last_expire_ms: int | None = None
        self.expire_stopped = False
        self.problem = ""
        """Why the last collection deleted less than was due; empty if it did not."""
        self._thread = threading.Thread(target=self._run, name="gc", daemon=True)

    @property
    def interval_ms(self) -> int:
        """From one pass to the next."""
        return self._settings.every_ms or DAY_MS

    def start(self) -> None:
        """Call once."""
        self._thread.start()

    def stop(self) -> None:
        """Waits for a deletion in progress."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        wait_s = min(FIRST_AFTER_S, self.interval_ms / 1000)
        while not self._stopped.wait(wait_s):
            wait_s = self.interval_ms / 1000
            try:
                self.make_pass()
            except TieredError as error:
                self.problem = str(error)
                logger.warning("garbage collection has not run: %s", error)

    def make_pass(self) -> None:
        """Expire, and collect unless gc.every_ms is 0, if this process owns the archive."""
        try:
            state = load(self._store)
        except NotFoundError:
            return
        if state.owner is None or state.owner.released or state.owner.instance != self._instance:
            return
        if self._expire is not None:
            self.expire_stopped = self._expire(self._store, state)
            self.last_expire_ms = self._clock_ms()
            state = refresh(self._store, state)
        if self._settings.every_ms:
            self._collect(state)

    def _collect(self, state: CatalogState) -> None:
        plan = run_gc(
            self._store,
            state,
            apply=True,
            grace_ms=self._settings.grace_ms,
            diverged_grace_ms=self._settings.diverged_grace_ms,
            clock=self._clock_ms,
            deletions=Deletions(
                self._settings.deletes_per_s, is_stopped=self._stopped.is_set, sleep=self._stopped.wait
            ),
        )
        self.last_gc_ms = self._clock_ms()
        self.problem = ""
        if plan.failed:
            key, reason = next(iter(plan.failed.items()))
            self.problem = (
                f"{counted(len(plan.failed), 'object')} could not be deleted, such as {key}: {reason}"
            )
            logger.error("%s", self.problem)
        count = len(plan.delete) - len(plan.failed)
        logger.info("garbage collection deleted %d objects, %s", count, size_text(plan.delete_bytes))
