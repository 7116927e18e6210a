"""Compaction plans: S3Stream's fixtures, the published worked example, and rules for any candidates."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_tiered.maintenance.compaction_plan import DAY_MS, CompactionLimits, plan_join, plan_rewrite
from tests.maintenance.candidates import FIXTURE_F, FIXTURE_G, candidates_of, described, sources
from tests.sweeps import examples
from tiered.archive.rewrite.plan import Candidates, RewritePlan, length_of
from tiered.model.tables import RunKind, Table


def limits(split: int, memory: int = 1024, block: int = 0, **others: int) -> CompactionLimits:
    """As in the fixtures: memory counts message bytes alone."""
    return CompactionLimits(
        memory_bytes=memory, split_bytes=split, block_bytes=block, row_bytes=0, run_bytes=0, **others
    )


F = candidates_of(FIXTURE_F)
G = candidates_of(FIXTURE_G)


# -- S3Stream's tests ---------------------------------------------------------


def test_fixture_f_in_one_iteration() -> None:
    plan = plan_rewrite(F, limits(100))
    assert described(F, plan) == [
        [
            "SO 1: S1[25,120)205",
            "SO 2: S1[400,500)135",
            "SO 3: S2[30,60)65",
            "SSO 0: S0[0,20)89 S2[230,270)75",
        ]
    ]
    assert sources(plan) == [0, 1, 2]
    assert plan is not None
    assert (plan.first_version, plan.last_version, len(plan.kept)) == (1, 3, 0)


def test_fixture_f_in_two_iterations() -> None:
    assert described(F, plan_rewrite(F, limits(100, memory=300))) == [
        ["SO 1: S1[25,120)205", "SSO 0: S0[0,20)89"],
        ["SO 2: S1[400,500)135", "SO 3: S2[30,60)65", "SSO 0: S2[230,270)75"],
    ]


def test_fixture_f_of_stream_objects_alone() -> None:
    (iteration,) = described(F, plan_rewrite(F, limits(30)))
    assert [text.split(": ")[1] for text in iteration] == [
        "S0[0,20)89",
        "S1[25,120)205",
        "S1[400,500)135",
        "S2[30,60)65",
        "S2[230,270)75",
    ]
    assert all(text.startswith("SO") for text in iteration)


def test_above_the_limit_of_objects_the_newest_versions_wait() -> None:
    plan = plan_rewrite(F, limits(70, outputs_max=2))
    assert described(F, plan) == [["SO 0: S0[0,20)89", "SO 1: S1[25,120)205", "SSO 2: S2[30,60)65"]]
    assert sources(plan) == [0, 1]
    plan = plan_rewrite(G, limits(50, outputs_max=1))
    assert described(G, plan) == [["SO 1: S1[30,120)90", "SSO 0: S0[0,25)25 S2[30,60)30"]]
    plan = plan_rewrite(G, limits(29, outputs_max=2))
    assert described(G, plan) == [["SO 1: S1[30,120)90", "SO 2: S2[30,60)30", "SSO 0: S0[0,25)25"]]
    assert plan_rewrite(G, limits(29, outputs_max=1)) is None


def test_above_the_limit_of_queues_in_a_set_the_newest_versions_wait() -> None:
    assert plan_rewrite(G, limits(50, set_queues_max=1)) is None
    assert sources(plan_rewrite(G, limits(50, set_queues_max=2))) == [0, 1, 2]


@pytest.mark.parametrize("floor", [5, 15])
def test_what_is_below_the_floor_is_in_no_output(floor: int) -> None:
    """A run that the floor cuts stays whole."""
    cut = candidates_of(FIXTURE_F, {"S0": floor})
    (iteration,) = described(cut, plan_rewrite(cut, limits(100)))
    assert len(iteration) == 4
    assert iteration[-1].startswith("SSO 0: S0[0,20)89" if floor == 5 else "SSO 0: S0[15,20)44")
    assert sources(plan_rewrite(cut, limits(100))) == [0, 1, 2]


def test_floors_inside_every_queue() -> None:
    cut = candidates_of(FIXTURE_F, {"S0": 15, "S1": 60, "S2": 60})
    assert described(cut, plan_rewrite(cut, limits(100))) == [
        ["SO 1: S1[60,120)95", "SO 2: S1[400,500)135", "SSO 0: S0[15,20)44 S2[230,270)75"]
    ]


def test_objects_below_every_floor_leave_without_an_output() -> None:
    plan = plan_rewrite(candidates_of(FIXTURE_F, {"S0": 20, "S1": 500, "S2": 270}), limits(100))
    assert sources(plan) == [0, 1, 2]
    assert plan is not None
    assert (plan.outputs, plan.iterations) == ([], [])
    assert sources(plan_rewrite(candidates_of(["S0[0,10)"], {"S0": 10}), limits(100))) == [0]


def test_objects_that_share_no_queue_stay() -> None:
    apart = candidates_of(["S0[0,10) S1[0,10)", "S0[10,20) S1[10,20)", "S2[0,10)", "S3[0,10)"])
    plan = plan_rewrite(apart, limits(100))
    assert sources(plan) == [0, 1]
    assert plan is not None
    assert [int(apart.runs["object"][run]) for run in plan.kept] == [2, 3]
    assert plan.last_version == 4, "a plan covers whole versions"
    assert plan_rewrite(candidates_of(["S0[0,10)"]), limits(100)) is None
    assert plan_rewrite(candidates_of([]), limits(100)) is None


def test_objects_pending_deletion_are_ignored() -> None:
    plan = plan_rewrite(replace(F, is_fixed=np.array([False, False, True])), limits(100))
    assert sources(plan) == [0, 1]
    assert plan is not None
    assert len(plan.kept) == 0


def test_a_run_larger_than_memory_needs_cuts() -> None:
    with pytest.raises(ValueError, match="cannot be compacted in"):
        plan_rewrite(F, limits(100, memory=50))
    plan = plan_rewrite(F, limits(100, memory=50, block=10))
    assert plan is not None
    assert len(plan.iterations) > 10


def test_runs_that_overlap_are_no_plan() -> None:
    twice = candidates_of(["S0[0,10)", "S0[9,20)"])
    with pytest.raises(ValueError, match=r"S0.* overlap at queue offset 9"):
        plan_rewrite(twice, limits(100))


# -- the published example ----------------------------------------------------

EXAMPLE = candidates_of(["S0[0,20) S1[30,60) S3[210,230)", "S0[20,25) S1[60,120)", "S2[400,500) S3[230,270)"])


def test_the_worked_example_takes_two_iterations() -> None:
    plan = plan_rewrite(EXAMPLE, limits(80, memory=150, block=5))
    assert described(EXAMPLE, plan) == [
        ["SO 1: S1[30,120)90", "SO 2: S2[400,435)35", "SSO 0: S0[0,25)25"],
        ["SO 3: S2[435,500)65", "SSO 0: S3[210,270)60"],
    ]


def test_the_worked_example_without_cuts_takes_three() -> None:
    plan = plan_rewrite(EXAMPLE, limits(80, memory=150))
    sizes = [sum(int(text.rsplit(")")[-1]) for text in parts) for parts in described(EXAMPLE, plan)]
    assert [len(parts) for parts in described(EXAMPLE, plan)] == [2, 2, 1]
    assert sizes[-1] == 40


# -- what is never mixed ------------------------------------------------------


def test_kinds_are_never_in_one_sequence() -> None:
    runs = F.runs.copy()
    runs["kind"][2] = RunKind.BATCH
    mixed = replace(F, runs=runs)
    (iteration,) = described(mixed, plan_rewrite(mixed, limits(109)))
    assert iteration[-1] == "SSO 0: S0[0,20)89 S1[25,60)110 S2[230,270)75", "45 and 65 are two sequences"


def test_ttl_classes_have_their_own_objects() -> None:
    mixed = replace(G, objects=G.objects.copy())
    mixed.objects["ttl_class_days"] = [0, 0, 7]
    plan = plan_rewrite(mixed, limits(1000))
    assert plan is not None
    assert [(output.is_set, output.ttl_class_days) for output in plan.outputs] == [(True, 0), (True, 7)]
    for iteration in plan.iterations:
        for part in iteration:
            classes = mixed.objects["ttl_class_days"][mixed.runs["object"][part.ranges["run"]]]
            assert set(classes.tolist()) == {plan.outputs[part.output].ttl_class_days}


def test_index_files_have_their_own_objects() -> None:
    """Else the keys of an object would be in two files, and neither could be rebuilt from its versions."""
    flat = candidates_of([f"S0[{10 * n},{10 * n + 10}) S1[{n},{n + 1})" for n in range(6)])
    flat = replace(flat, covers=(1, 3, 5))
    plan = plan_rewrite(flat, limits(1000))
    assert described(flat, plan) == [
        ["SSO 0: S0[0,20)20 S1[0,2)2", "SSO 1: S0[20,40)20 S1[2,4)2", "SSO 2: S0[40,60)20 S1[4,6)2"]
    ]
    assert plan is not None
    assert [output.version for output in plan.outputs] == [2, 4, 6]


def test_sets_are_cut_between_queues() -> None:
    flat = candidates_of(["S0[0,20) S1[0,30) S2[0,30)", "S0[20,50) S1[30,40) S2[30,60)"])
    assert described(flat, plan_rewrite(flat, limits(1000, set_bytes_max=90))) == [
        ["SSO 0: S0[0,50)50 S1[0,40)40", "SSO 1: S2[0,60)60"]
    ]


def test_objects_have_a_limited_number_of_rows() -> None:
    """A reader fetches the columns of all rows of an object before its first message."""
    flat = candidates_of([f"S0[{10 * n},{10 * n + 10}) S1[{5 * n},{5 * n + 5})" for n in range(6)])
    few = limits(1000, object_rows_max=70)
    assert described(flat, plan_rewrite(flat, few)) == [["SSO 0: S0[0,60)60", "SSO 1: S1[0,30)30"]]
    alone = limits(15, object_rows_max=25, block=5)
    assert described(flat, plan_rewrite(flat, alone)) == [
        ["SO 0: S0[0,25)25", "SO 1: S0[25,50)25", "SO 2: S0[50,60)10", "SO 3: S1[0,25)25", "SO 4: S1[25,30)5"]
    ]
    small = stream_objects(*(f"S0[{10 * n},{10 * n + 10})" for n in range(4)))
    assert plan_join(small, limits(0, object_rows_max=19)) is None
    assert described(small, plan_join(small, limits(0, object_rows_max=30))) == [["SO 0: S0[0,30)30"]]


def test_small_stream_objects_of_single_queue_cycles_take_part() -> None:
    """Else each would be a gap in its queue, and what is in front of it an object of its own."""
    cycles = candidates_of(
        ["S0[0,10) S1[0,10)", "S0[10,20)", "S0[20,30) S1[10,20)", "S0[30,90)", "S0[90,95) S1[20,30)"]
    )
    cycles = replace(cycles, is_set=np.array([True, False, True, False, True]))
    plan = plan_rewrite(cycles, limits(50))
    assert described(cycles, plan) == [["SO 0: S0[0,30)30", "SSO 1: S0[90,95)5 S1[0,30)30"]]
    assert sources(plan) == [0, 1, 2, 4]


# -- level 2 ------------------------------------------------------------------


def stream_objects(*texts: str) -> Candidates:
    return replace(candidates_of(texts), is_set=np.zeros(len(texts), bool))


def test_level_2_joins_neighbours_up_to_the_largest_object() -> None:
    small = stream_objects(*(f"S0[{10 * n},{10 * n + 10})" for n in range(7)), "S1[0,10)", "S1[20,30)")
    plan = plan_join(small, limits(0, object_bytes_max=30, joined_bytes_min=25))
    assert described(small, plan) == [["SO 0: S0[0,30)30"], ["SO 1: S0[30,60)30"]]
    assert sources(plan) == [0, 1, 2, 3, 4, 5]
    assert plan is not None
    assert sorted(int(small.runs["object"][run]) for run in plan.kept) == [6, 7, 8]
    assert plan_join(small, limits(0, object_bytes_max=10, joined_bytes_min=10)) is None


def test_level_2_leaves_large_objects_and_days_alone() -> None:
    some = stream_objects("S0[0,10)", "S0[10,20)", "S0[20,80)", "S0[80,90)", "S0[90,100)", "S0[100,110)")
    some.runs["min_store_timestamp"] = np.array([0, 1, 2, 3, 4, DAY_MS])
    plan = plan_join(some, limits(0, object_bytes_max=100, joined_bytes_min=50))
    assert described(some, plan) == [["SO 0: S0[0,20)20"], ["SO 1: S0[80,100)20"]]


def test_level_2_waits_for_enough_objects() -> None:
    some = stream_objects("S0[0,10)", "S0[10,20)", "S0[20,30)")
    assert plan_join(some, limits(0, sources_min=4)) is None
    assert plan_join(some, limits(0, sources_min=3)) is not None
    assert plan_join(replace(some, is_fixed=np.ones(3, bool)), limits(0)) is None


# -- rules --------------------------------------------------------------------


@st.composite
def any_candidates(draw: st.DrawFn) -> Candidates:
    """Cycles of an uploader: each object holds at most one run of a queue; some have gaps, floors, other kinds."""
    cycles = draw(
        st.lists(
            st.dictionaries(
                st.integers(0, 5),
                st.tuples(st.integers(1, 40), st.integers(0, 9), st.integers(1, 9)),
                min_size=1,
            ),
            min_size=1,
            max_size=12,
        )
    )
    ends: dict[int, int] = {}
    texts = []
    for cycle in cycles:
        words = []
        for queue, (rows, skip, size) in sorted(cycle.items()):
            base = ends.get(queue, 0) + (skip - 5 if skip > 5 else 0)
            ends[queue] = base + rows
            words.append(f"S{queue}[{base},{ends[queue]}){rows * size}")
        texts.append(" ".join(words))
    floors = {f"S{queue}": draw(st.integers(0, end + 5)) for queue, end in ends.items()}
    found = candidates_of(texts, floors)
    found.runs["kind"] = draw(st.sampled_from([RunKind.PLAIN, RunKind.BATCH, RunKind.LMQ]))
    if found.runs["kind"][0] == RunKind.LMQ:
        found.runs["byte_count"], found.runs["base_byte"] = 0, 0
    classes = draw(st.lists(st.integers(0, 1), min_size=len(texts), max_size=len(texts)))
    is_set = draw(
        st.lists(st.sampled_from([True, True, True, False]), min_size=len(texts), max_size=len(texts))
    )
    found.objects["ttl_class_days"] = classes
    covers = draw(st.lists(st.integers(1, len(texts)), unique=True, max_size=3))
    return replace(found, is_set=np.array(is_set), covers=tuple(sorted(covers)))


LIMITS = st.builds(
    CompactionLimits,
    memory_bytes=st.integers(60, 3000),
    split_bytes=st.integers(0, 500),
    block_bytes=st.integers(1, 50),
    object_bytes_max=st.integers(50, 500),
    set_bytes_max=st.integers(50, 1000),
    object_rows_max=st.sampled_from([40, 10_000]),
    row_bytes=st.integers(0, 3),
    run_bytes=st.just(0),
    outputs_max=st.sampled_from([3, 1000]),
    set_queues_max=st.sampled_from([2, 1000]),
)


def moved_and_kept(candidates: Candidates, plan: RewritePlan) -> None:
    """Every live run of the versions is kept, or is in outputs from end to end, once; dead ones are not."""
    runs = candidates.runs
    is_in = (runs["version"] >= plan.first_version) & (runs["version"] <= plan.last_version)
    live = is_in & (runs["end_queue_offset"] > candidates.floors[runs["queue"]])
    ranges = defaultdict(list)
    for iteration in plan.iterations:
        for part in iteration:
            for run, begin, end in part.ranges.tolist():
                ranges[run].append((begin, end))
    is_source = np.isin(runs["object"], plan.sources)
    assert set(ranges) == set(np.flatnonzero(live & is_source).tolist())
    assert set(plan.kept.tolist()) == set(np.flatnonzero(live & ~is_source).tolist())
    for run, found in ranges.items():
        assert [begin for begin, _ in found] == [0] + [end for _, end in found[:-1]]
        assert found[-1][1] == int(length_of(runs[run : run + 1])[0])
        assert all(begin < end for begin, end in found)


def within_one_index_file(candidates: Candidates, plan: RewritePlan, rows: Table, version: int) -> bool:
    """Whether one index file covers ``rows`` and ``version``, which is none of a later plan."""
    versions = [*rows["version"].tolist(), version]
    files = {sum(first <= one for first in candidates.covers) for one in versions}
    return len(files) == 1 and max(versions) == version <= plan.last_version


@settings(max_examples=examples(150), deadline=None)
@given(candidates=any_candidates(), bounds=LIMITS)
def test_level_1_moves_every_live_row_once_in_order_within_memory(
    candidates: Candidates, bounds: CompactionLimits
) -> None:
    plan = plan_rewrite(candidates, bounds)
    if plan is None:
        return
    moved_and_kept(candidates, plan)
    runs = candidates.runs
    seen: dict[int, tuple[int, int]] = {}
    for iteration in plan.iterations:
        memory = 0.0
        for part in iteration:
            for run, begin, end in part.ranges.tolist():
                row = runs[run]
                cost = int(row["byte_count"]) + bounds.row_bytes * int(row["rows"])
                memory += cost * (end - begin) / int(length_of(runs[run : run + 1])[0])
            rows = runs[part.ranges["run"]]
            sizes = np.bincount(runs["object"], weights=runs["byte_count"])[rows["object"]]
            assert (candidates.is_set[rows["object"]] | (sizes <= bounds.split_bytes)).all()
            assert set(candidates.objects["ttl_class_days"][rows["object"]].tolist()) == {
                plan.outputs[part.output].ttl_class_days
            }
            assert within_one_index_file(candidates, plan, rows, plan.outputs[part.output].version)
            if not plan.outputs[part.output].is_set:
                assert part.output not in seen, "an SO ends with its iteration"
                assert len(set(rows["queue"].tolist())) == 1
                assert (rows["base_queue_offset"][1:] == rows["end_queue_offset"][:-1]).all()
                moved = int((part.ranges["end"] - part.ranges["begin"]).sum())
                assert runs["kind"][0] == RunKind.LMQ or moved <= bounds.object_bytes_max + bounds.block_bytes
            for run in part.ranges["run"].tolist():
                place = (int(runs["queue"][run]), int(runs["base_queue_offset"][run]))
                assert seen.get(part.output, (-1, -1)) <= place
                seen[part.output] = place
        unit = bounds.block_bytes * (1 + bounds.row_bytes)
        if runs["kind"][0] != RunKind.LMQ:
            assert memory <= max(bounds.memory_bytes, unit) + 1e-6  # rounding of the sum
    sequences = {int(runs["queue"][part.ranges["run"][0]]) for it in plan.iterations for part in it}
    assert len(sequences) <= len(candidates.queues)


@settings(max_examples=examples(100), deadline=None)
@given(candidates=any_candidates(), bounds=LIMITS)
def test_level_2_joins_whole_neighbouring_objects(candidates: Candidates, bounds: CompactionLimits) -> None:
    plan = plan_join(replace(candidates, is_set=np.zeros(len(candidates.objects), bool)), bounds)
    if plan is None:
        return
    moved_and_kept(candidates, plan)
    for (part,) in plan.iterations:
        rows = candidates.runs[part.ranges["run"]]
        assert len(rows) >= 2
        assert within_one_index_file(candidates, plan, rows, plan.outputs[part.output].version)
        assert (rows["base_queue_offset"][1:] == rows["end_queue_offset"][:-1]).all()
        assert int(rows["byte_count"].sum()) <= bounds.object_bytes_max


@settings(max_examples=examples(100), deadline=None)
@given(candidates=any_candidates(), bounds=LIMITS)
def test_level_1_reads_each_source_once_an_iteration(
    candidates: Candidates, bounds: CompactionLimits
) -> None:
    """Live runs of a source that an iteration needs are neighbours: only dead runs lie between them."""
    plan = plan_rewrite(candidates, bounds)
    if plan is None:
        return
    runs = candidates.runs
    live = runs["end_queue_offset"] > candidates.floors[runs["queue"]]
    for iteration in plan.iterations:
        needed = np.unique(np.concatenate([part.ranges["run"] for part in iteration]))
        for source in np.unique(runs["object"][needed]):
            mine = np.flatnonzero(live & (runs["object"] == source))
            assert (np.diff(np.flatnonzero(np.isin(mine, needed))) == 1).all()
