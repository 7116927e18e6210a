"""Expiry plans: one test per rule, then a comparison with a plain oracle."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_tiered.maintenance.expire_plan import (
    NEVER_MS,
    PARENT_DTYPE,
    CommitTimes,
    ExpiryPlan,
    ExpiryPlanner,
    ExpiryQueues,
)
from tests.sweeps import examples
from tiered.model.tables import RUN_DTYPE, RunKind, Table
from tiered.settings.topic_rules import TopicRule

DAY = 100
NOW = 10_000
COMMITS = CommitTimes(np.arange(1, 11), np.arange(1, 11) * 1_000)
"""Version v was committed at 1000 v."""


@dataclass
class Run:
    """One run. ``parents``: (queue, one past the last offset) of LMQ entries."""

    rows: int = 1
    newest_ms: int = 0
    version: int = 1
    byte_count: int = 10
    parents: list[tuple[int, int]] | None = None
    gap: int = 0
    """Missing offsets in front of it."""
    age: int = 0
    """Order of the log in one version."""


@dataclass
class World:
    """Queues by number: topic and runs. ``floor``: minimum offsets."""

    rules: list[TopicRule]
    topics: list[int]
    runs: list[list[Run]]
    floor: list[int] = field(default_factory=list)
    erased: list[bool] = field(default_factory=list)

    def queues(self) -> ExpiryQueues:
        floor = self.floor or [0] * len(self.topics)
        erased = np.array(self.erased or [False] * len(self.topics))
        return ExpiryQueues(self.rules, np.array(self.topics, np.int64), np.array(floor, np.int64), erased)

    def places(self) -> list[list[tuple[int, int, Run]]]:
        """(begin, end, run) of every run, by queue."""
        found = []
        for runs in self.runs:
            offset, here = 0, []
            for run in runs:
                offset += run.gap
                here.append((offset, offset + run.rows, run))
                offset += run.rows
            found.append(here)
        return found

    def table(self) -> Table:
        rows = []
        for queue, runs in enumerate(self.places()):
            for begin, end, run in runs:
                table = np.zeros(1, RUN_DTYPE)
                table["queue"], table["version"] = queue, run.version
                table["kind"] = RunKind.PLAIN if run.parents is None else RunKind.LMQ
                table["base_queue_offset"], table["end_queue_offset"] = begin, end
                table["rows"], table["max_store_timestamp"] = run.rows, run.newest_ms
                table["byte_count"] = _bytes(run)
                table["end_phys"] = _end_phys(queue, run)
                table["min_phys"] = table["end_phys"] - 50
                rows.append(table)
        return np.concatenate(rows) if rows else np.zeros(0, RUN_DTYPE)

    def parents(self, runs: Table) -> Table:
        by_place = {(q, begin): run for q, runs in enumerate(self.places()) for begin, _, run in runs}
        found = [
            (number, queue, end)
            for number, row in enumerate(runs)
            for queue, end in by_place[int(row["queue"]), int(row["base_queue_offset"])].parents or ()
        ]
        return np.array(found, PARENT_DTYPE)

    def plan(self, pages: Sequence[Table] | None = None) -> ExpiryPlan:
        planner = ExpiryPlanner(self.queues(), COMMITS, NOW)
        for page in [self.table()] if pages is None else pages:
            planner.add(page)
        return planner.plan(self.parents, lambda run: None)


def _bytes(run: Run) -> int:
    return 0 if run.parents is not None else run.byte_count


def _end_phys(queue: int, run: Run) -> int:
    return 1_000_000 * run.version + 1_000 * run.age + 100 * queue


def rule(ttl_ms: int | None = None, max_bytes: int | None = None, min_archived_ms: int = 0) -> TopicRule:
    return TopicRule("t", ttl_ms, min_archived_ms, "", max_bytes, "", "FORCE", "")


def one_queue(own: TopicRule, *runs: Run, floor: int = 0) -> World:
    return World([own], [0], [list(runs)], [floor])


def floors(plan: ExpiryPlan) -> dict[int, tuple[int, int]]:
    """Queue -> (new minimum, rows)."""
    return {int(q): (int(low), int(rows)) for q, low, rows in plan.floors.tolist()}


# -- rules ----------------------------------------------------------------------------------------------------


def test_runs_expire_from_the_oldest_to_the_first_that_stays() -> None:
    old, young = Run(rows=2, newest_ms=NOW - DAY), Run(newest_ms=NOW - DAY + 1, version=10)
    plan = one_queue(rule(DAY), old, old, young, old).plan()
    assert floors(plan) == {0: (4, 4)}
    assert (plan.runs, plan.rows, plan.byte_count, plan.living_rows, plan.living_bytes) == (2, 4, 20, 7, 40)
    assert plan.next_due_ms.tolist() == [NOW + 1]
    assert plan.share == 0.5 and plan.exceeds(0.4) and not plan.exceeds(0.5)


def test_what_has_no_time_to_live_stays() -> None:
    plan = one_queue(rule(None), Run(newest_ms=-(1 << 63)), Run()).plan()
    assert floors(plan) == {} and plan.next_due_ms.tolist() == [NEVER_MS] and plan.share == 0


@pytest.mark.parametrize(("version", "expires"), [(9, True), (10, False), (11, False)])
def test_a_clock_of_1970_expires_nothing_before_its_time_in_the_bucket(version: int, expires: bool) -> None:
    """Version 9 was committed 1000 ms ago, 11 is newer than every known time."""
    plan = one_queue(rule(DAY, min_archived_ms=1_000), Run(newest_ms=0, version=version)).plan()
    assert bool(floors(plan)) is expires


@pytest.mark.parametrize("newest_ms", [NOW + 1, (1 << 63) - 1])
@pytest.mark.parametrize(("version", "expires"), [(9, True), (10, False), (11, False)])
def test_a_clock_of_the_future_keeps_nothing_beyond_its_time_in_the_bucket(
    newest_ms: int, version: int, expires: bool
) -> None:
    ahead = Run(newest_ms=newest_ms, version=version)
    assert floors(one_queue(rule(DAY), Run(), ahead, Run(version=9)).plan()) == {
        0: (3, 3) if expires else (1, 1)
    }


def test_a_size_limit_follows_the_order_of_the_log_whatever_the_times() -> None:
    runs = [
        [Run(newest_ms=NOW * 9, version=2), Run(newest_ms=100, version=4)],
        [Run(newest_ms=50, version=3), Run(newest_ms=60, version=5)],
    ]
    for limit, expected in ((30, {0: (1, 1)}), (20, {0: (1, 1), 1: (1, 1)}), (10, {0: (2, 2), 1: (1, 1)})):
        assert floors(World([rule(None, max_bytes=limit)], [0, 0], runs).plan()) == expected


def test_runs_below_the_floor_are_neither_expired_nor_counted_again() -> None:
    plan = one_queue(rule(DAY), Run(rows=5), Run(rows=2), Run(newest_ms=NOW, version=10), floor=5).plan()
    assert floors(plan) == {0: (7, 2)} and plan.living_rows == 3


def test_a_version_between_two_known_times_has_the_later_one() -> None:
    times = CommitTimes(np.array([5, 10]), np.array([900, 500]))
    assert times.of(np.array([1, 5, 6, 10, 11])).tolist() == [900, 900, 900, 900, NEVER_MS], (
        "times never fall"
    )


def test_a_size_limit_expires_the_oldest_of_a_topic_over_its_queues() -> None:
    runs = [
        [Run(newest_ms=9_000), Run(newest_ms=9_000, age=4)],
        [Run(newest_ms=9_000, age=2), Run(newest_ms=9_000, age=1)],
    ]
    for limit, expected in (
        (40, {}),
        (39, {0: (1, 1)}),
        (20, {0: (1, 1), 1: (1, 1)}),
        (10, {0: (1, 1), 1: (2, 2)}),
    ):
        world = World([rule(None, max_bytes=limit, min_archived_ms=1 << 40)], [0, 0], runs)
        assert floors(world.plan()) == expected
    assert floors(World([rule(DAY, max_bytes=1 << 30)], [0, 0], runs).plan()) == {0: (2, 2), 1: (2, 2)}


def test_lmq_entries_expire_with_the_last_of_their_messages() -> None:
    messages = [Run(rows=2), Run(rows=2, newest_ms=NOW, version=10)]
    entries = [
        Run(parents=[(0, 2)]),
        Run(parents=[(0, 1), (2, 4)]),
        Run(parents=[(0, 3)]),
        Run(parents=[(0, 1)]),
    ]
    world = World([rule(DAY), rule(None), rule(DAY)], [0, 1, 2], [messages, entries, [Run(rows=4)]])
    assert floors(world.plan()) == {0: (2, 2), 1: (2, 2), 2: (4, 4)}


def test_lmq_entries_stay_while_nothing_is_known_of_their_messages() -> None:
    assert floors(World([rule(DAY), rule(DAY)], [0, 1], [[Run()], [Run(parents=[])]]).plan()) == {0: (1, 1)}
    gone = World([rule(DAY), rule(DAY)], [0, 1], [[Run()], [Run(parents=[(-1, 5)])]])
    assert floors(gone.plan()) == {0: (1, 1), 1: (1, 1)}, "their queue is no longer in the archive"


def test_many_lmq_entries_are_requested_in_few_rounds() -> None:
    calls: list[int] = []
    entries = [Run(parents=[(0, 1)]) for _ in range(500)]
    world = World([rule(DAY)], [0, 0], [[Run()], entries])
    planner = ExpiryPlanner(world.queues(), COMMITS, NOW)
    planner.add(world.table())

    def counted(runs: Table) -> Table:
        calls.append(len(runs))
        return world.parents(runs)

    assert floors(planner.plan(counted, lambda run: None))[1] == (500, 500)
    assert len(calls) == 9 and sum(calls) == 500


def test_an_erased_queue_expires_as_a_whole_with_its_lmq_entries() -> None:
    world = World(
        [rule(None, min_archived_ms=1 << 40)], [0, 0], [[Run(newest_ms=NOW)], [Run(parents=[(0, 1)])]]
    )
    world.erased = [True, True]
    assert floors(world.plan()) == {0: (1, 1), 1: (1, 1)}
    world.erased = [True, False]
    assert floors(world.plan()) == {0: (1, 1), 1: (1, 1)}, "its entries refer to nothing else"


def test_runs_out_of_order_are_refused() -> None:
    table = one_queue(rule(DAY), Run(), Run(), Run()).table()
    for pages in ([table[::-1]], [table[1:], table[:1]]):
        with pytest.raises(ValueError, match="order of their offsets"):
            one_queue(rule(DAY), Run(), Run(), Run()).plan(pages)


def test_no_queues_and_no_runs() -> None:
    plan = World([], [], []).plan([np.zeros(0, RUN_DTYPE)])
    assert floors(plan) == {} and plan.share == 0


# -- oracle ---------------------------------------------------------------------------------------------------


def oracle(world: World) -> dict[int, int]:
    """Floors that rise, one run at a time."""
    low = list(world.floor)
    left = [[place for place in runs if place[1] > low[q]] for q, runs in enumerate(world.places())]

    def is_due(queue: int, run: Run) -> bool:
        own = world.rules[world.topics[queue]]
        if world.erased[queue]:
            return True
        return (
            own.ttl_ms is not None
            and min(run.newest_ms, 1_000 * run.version) + own.ttl_ms <= NOW
            and run.version <= 10
            and 1_000 * run.version + own.min_archived_ms <= NOW
        )

    def expire(queue: int) -> None:
        low[queue] = left[queue].pop(0)[1]

    def at_lmq(queue: int) -> bool:
        return left[queue][0][2].parents is not None and not world.erased[queue]

    waits = set()
    for queue in range(len(left)):
        while left[queue] and not at_lmq(queue) and is_due(queue, left[queue][0][2]):
            expire(queue)
        if left[queue] and at_lmq(queue):
            waits.add(queue)
    for topic, own in enumerate(world.rules):
        mine = [queue for queue in range(len(left)) if world.topics[queue] == topic]
        end_phys = dict.fromkeys(mine, 0)
        while (
            own.max_bytes is not None and sum(_bytes(r) for q in mine for _, _, r in left[q]) > own.max_bytes
        ):
            heads = [
                (max(end_phys[q] + left[q][0][2].rows, _end_phys(q, left[q][0][2])), q)
                for q in mine
                if left[q] and q not in waits and left[q][0][2].parents is None
            ]
            if not heads:
                break
            oldest, queue = min(heads)
            end_phys[queue] = oldest
            expire(queue)
    fixed = list(low)
    for queue in sorted(waits) if any(fixed) else ():
        while left[queue]:
            run = left[queue][0][2]
            own_parents = run.parents
            if own_parents is None:
                gone = is_due(queue, run)
            else:
                gone = bool(own_parents) and all(q < 0 or end <= fixed[q] for q, end in own_parents)
            if not gone:
                break
            expire(queue)
    return {queue: now for queue, (was, now) in enumerate(zip(world.floor, low, strict=True)) if now > was}


plain_runs = st.builds(
    Run,
    rows=st.integers(1, 3),
    newest_ms=st.sampled_from([0, 5_000, NOW - DAY, NOW - DAY + 1, NOW - 1, NOW + 50]),
    version=st.integers(1, 11),
    age=st.integers(0, 3),
    byte_count=st.integers(1, 20),
    gap=st.sampled_from([0, 0, 2]),
)
rules = st.builds(
    rule,
    ttl_ms=st.sampled_from([None, 1, DAY, 5_000]),
    max_bytes=st.sampled_from([None, None, 1, 30, 60]),
    min_archived_ms=st.sampled_from([0, 1_000, 5_000]),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Queues of messages first, which LMQs refer to; LMQs may hold messages of their own."""
    own = draw(st.lists(rules, min_size=1, max_size=3))
    count, lmqs = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    runs = [draw(st.lists(plain_runs, max_size=5)) for _ in range(count)]
    parent = st.tuples(st.integers(-1, count - 1), st.integers(0, 12))
    entries = st.builds(Run, rows=st.integers(1, 2), parents=st.lists(parent, max_size=2))
    runs += [draw(st.lists(st.one_of(entries, entries, plain_runs), max_size=5)) for _ in range(lmqs)]
    topics = [draw(st.integers(0, len(own) - 1)) for _ in runs]
    world = World(own, topics, runs)
    world.floor = [draw(st.sampled_from([0, *(end for _, end, _ in here)])) for here in world.places()]
    world.erased = [draw(st.sampled_from([False, False, False, True])) for _ in runs]
    return world


@settings(max_examples=examples(150), deadline=None)
@given(worlds(), st.lists(st.integers(0, 30), max_size=4))
def test_plans_equal_those_of_a_plain_oracle_however_runs_are_cut_into_pages(
    world: World, cuts: list[int]
) -> None:
    table = world.table()
    plan = world.plan(np.split(table, sorted({cut for cut in cuts if cut < len(table)})))
    expected = oracle(world)
    assert {queue: low for queue, (low, _) in floors(plan).items()} == expected
    gone = [
        run
        for queue, runs in enumerate(world.places())
        for _, end, run in runs
        if world.floor[queue] < end <= expected.get(queue, 0)
    ]
    assert (plan.runs, plan.rows) == (len(gone), sum(run.rows for run in gone))
    assert plan.byte_count == sum(map(_bytes, gone))
    living: Iterable[Run] = (
        run for queue, runs in enumerate(world.places()) for _, end, run in runs if end > world.floor[queue]
    )
    assert plan.living_bytes == sum(map(_bytes, living))


@settings(max_examples=examples(50), deadline=None)
@given(worlds())
def test_a_second_pass_at_the_same_time_raises_only_what_waited_for_others(world: World) -> None:
    for queue, (low, _) in floors(world.plan()).items():
        assert low > world.floor[queue], "floors only rise"
        world.floor[queue] = low
    alone = {
        queue
        for queue, runs in enumerate(world.runs)
        if all(run.parents is None for run in runs) and world.rules[world.topics[queue]].max_bytes is None
    }
    assert not alone & floors(world.plan()).keys()
