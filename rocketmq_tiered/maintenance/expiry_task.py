"""Expiry as a task: a pass by the rules in force, which stops at retention.max_share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rocketmq_tiered.maintenance.expire import Erasure, ExpiryPass, commit_pass, plan_pass
from rocketmq_tiered.maintenance.expire_plan import MissedPasses
from tiered.archive.task import EXPIRY, Due
from tiered.catalog.state import CatalogState
from tiered.console import size_text
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRule

logger = logging.getLogger(__name__)

FIRST_AFTER_S = 300.0
"""Wait after the start: before the first collection of garbage."""
DAY_MS = 24 * 3_600_000
TOO_MUCH = "the pass exceeds retention.max_share"


class ExpiryTask:
    """Expires messages of ``store`` every gc.every_ms, once a day if another process collects. ``rules_of`` gives the
    rules of a state's topics."""

    name = EXPIRY

    def __init__(
        self,
        store: ObjectStore,
        settings: Settings,
        rules_of: Callable[[CatalogState], Callable[[str], TopicRule]],
        *,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        erase: Erasure | None = None,
        is_unlimited: bool = False,
    ) -> None:
        self._store, self._settings, self._rules_of = store, settings, rules_of
        self._clock, self._erase, self._is_unlimited = clock, erase, is_unlimited or erase is not None
        self.due = Due(every_s=(settings.gc.every_ms or DAY_MS) / 1000, first_s=FIRST_AFTER_S)
        self.problem = ""
        self._planned_ms = 0
        self._missed: MissedPasses | None = None
        """Since the last pass of this process, unless that was stopped."""

    def plan(self, state: CatalogState) -> ExpiryPass:
        """What expires now. Raises as ``plan_pass``."""
        self._planned_ms = self._clock()
        return plan_pass(
            self._store,
            state,
            self._rules_of(state),
            clock=self._clock,
            erase=self._erase,
            missed=self._missed,
        )

    def is_too_much(self, found: ExpiryPass) -> bool:
        """Whether it is more than retention.max_share of the archive, and may not be."""
        return not self._is_unlimited and found.plan.exceeds(self._settings.retention.max_share)

    def step(self, state: CatalogState, found: ExpiryPass) -> bool:
        """Expire it, unless it is too much."""
        plan, max_share = found.plan, self._settings.retention.max_share
        self.problem = TOO_MUCH if self.is_too_much(found) else ""
        self._missed = None
        if self.problem:
            logger.error(
                "nothing expired: it would be %.0f%% of the archive, more than retention.max_share (%.0f%%); check "
                "the rules, then run `tiered expire --apply --yes`",
                100 * plan.share, 100 * max_share,
            )  # fmt: skip
            return False
        commit_pass(self._store, state, found, clock=self._clock)
        self._missed = MissedPasses(self._planned_ms, max(1, int((self.due.every_s or 0) * 1000)))
        if found.is_committed:
            logger.info(
                "%d messages expired, %s; %d objects, %s, are deleted after the grace period",
                plan.rows, size_text(plan.byte_count), len(found.objects), size_text(found.object_bytes),
            )  # fmt: skip
        return False
