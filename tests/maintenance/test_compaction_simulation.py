"""Compaction, expiry, garbage collection, an owner and readers in any order; and planted defects are caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rocketmq_tiered.maintenance.compaction_round as rounds
from tests.maintenance.compaction_simulation import World
from tests.soak.results import knob
from tests.sweeps import sweep
from tiered.catalog.commit import CommitDraft
from tiered.catalog.deletions import Reason
from tiered.catalog.requirements import Requirements
from tiered.catalog.state import CatalogState
from tiered.object_store.interface import ObjectStore

SOAK_SEEDS = knob("COMPACTION_SEEDS", 3000)


@pytest.mark.parametrize("seed", sweep(range(60), fast=range(4), rest="integration"))
def test_nothing_is_lost_or_left_over(seed: int, tmp_path: Path) -> None:
    World(seed, tmp_path).run()


@pytest.mark.soak
def test_nothing_is_lost_or_left_over_in_thousands_of_orders(tmp_path: Path) -> None:
    done = void = died = 0
    for seed in range(1000, 1000 + SOAK_SEEDS):
        world = World(seed, tmp_path)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        done, void, died = done + world.rounds, void + world.void, died + world.died
    assert min(done, void, died) > SOAK_SEEDS / 4


# -- defects --------------------------------------------------------------------------------------------------


@contextmanager
def changed_drafts(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Drafts of the compactor, changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "CommitDraft", lambda kind, **values: CommitDraft(kind, **change(values)))
        yield


def no_sources_deleted() -> Any:
    """Sources become no pending deletions: they are left over."""
    return changed_drafts(
        lambda values: values | {"pending_deletions": ()} if values["reason"] == Reason.COMPACTED else values
    )


def outputs_not_taken_back() -> Any:
    """Outputs stay pending deletions: garbage collection deletes what is in use."""
    return changed_drafts(lambda values: values | {"restored": ()})


@contextmanager
def unannounced() -> Iterator[None]:
    """Nothing is announced: a compaction that dies leaves objects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "output_keys", lambda *_: [])
        yield


@contextmanager
def sources_deleted_at_once() -> Iterator[None]:
    """Sources are deleted with the commit: a reader of an older version misses them."""
    run_round = rounds.run_round

    def deleting(
        store: ObjectStore, state: CatalogState, planned: rounds.PlannedRound, *rest: Any, **more: Any
    ) -> Any:
        result = run_round(store, state, planned, *rest, **more)
        if result is not None:
            store.delete([planned.candidates.object_keys[number] for number in planned.plan.sources.tolist()])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "run_round", deleting)
        yield


@contextmanager
def kept_runs_forgotten() -> Iterator[None]:
    """New pages have only what was moved."""
    put_pages = rounds._put_pages

    def forgetting(store: ObjectStore, state: CatalogState, planned: rounds.PlannedRound, *rest: Any) -> Any:
        moved_only = replace(planned.candidates, runs=planned.candidates.runs[:0])
        return put_pages(store, state, replace(planned, candidates=moved_only), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "_put_pages", forgetting)
        yield


@contextmanager
def changes_ignored() -> Iterator[None]:
    """A round commits although pages, runs in memory or the epoch have changed since its plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Requirements, "unmet", lambda self, state, is_compacted: "")
        yield


DEFECTS = (
    no_sources_deleted,
    outputs_not_taken_back,
    unannounced,
    sources_deleted_at_once,
    kept_runs_forgotten,
    changes_ignored,
)


@pytest.mark.integration
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_is_caught(defect: Callable[[], Any], tmp_path: Path) -> None:
    caught: Sequence[int] = []
    with defect():
        for seed in range(30):
            try:
                World(seed, tmp_path).run()
            except Exception:
                caught = [*caught, seed]
                break
    assert caught, "no seed of 30 notices it"
