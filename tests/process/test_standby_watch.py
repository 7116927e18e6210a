"""Standbys take over from a writer that is silent while the log grows, once, and never from one that works or idles."""

import itertools
import random
from dataclasses import replace

import pytest

from rocketmq_tiered.process.uploader_job import WAIT_MAX_MS, StandbyWatch
from tiered.catalog.state import NO_CHECK, CatalogState, LogCursor

LAG_MS = 300_000
STEP_MS = 30_000


def at(phys: int, epoch: int = 1) -> CatalogState:
    return CatalogState(epoch=epoch, cursor=LogCursor(1, phys, NO_CHECK))


def test_a_silent_owner_is_fenced_after_the_lag() -> None:
    watch = StandbyWatch(LAG_MS)
    answers = [watch.may_take_over(at(5), has_lag=True, now_ms=now) for now in range(0, LAG_MS + 1, STEP_MS)]
    assert answers == [False] * (LAG_MS // STEP_MS) + [True]


def test_a_standby_says_when_it_takes_over() -> None:
    watch = StandbyWatch(LAG_MS)
    for_5m = "has had messages to archive for 5m 00s without any progress"
    assert for_5m in watch.plan and not watch.is_silent
    watch.may_take_over(at(5), has_lag=True, now_ms=0)
    assert (
        watch.plan == "this process takes over in 5m 00s unless the archive advances" and not watch.is_silent
    )
    watch.may_take_over(at(5), has_lag=True, now_ms=STEP_MS)
    assert watch.plan == "this process takes over in 4m 30s unless the archive advances" and watch.is_silent
    watch.may_take_over(at(6), has_lag=True, now_ms=2 * STEP_MS)
    assert not watch.is_silent
    watch.may_take_over(at(6), has_lag=False, now_ms=3 * STEP_MS)
    assert for_5m in watch.plan
    assert "--take-over" in StandbyWatch(0).plan
    assert not StandbyWatch(0).may_take_over(at(5), has_lag=True, now_ms=0)


@pytest.mark.parametrize("case", ["idle", "advances", "claimed by another", "log shorter"])
def test_a_writer_that_works_or_idles_is_left_alone(case: str) -> None:
    watch = StandbyWatch(LAG_MS)
    for step in range(100):
        state = at(step if case == "advances" else 5, step // 3 if case == "claimed by another" else 1)
        assert not watch.may_take_over(
            state, has_lag=case not in ("idle", "log shorter"), now_ms=step * STEP_MS
        )


def test_lag_that_was_caught_up_counts_from_its_next_beginning() -> None:
    watch = StandbyWatch(LAG_MS)
    assert not watch.may_take_over(at(5), has_lag=True, now_ms=0)
    assert not watch.may_take_over(at(5), has_lag=False, now_ms=LAG_MS - 1)
    assert not watch.may_take_over(at(5), has_lag=True, now_ms=LAG_MS)
    assert watch.may_take_over(at(5), has_lag=True, now_ms=2 * LAG_MS - 1)


def test_each_take_over_doubles_the_time_until_something_was_archived() -> None:
    watch = StandbyWatch(LAG_MS)
    taken = []
    for now_ms in range(0, 5 * WAIT_MAX_MS, STEP_MS):
        if watch.may_take_over(at(5), has_lag=True, now_ms=now_ms):
            taken.append(now_ms)
    between = [after - before for before, after in itertools.pairwise(taken)]
    assert (
        between == sorted(between) and between[0] >= 2 * LAG_MS and between[-1] <= WAIT_MAX_MS + 2 * STEP_MS
    )
    watch.archived()
    assert not watch.may_take_over(at(5), has_lag=True, now_ms=9 * WAIT_MAX_MS)
    assert watch.may_take_over(at(5), has_lag=True, now_ms=9 * WAIT_MAX_MS + LAG_MS)


@pytest.mark.parametrize("seed", range(20))
def test_two_living_candidates_do_not_alternate(seed: int) -> None:
    """Thirty minutes: the owner hangs for a while, or its host is slow; the other watches. One take-over at most."""
    rand = random.Random(seed)
    state, owner, take_overs = at(0), 0, 0
    watches = [StandbyWatch(LAG_MS), StandbyWatch(LAG_MS)]
    hangs_until_ms = rand.randint(0, 20) * 60_000  # the first owner, from the beginning
    log_phys = 0
    for now_ms in range(0, 30 * 60_000, 1_000):
        log_phys += 10
        if owner == 1 or now_ms >= hangs_until_ms:
            state = replace(state, cursor=LogCursor(1, log_phys, NO_CHECK))
            watches[owner].archived()
        standby = 1 - owner
        if now_ms % STEP_MS == standby * 7_000 and watches[standby].may_take_over(
            state, has_lag=log_phys > state.cursor.phys, now_ms=now_ms
        ):
            owner, take_overs = standby, take_overs + 1
            state = replace(state, epoch=state.epoch + 1)
    assert take_overs <= (hangs_until_ms >= LAG_MS)
    if hangs_until_ms > LAG_MS + 2 * STEP_MS:
        assert take_overs == 1
