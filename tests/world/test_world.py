"""Histories of the whole: no rule is broken, one seed is one history, and planted defects are caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import rocketmq_tiered.maintenance.compaction_round as rounds
import tests.world.world as world_module
from rocketmq_tiered.maintenance import gc
from tests.sweeps import sweep
from tests.world.world import World
from tiered.catalog.commit import CommitDraft
from tiered.catalog.garbage import Grace, KeySet
from tiered.object_store.interface import ObjectStore

STEPS = 120
FAST = (1, 2, 8, 14, 21, 148)


def played(seed: int, directory: Path, steps: int = STEPS) -> World:
    world = World(seed, directory)
    world.run(steps)
    return world


@pytest.mark.parametrize("seed", sweep(range(300), fast=FAST))
def test_no_rule_is_broken(seed: int, tmp_path: Path) -> None:
    played(seed, tmp_path)


def test_one_seed_is_one_history(tmp_path: Path) -> None:
    assert len({played(3, tmp_path / name, 60).digest() for name in ("one", "two")}) == 1


def test_every_actor_acts_and_every_fault_occurs(tmp_path: Path) -> None:
    counts = Counter[str]()
    for seed in range(4):
        counts += played(seed, tmp_path / str(seed)).counts
    for what in (
        "broker",
        "reader",
        "expiry",
        "gc",
        "compactor",
        "master",
        "slave",
        "rounds",
        "floors",
        "rows read",
    ):
        assert counts[what], what
    for what in (
        "LOST_BEFORE",
        "LOST_AFTER",
        "STALLED",
        "THROTTLED",
        "CONFLICT",
        "logs cut",
        "master: FencedError",
    ):
        assert counts[what], what


# -- planted defects ------------------------------------------------------------------------------------------

Defect = Callable[[], AbstractContextManager[Any]]


def outputs_not_taken_back() -> AbstractContextManager[Any]:
    """Outputs stay pending deletions: garbage collection deletes what is in use."""
    return patch.object(
        rounds, "CommitDraft", lambda kind, **values: CommitDraft(kind, **values | {"restored": ()})
    )


@contextmanager
def sources_deleted_at_once() -> Iterator[None]:
    """Sources are deleted with the commit: a reader of an older version misses them."""
    run_round = rounds.run_round

    def deleting(
        store: ObjectStore, state: Any, planned: rounds.PlannedRound, *rest: Any, **more: Any
    ) -> Any:
        result = run_round(store, state, planned, *rest, **more)
        if result is not None:
            store.delete([planned.candidates.object_keys[number] for number in planned.plan.sources.tolist()])
        return result

    with patch.object(rounds, "run_round", deleting):
        yield


DEFECTS: dict[str, Defect] = {
    "outputs stay pending deletions": outputs_not_taken_back,
    "sources are deleted at once": sources_deleted_at_once,
    "gc without grace": partial(patch.object, world_module, "Grace", lambda *_: Grace(0, 0)),
    "gc ignores pages": partial(patch.object, gc, "referenced_by", lambda *_: KeySet(())),
}


@pytest.mark.soak
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught(defect: str, tmp_path: Path) -> None:
    with DEFECTS[defect]():
        for seed in range(100):
            try:
                played(seed, tmp_path / str(seed))
            except Exception:
                return
    raise AssertionError("no seed of 100 notices it")
