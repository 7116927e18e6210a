"""What a cycle becomes: runs, gaps, generations, LMQs, objects. One test per rule, then a property."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.record_builder import Message, build_log, properties
from tests.sweeps import examples
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import RecordColumns, StopReason, scan_log
from tiered.model.queue import QueueKey, TopicFilter
from tiered.model.tables import GapReason, RunKind
from tiered.settings.rule_entries import RuleEntry
from tiered.settings.topic_rules import TopicRules
from uploader.cycle_draft import object_key
from uploader.cycle_plan import CyclePlan, CyclePlanner
from uploader.queue_tails import QueueTails
from uploader.queue_ttl_classes import QueueTtlClasses

FAR = 1 << 40


class Writer:
    """Table, tails and planner over consecutive pieces of one log."""

    def __init__(
        self,
        topic_filter: TopicFilter | None = None,
        split_bytes: int = 1 << 30,
        classes: QueueTtlClasses | None = None,
    ) -> None:
        self.filter = topic_filter or TopicFilter()
        self.table = QueueTable()
        self.tails = QueueTails()
        self.planner = CyclePlanner(self.table, self.tails, split_bytes=split_bytes, ttl_classes=classes)
        self.phys = 0
        self.arena = b""

    def plan(self, messages: Sequence[Message], excluded: Sequence[int] = ()) -> CyclePlan:
        self.arena = build_log(messages, self.phys)
        arena = np.frombuffer(self.arena, np.uint8)
        columns = RecordColumns()
        stop = scan_log(arena, 0, len(arena), self.phys, FAR, self.table, columns, delay_levels_ms=None)
        assert stop.reason == StopReason.INPUT_END
        assert stop.position == len(arena)
        for ordinal in range(len(self.table)):
            self.table.admitted[ordinal] = self.filter.admits(self.table.topic(ordinal))
        self.phys += len(arena)
        return self.planner.plan(columns, gap_reason=GapReason.NEVER_WRITTEN, excluded=excluded)

    def plan_and_apply(self, messages: Sequence[Message]) -> CyclePlan:
        plan = self.plan(messages)
        self.tails.apply(plan.change)
        return plan


def runs_of(plan: CyclePlan) -> dict[QueueKey, list[tuple[int, int]]]:
    found: dict[QueueKey, list[tuple[int, int]]] = {}
    for item in plan.objects:
        for run in item.runs:
            found.setdefault(item.queues[run["queue"]], []).append(
                (int(run["base_queue_offset"]), int(run["end_queue_offset"]))
            )
    return found


def message(topic: bytes, queue_offset: int, **more: object) -> Message:
    return Message(topic=topic, queue_offset=queue_offset).with_(**more)


@pytest.fixture
def writer() -> Writer:
    return Writer()


def test_consecutive_offsets_make_one_run_and_bytes_add_up(writer: Writer) -> None:
    first = writer.plan_and_apply([message(b"a", 0), message(b"b", 7), message(b"a", 1)])
    assert runs_of(first) == {QueueKey("a", 0, 0): [(0, 2)], QueueKey("b", 0, 0): [(7, 8)]}
    second = writer.plan_and_apply([message(b"a", 2)])
    (run,) = second.objects[0].runs
    first_bytes = int(first.objects[0].runs["byte_count"][0])
    assert int(run["base_byte"]) == first_bytes
    assert not first.gaps + second.gaps


def test_a_jump_is_a_gap_within_a_cycle_and_between_cycles(writer: Writer) -> None:
    plan = writer.plan_and_apply([message(b"a", 0), message(b"a", 3)])
    assert [(gap.begin_queue_offset, gap.end_queue_offset) for gap in plan.gaps] == [(1, 3)]
    plan = writer.plan_and_apply([message(b"a", 9)])
    assert [(gap.begin_queue_offset, gap.end_queue_offset) for gap in plan.gaps] == [(4, 9)]
    assert plan.gaps[0].reason == GapReason.NEVER_WRITTEN


def test_a_lower_offset_is_a_new_generation_of_a_recreated_topic(writer: Writer) -> None:
    plan = writer.plan_and_apply([message(b"a", 5), message(b"a", 6), message(b"a", 0), message(b"a", 1)])
    assert runs_of(plan) == {QueueKey("a", 0, 0): [(5, 7)], QueueKey("a", 0, 1): [(0, 2)]}
    assert plan.objects[0].runs["base_byte"].tolist() == [0, 0]
    assert runs_of(writer.plan_and_apply([message(b"a", 2)])) == {QueueKey("a", 0, 1): [(2, 3)]}
    assert runs_of(writer.plan_and_apply([message(b"a", 2)])) == {QueueKey("a", 0, 2): [(2, 3)]}


def test_a_row_that_does_not_continue_its_queue_is_unusual(writer: Writer) -> None:
    first = writer.plan_and_apply([message(b"a", 0), message(b"late", 5), message(b"b", 0), message(b"b", 4)])
    assert [(writer.table.topic(ordinal), end) for ordinal, end in first.unusual] == [("late", -1), ("b", -1)]
    assert writer.plan_and_apply([message(b"a", 1), message(b"late", 6), message(b"b", 5)]).unusual == []
    second = writer.plan_and_apply([message(b"a", 3), message(b"late", 6)])
    assert [(writer.table.topic(ordinal), end) for ordinal, end in second.unusual] == [("a", 2), ("late", 7)]


def test_an_excluded_row_leaves_a_gap_in_its_queue_and_in_lmqs(writer: Writer) -> None:
    plan = writer.plan([message(b"p", 0), message(b"p", 1, properties=LMQ), message(b"p", 2)], excluded=[1])
    assert runs_of(plan) == {QueueKey("p", 0, 0): [(0, 1), (2, 3)]}
    assert [(gap.begin_queue_offset, gap.end_queue_offset) for gap in plan.gaps] == [(1, 2)]
    assert writer.plan([message(b"p", 0)], excluded=[0]).objects == []


def test_inner_batches_count_by_inner_num() -> None:
    batch = properties((b"INNER_BASE", b"10"), (b"INNER_NUM", b"4"))
    writer = Writer()
    plan = writer.plan_and_apply(
        [
            message(b"a", 10, sys_flag=0x80, properties=batch),
            message(
                b"a", 14, sys_flag=0x80, properties=properties((b"INNER_BASE", b"14"), (b"INNER_NUM", b"2"))
            ),
        ]
    )
    assert runs_of(plan) == {QueueKey("a", 0, 0): [(10, 16)]}
    assert plan.objects[0].runs["kind"].tolist() == [RunKind.BATCH]
    assert plan.objects[0].runs["rows"].tolist() == [2]


LMQ = properties((b"INNER_MULTI_DISPATCH", b"%LMQ%x,%LMQ%y"), (b"INNER_MULTI_QUEUE_OFFSET", b"3,8"))


def test_an_lmq_refers_to_its_parent_and_stores_no_bytes() -> None:
    (item,) = Writer().plan_and_apply([message(b"p", 0), message(b"p", 1, properties=LMQ)]).objects
    by_queue = {item.queues[run["queue"]]: run for run in item.runs}
    run = by_queue[QueueKey("%LMQ%x", 0, 0)]
    assert (run["kind"], run["byte_count"], run["base_queue_offset"]) == (RunKind.LMQ, 0, 3)
    lmq = np.flatnonzero(item.rows.position == -1)
    assert len(lmq) == 2
    assert [item.queues[i] for i in item.rows.parent[lmq]] == [QueueKey("p", 0, 0)] * 2
    assert item.rows.parent_queue_offset[lmq].tolist() == [1, 1]
    assert int(item.rows.key_count[lmq].sum()) == 0


def test_an_lmq_refers_to_the_generation_its_parent_has() -> None:
    (item,) = Writer().plan_and_apply([message(b"p", 5), message(b"p", 0, properties=LMQ)]).objects
    lmq = np.flatnonzero(item.rows.position == -1)
    assert {item.queues[i] for i in item.rows.parent[lmq]} == {QueueKey("p", 0, 1)}


def test_an_excluded_parent_means_the_lmq_stores_its_own_bytes() -> None:
    (item,) = Writer(TopicFilter(exclude=["p"])).plan_and_apply([message(b"p", 1, properties=LMQ)]).objects
    assert set(item.queues) == {QueueKey("%LMQ%x", 0, 0), QueueKey("%LMQ%y", 0, 0)}
    assert item.runs["kind"].tolist() == [RunKind.PLAIN] * 2
    assert item.rows.position.tolist() == [0, 0]


def in_lmq(parent: bytes, parent_offset: int, lmq_offset: int) -> Message:
    pairs = (b"INNER_MULTI_DISPATCH", b"%LMQ%x"), (b"INNER_MULTI_QUEUE_OFFSET", b"%d" % lmq_offset)
    return message(parent, parent_offset, properties=properties(*pairs))


@pytest.mark.parametrize("is_same_cycle", [True, False])
@pytest.mark.parametrize("reference_at", [5, 1])
def test_a_reference_neither_adds_to_nor_takes_from_an_lmqs_own_bytes(
    is_same_cycle: bool, reference_at: int
) -> None:
    """Its parent was excluded, another one is not; below the tail a new generation of the queue begins, at byte 0."""
    writer = Writer(TopicFilter(exclude=["p"]))
    own, reference = in_lmq(b"p", 0, 3), in_lmq(b"q", 0, reference_at)
    cycles = [[own, reference]] if is_same_cycle else [[own], [reference]]
    plans = [writer.plan_and_apply(cycle) for cycle in cycles]
    (own_bytes,) = (int(r["byte_count"]) for r in plans[0].objects[0].runs if r["base_queue_offset"] == 3)
    (item,) = writer.plan_and_apply([in_lmq(b"p", 1, reference_at + 1)]).objects
    assert own_bytes > 0
    assert item.runs["base_byte"].tolist() == [own_bytes if reference_at == 5 else 0]


def test_a_queue_of_own_records_and_of_references_stays_in_log_order(writer: Writer) -> None:
    """A producer may send to an LMQ's name directly: out of order the catalog refuses the cycle, and archiving ends."""
    own = [message(b"%LMQ%x", offset) for offset in (7, 9, 0)]
    plan = writer.plan_and_apply(
        [
            own[0],
            in_lmq(b"p", 0, 8),
            own[1],
            in_lmq(b"p", 1, 10),
            own[2],
            in_lmq(b"p", 2, 1),
        ]
    )
    found = runs_of(plan)
    assert found[QueueKey("%LMQ%x", 0, 0)] == [(7, 11)]
    assert found[QueueKey("%LMQ%x", 0, 1)] == [(0, 2)]
    (item,) = plan.objects
    for run, first in zip(item.runs, np.cumsum(item.runs["rows"]) - item.runs["rows"], strict=True):
        phys = item.rows.phys[first : first + run["rows"]]
        assert (np.diff(phys) > 0).all()
        assert run["min_phys"] == phys[0]


@pytest.mark.parametrize("names", [b"%LMQ%x,%LMQ%x", b"%LMQ%x,%LMQ%y,%LMQ%x"])
@pytest.mark.parametrize("topic", [b"p", b"%LMQ%x"])
def test_a_record_that_names_a_queue_twice_is_in_it_once(writer: Writer, names: bytes, topic: bytes) -> None:
    """The broker gives both the same offset and its consume queue takes the first."""
    numbers = b",".join([b"5"] * (names.count(b",") + 1))
    pairs = properties((b"INNER_MULTI_DISPATCH", names), (b"INNER_MULTI_QUEUE_OFFSET", numbers))
    plan = writer.plan_and_apply([message(topic, 5, properties=pairs), in_lmq(topic, 6, 6)])
    assert runs_of(plan)[QueueKey("%LMQ%x", 0, 0)] == [(5, 7)]
    assert {key.generation for key in runs_of(plan)} == {0}


def test_large_runs_get_an_object_of_their_own_and_small_ones_share_one_in_queue_order() -> None:
    writer = Writer(split_bytes=5000)
    plan = writer.plan_and_apply(
        [message(b"big", i, body=bytes(1000)) for i in range(6)] + [message(b"z", 0), message(b"c", 0)]
    )
    names = [[item.queues[run["queue"]].topic for run in item.runs] for item in plan.objects]
    assert names == [["big"], ["c", "z"]]
    assert [item.is_set for item in plan.objects] == [False, True]


RULES = TopicRules((RuleEntry("day", ttl="1h"), RuleEntry("week*", ttl="7d"), RuleEntry("big", ttl="8d")))


def _topics_by_class(plan: CyclePlan) -> list[tuple[int, list[str]]]:
    return [
        (item.ttl_class_days, [item.queues[run["queue"]].topic for run in item.runs]) for item in plan.objects
    ]


def test_small_runs_share_an_object_with_runs_of_their_ttl_class_only() -> None:
    classes = QueueTtlClasses(RULES)
    writer = Writer(split_bytes=5000, classes=classes)
    messages = [message(b"big", i, body=bytes(1000)) for i in range(6)]
    names = (b"z", b"week2", b"day", b"c", b"week1")
    plan = writer.plan_and_apply([*messages, *(message(name, 0) for name in names)])
    assert _topics_by_class(plan) == [(14, ["big"]), (1, ["day"]), (7, ["week1", "week2"]), (0, ["c", "z"])]
    keys = [object_key(item, 0, 1, 1) for item in plan.objects]
    assert len(set(keys)) == 4 and "/00000000000000000000_7d-1-1.sso" in keys[2]
    classes.adopt(
        {"c": {"attributes": {"reserve.time": "24"}}, "day": {"attributes": {"reserve.time": 9999}}}
    )
    later = writer.plan_and_apply(
        [message(b"c", 1), message(b"day", 1), message(b"z", 1), message(b"new", 0)]
    )
    assert _topics_by_class(later) == [(1, ["c", "day"]), (0, ["new", "z"])]


def test_lmq_runs_go_with_the_longest_class_of_their_messages() -> None:
    writer = Writer(classes=QueueTtlClasses(RULES))
    plan = writer.plan_and_apply([in_lmq(b"day", 0, 0), in_lmq(b"week1", 0, 1), message(b"z", 0)])
    assert _topics_by_class(plan) == [(1, ["day"]), (7, ["%LMQ%x", "week1"]), (0, ["z"])]
    again = writer.plan_and_apply([in_lmq(b"day", 1, 2), in_lmq(b"z", 1, 3)])
    assert _topics_by_class(again) == [(1, ["day"]), (0, ["%LMQ%x", "z"])]


def test_system_topics_are_excluded_and_leave_no_trace() -> None:
    plan = Writer().plan_and_apply([message(b"rmq_sys_x", 0), message(b"SCHEDULE_TOPIC_XXXX", 0)])
    assert plan.objects == []
    assert plan.messages == 0


def test_a_reverted_plan_can_be_planned_again(writer: Writer) -> None:
    writer.plan_and_apply([message(b"a", 0)])
    plan = writer.plan([message(b"a", 1), message(b"a", 4)])
    writer.tails.apply(plan.change)
    writer.tails.revert(plan.change)
    again = writer.plan([message(b"a", 1), message(b"a", 4), message(b"a", 5)])
    assert runs_of(again)[QueueKey("a", 0, 0)] == [(1, 2), (4, 6)]
    assert len(again.gaps) == 1


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 3), st.sampled_from(["next", "next", "next", "jump", "reset"]), st.booleans()
            ),
            max_size=25,
        ),
        max_size=5,
    )
)
def test_every_row_lands_in_exactly_one_run_whatever_the_log_says(
    cycles: list[list[tuple[int, str, bool]]],
) -> None:
    writer = Writer(split_bytes=700)
    following = dict.fromkeys(range(4), 0)
    expected: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
    generation = dict.fromkeys(range(4), 0)
    found: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
    for cycle in cycles:
        messages: list[Message] = []
        for queue, step, is_lmq in cycle:
            if step == "jump":
                following[queue] += 3
            elif step == "reset" and following[queue] > 0:
                following[queue] = 0
                generation[queue] += 1 if expected.get((queue, generation[queue])) else 0
            body = f"{queue} {len(messages)} {writer.phys}".encode()
            text = LMQ if is_lmq else b""
            messages.append(message(f"t{queue}".encode(), following[queue], body=body, properties=text))
            expected.setdefault((queue, generation[queue]), []).append((following[queue], body))
            following[queue] += 1
        for item in writer.plan_and_apply(messages).objects:
            row = 0
            for run in item.runs:
                key = item.queues[run["queue"]]
                rows = slice(row, row + int(run["rows"]))
                row = rows.stop
                if run["kind"] == RunKind.LMQ:
                    continue
                assert int(item.rows.size[rows].sum()) == run["byte_count"]
                for position, size, offset in zip(
                    item.rows.position[rows], item.rows.size[rows], item.rows.queue_offset[rows], strict=True
                ):
                    record = writer.arena[position : position + size]
                    body_length = int.from_bytes(record[84:88], "big")
                    found.setdefault((int(key.topic[1:]), key.generation), []).append(
                        (int(offset), record[88 : 88 + body_length])
                    )
    # Objects of a cycle come in any order; within a queue the offsets order them.
    assert {key: sorted(rows) for key, rows in found.items()} == expected
