"""When rounds of compaction are due, and what they write in months."""

from dataclasses import replace

import numpy as np
import pytest

from rocketmq_tiered.maintenance import compaction_plan
from rocketmq_tiered.maintenance.compaction_plan import (
    CompactionDue,
    CompactionLimits,
    gains,
    plan_join,
    plan_rewrite,
    reader_gets,
)
from tests.maintenance.candidates import candidates_of
from tiered.archive.rewrite.plan import RANGE_DTYPE, Candidates, OutputPart, PlannedOutput, RewritePlan
from tiered.formats.keys import COMPACTION_ATTEMPTS_FROM, data_key, is_compacted, set_key
from tiered.model.queue import QueueKey

LIMITS = CompactionLimits(
    memory_bytes=10_000,
    split_bytes=800,
    block_bytes=0,
    object_bytes_max=1000,
    set_bytes_max=1000,
    row_bytes=0,
    run_bytes=0,
    joined_bytes_min=500,
    growth_min=32,
    dead_share_min=0.5,
)

DAYS = 150


def planned(candidates: Candidates) -> RewritePlan:
    plan = plan_rewrite(candidates, LIMITS)
    assert plan is not None
    return plan


def test_keys_tell_what_compaction_wrote() -> None:
    for attempt, expected in (
        (7, False),
        (10**9, False),
        (COMPACTION_ATTEMPTS_FROM, True),
        ((1 << 39) * 10**6, True),
    ):
        assert is_compacted(set_key("3_9_0", 1, attempt)) is expected
        assert is_compacted(data_key(QueueKey("a-b.1", 0, 0), 5, 1, attempt)) is expected


def test_small_objects_wait_until_they_are_many_bytes_or_runs_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = candidates_of([f"a[{n},{n + 1})10 b[{n},{n + 1})10" for n in range(8)])
    candidates.runs["min_store_timestamp"] = np.arange(16) // 2 + 100
    candidates.objects["raw_bytes"] = 20
    plan = planned(candidates)
    assert gains(candidates, plan)
    assert not CompactionDue(161, 100)(candidates, plan)
    assert CompactionDue(160, 100)(candidates, plan)
    assert CompactionDue(161, 101)(candidates, plan)
    for runs_full in (17, 16):
        monkeypatch.setattr(compaction_plan, "RUNS_FULL", runs_full)
        assert CompactionDue(161, 100)(candidates, plan) is (runs_full == 16)


def test_a_plan_that_saves_gets_alone_is_worth_it_but_not_of_a_busy_broker() -> None:
    """Objects become no fewer, but each queue is in one instead of four."""
    candidates = candidates_of([f"a[{n},{n + 1})900 b[{n},{n + 1})900 c[{n},{n + 1})900" for n in range(4)])
    candidates.objects["raw_bytes"] = candidates.objects["size_bytes"] = 2700
    plan = planned(candidates)
    assert len(plan.outputs) * 2 > len(plan.sources)
    assert reader_gets(candidates, plan) == (24, 24), "objects of 1000 bytes: each run is one again"
    assert not gains(candidates, plan)
    large = plan_rewrite(candidates, replace(LIMITS, object_bytes_max=10_000, memory_bytes=100_000))
    assert large is not None
    assert reader_gets(candidates, large) == (24, 6)
    assert gains(candidates, large)
    assert CompactionDue(0, 0)(candidates, large), "four times fewer"
    three = candidates_of([f"a[{n},{n + 1})900 b[{n},{n + 1})900 c[{n},{n + 1})900" for n in range(3)])
    plan = plan_rewrite(three, replace(LIMITS, object_bytes_max=10_000, memory_bytes=100_000))
    assert plan is not None
    assert gains(three, plan)
    assert not CompactionDue(0, 0)(three, plan)


def test_parts_of_a_large_object_are_counted_in_gets() -> None:
    candidates = candidates_of(["a[0,9)9000000 b[0,9)1", "a[9,18)9000000 b[9,18)1"])
    candidates.objects["raw_bytes"] = 9_000_001
    candidates.objects["size_bytes"] = 4_500_001  # half of it compressed
    plan = plan_rewrite(candidates, CompactionLimits())
    assert plan is not None
    # Tails, and blocks: two for 4.5 MB, one for a byte. Then 9 MB in one object.
    assert reader_gets(candidates, plan) == (4 + 2 * 2 + 2 * 1, 2 + 3 + 1)


def test_sources_that_other_rounds_share_count_in_parts() -> None:
    candidates = candidates_of([f"{queue}[0,1)10" for queue in "abcd"])
    ranges = np.array([(0, 0, 10), (1, 0, 10), (2, 0, 10), (3, 0, 10)], RANGE_DTYPE)
    plan = RewritePlan(
        1,
        4,
        np.arange(4),
        np.zeros(0, np.int64),
        outputs=[PlannedOutput(True, 0, 4)] * 2,
        iterations=[[OutputPart(0, ranges[:2]), OutputPart(1, ranges[2:])]],
    )
    assert gains(candidates, plan)
    assert not gains(replace(candidates, share=np.full(4, 0.9)), plan)


def test_a_layer_is_moved_among_many_times_its_bytes() -> None:
    """Of what a compaction wrote all objects count together."""
    objects = [
        (set_key(f"9_{n}", 1, COMPACTION_ATTEMPTS_FROM), {q: (0, 10, 40)}) for n, q in enumerate("abcd")
    ]
    new = [(set_key(f"{n}", 1, 1), dict.fromkeys("abcd", (10 + n, 11 + n, 40))) for n in range(40)]
    for count, is_moved in ((30, False), (31, True)):
        candidates = _candidates([*objects, *new[:count]])
        candidates.runs["version"][:4] = 1
        plan = plan_rewrite(candidates, replace(LIMITS, set_bytes_max=10**6, memory_bytes=10**6))
        assert plan is not None
        assert set(range(4)) <= set(plan.sources.tolist()) or not is_moved
        assert (0 in plan.sources) is is_moved


def test_a_layer_of_other_queues_holds_nothing_up() -> None:
    """Earlier rounds have moved other queues of the same objects, and the first rows of b."""
    layer = (set_key("9", 1, COMPACTION_ATTEMPTS_FROM), {"a": (0, 10, 900), "b": (0, 10, 900)})
    objects = [(set_key(f"{n}", 1, 1), dict.fromkeys("bcd", (n, n + 1, 90))) for n in range(10, 20)]
    candidates = _candidates([*objects, layer])
    plan = plan_rewrite(candidates, replace(LIMITS, set_bytes_max=10**6, memory_bytes=10**6))
    assert plan is not None
    assert plan.sources.tolist() == list(range(10))
    behind = [(set_key(f"{n}", 1, 1), dict.fromkeys("bcd", (n, n + 1, 90))) for n in range(10)]
    later = (layer[0], {"b": (20, 30, 1800)})
    assert plan_rewrite(_candidates([*behind, later]), LIMITS) is None, "it would tear a gap"


def test_mostly_dead_sets_are_rewritten_for_their_space() -> None:
    candidates = candidates_of(["a[0,5)500 b[0,5)10", "b[5,9)90 a[5,9)4"], {"a": 5})
    candidates.objects["raw_bytes"] = 510, 94
    plan = planned(candidates)
    assert plan.sources.tolist() == [0, 1]
    assert CompactionDue(10**9, 0)(candidates, plan)
    alone = candidates_of(["a[0,5)500 b[0,5)10", "c[5,9)90"], {"a": 5})
    alone.objects["raw_bytes"] = 510, 90
    assert planned(alone).sources.tolist() == [0], "it shares its queues with no other"
    assert plan_rewrite(alone, replace(LIMITS, dead_share_min=2.0)) is None


@pytest.mark.parametrize("day_bytes", [48, 480])
def test_a_byte_is_written_twice_in_months(day_bytes: int) -> None:
    """Days of 12 cycles with four queues, joined day by day: written bytes, and objects a queue lies in at the end.
    A full object has 1000 bytes."""
    objects: list[tuple[str, dict[str, tuple[int, int, int]]]] = []
    written = archived = ends = 0
    for day in range(DAYS):
        for cycle in range(12):
            size = day_bytes // 48 or 1
            runs = dict.fromkeys("abcd", (ends, ends + 1, size))
            objects.append((set_key(f"{day}_{cycle}", 1, 1), runs))
            ends, archived = ends + 1, archived + 4 * size
        for level in (plan_rewrite, plan_join):
            candidates = _candidates(objects)
            plan = level(candidates, LIMITS)
            if plan is None or not CompactionDue(16_000, 1)(candidates, plan):
                continue
            if not plan.copies:
                written += sum(int(candidates.objects["raw_bytes"][n]) for n in plan.sources.tolist())
            objects = _after(objects, candidates, plan, day)
    holding = max(sum(queue in runs for _, runs in objects) for queue in "abcd")
    assert written <= 2.1 * archived, written / archived
    assert holding <= DAYS + archived // 4 // 500


def _candidates(objects: list[tuple[str, dict[str, tuple[int, int, int]]]]) -> Candidates:
    texts = [" ".join(f"{q}[{b},{e}){s}" for q, (b, e, s) in runs.items()) for _, runs in objects]
    found = candidates_of(texts)
    found.objects["raw_bytes"] = [sum(size for _, _, size in runs.values()) for _, runs in objects]
    return replace(
        found,
        object_keys=[key for key, _ in objects],
        is_set=np.array([key.startswith("sets/") for key, _ in objects], bool),
    )


def _after(
    objects: list[tuple[str, dict[str, tuple[int, int, int]]]],
    candidates: Candidates,
    plan: RewritePlan,
    day: int,
) -> list[tuple[str, dict[str, tuple[int, int, int]]]]:
    """What is left, and the outputs, in the order of their last version."""
    made: dict[int, dict[str, tuple[int, int, int]]] = {}
    for iteration in plan.iterations:
        for part in iteration:
            runs = made.setdefault(part.output, {})
            for one in part.ranges:
                row = candidates.runs[int(one["run"])]
                queue = candidates.queues[int(row["queue"])].topic
                share = (int(one["end"]) - int(one["begin"])) / max(1, int(row["byte_count"]))
                assert share == 1, "no run is cut at these sizes"
                base, end, size = (
                    int(row["base_queue_offset"]),
                    int(row["end_queue_offset"]),
                    int(row["byte_count"]),
                )
                before = runs.get(queue)
                assert before is None or before[1] == base
                runs[queue] = (base, end, size) if before is None else (before[0], end, before[2] + size)
    gone = set(plan.sources.tolist())
    kept = [one for number, one in enumerate(objects) if number not in gone]
    attempt = COMPACTION_ATTEMPTS_FROM + day
    outputs = [
        (
            set_key(f"{day}_{number}", 1, attempt)
            if plan.outputs[number].is_set
            else data_key(QueueKey(next(iter(runs)), 0, 0), 0, 1, attempt),
            runs,
        )
        for number, runs in sorted(made.items())
    ]
    return kept + outputs
