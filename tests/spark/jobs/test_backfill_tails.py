"""Composing the moves of cycles gives the ends that planning them one after the other gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_tiered.spark.jobs.backfill_tails import advance, move, moves_of
from tests.kernels.record_builder import Message, build_log, properties
from tests.sweeps import examples
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import RecordColumns, scan_log
from tiered.model.queue import TopicFilter
from tiered.model.tables import GapReason
from uploader.cycle_plan import CyclePlan, CyclePlanner
from uploader.queue_tails import UNKNOWN, QueueTails

LMQ = properties((b"INNER_MULTI_DISPATCH", b"%LMQ%x,%LMQ%y"), (b"INNER_MULTI_QUEUE_OFFSET", b"3,8"))
STEPS = st.sampled_from(["next", "next", "next", "jump", "reset"])


def plan(table: QueueTable, tails: QueueTails, messages: Sequence[Message], phys: int) -> CyclePlan:
    arena = np.frombuffer(build_log(messages, phys), np.uint8)
    columns = RecordColumns()
    scan_log(arena, 0, len(arena), phys, 1 << 40, table, columns, delay_levels_ms=None)
    for ordinal in range(len(table)):
        table.admitted[ordinal] = TopicFilter().admits(table.topic(ordinal))
    return CyclePlanner(table, tails, split_bytes=700).plan(columns, gap_reason=GapReason.NEVER_WRITTEN)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), STEPS, st.booleans()), max_size=20), max_size=5),
    st.booleans(),
)
def test_moves_compose_to_what_planning_in_order_gives(
    cycles: list[list[tuple[int, str, bool]]], begins_known: bool
) -> None:
    table, in_order, composed = QueueTable(), QueueTails(), QueueTails()
    if begins_known:
        for tails in (in_order, composed):
            tails.set(table.ordinal("t0", 0), next_offset=2, end_byte=77, end_phys=9, generation=3)
    following = dict.fromkeys(range(4), 0)
    phys = 1000
    for cycle in cycles:
        messages = []
        for queue, step, is_lmq in cycle:
            following[queue] = {"next": following[queue], "jump": following[queue] + 3, "reset": 0}[step]
            text = LMQ if is_lmq else b""
            messages.append(
                Message(topic=f"t{queue}".encode(), queue_offset=following[queue]).with_(properties=text)
            )
            following[queue] += 1
        # A worker knows neither the ends nor the other cycles' numbering of queues.
        own = QueueTable()
        ordinals, moves = moves_of(plan(own, QueueTails(), messages, phys), own)
        known = np.array([table.ordinal(own.topic(i), int(own.queue_id[i])) for i in ordinals], np.int64)
        composed.grow(len(table))
        move(composed, known, moves)
        in_order.apply(plan(table, in_order, messages, phys).change)
        phys += 100_000
        every = np.arange(len(table))
        for i in every:
            is_lmq = table.topic(int(i)).startswith("%LMQ%")
            kept = [0, 2, 3] if is_lmq else [0, 1, 2, 3]  # LMQs have no bytes
            assert composed.of(every)[i][kept].tolist() == in_order.of(every)[i][kept].tolist()


def test_an_unknown_queue_starts_anywhere_and_a_lower_offset_starts_a_generation() -> None:
    moves = np.array([[5, 9, 400, 7000, 0]])
    assert advance(np.array([[UNKNOWN, 0, 0, 0]]), moves).tolist() == [[9, 400, 7000, 0]]
    assert advance(np.array([[5, 100, 600, 2]]), moves).tolist() == [[9, 500, 7000, 2]]
    assert advance(np.array([[6, 100, 600, 2]]), moves).tolist() == [[9, 400, 7000, 3]]
    assert advance(np.array([[3, 100, 600, 2]]), moves).tolist() == [[9, 500, 7000, 2]]
