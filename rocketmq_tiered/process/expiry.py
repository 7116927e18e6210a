"""One pass of expiry inside `tiered run`, by the settings in force. It stops at retention.max_share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rocketmq_tiered.maintenance.expire import commit_pass, plan_pass
from rocketmq_tiered.process.archive_rules import rules_in
from tiered.catalog.state import CatalogState
from tiered.console import size_text
from tiered.formats.container import CATALOG_MAJOR
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)


def expire(
    settings: Settings,
    store: ObjectStore,
    state: CatalogState,
    clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> bool:
    """Expire what is due in ``state``. Whether retention.max_share stopped it. Raises what the store raises."""
    if state.major < CATALOG_MAJOR:
        return False
    found = plan_pass(store, state, rules_in(store, state, settings), clock=clock)
    plan = found.plan
    if not len(plan.floors):
        return False
    if plan.exceeds(settings.retention.max_share):
        logger.error(
            "nothing expired: it would be %.0f%% of the archive, more than retention.max_share (%.0f%%); check the "
            "rules, then run `tiered expire --apply --yes`",
            100 * plan.share,
            100 * settings.retention.max_share,
        )
        return True
    commit_pass(store, state, found, clock=clock)
    if found.is_committed:
        logger.info(
            "%d messages expired, %s; %d objects, %s, are deleted after the grace period",
            plan.rows, size_text(plan.byte_count), len(found.objects), size_text(found.object_bytes),
        )  # fmt: skip
    return False
