"""Garbage collection in one call, as tests of an archive need it."""

from collections.abc import Callable

from rocketmq_tiered.maintenance.gc import Deletions, collect, plan_collection
from tiered.catalog.garbage import GcPlan, Grace, Unexplained
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.object_store.interface import ObjectStore

FAKE = Unexplained("its end, which lists its messages, cannot be read", 0)


def run_gc(
    store: ObjectStore,
    state: CatalogState,
    *,
    apply: bool,
    grace_ms: int,
    clock: Callable[[], int],
    diverged_grace_ms: int | None = None,
    deletions: Deletions | None = None,
) -> GcPlan:
    """Plan, and with ``apply`` delete. ``diverged_grace_ms`` (default ``grace_ms``): of objects of a truncated log.
    An object without any tail stands for an upload whose messages are committed elsewhere."""
    grace = Grace(grace_ms, grace_ms if diverged_grace_ms is None else diverged_grace_ms)
    plan = plan_collection(store, state, grace, Clock(wall_ms=clock))
    for info in plan.candidates:
        if plan.unexplained.get(info.key) == FAKE:
            del plan.unexplained[info.key]
            plan.to_delete(info)
    if apply:
        collect(store, state, plan, clock=Clock(wall_ms=clock), deletions=deletions)
    return plan
