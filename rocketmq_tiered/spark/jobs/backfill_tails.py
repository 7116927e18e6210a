"""How a part of the commitlog moves the ends of its queues. Pure.

Encoding a cycle requires the ends of all queues before it, where its runs begin. So the log is first scanned in
parallel, and each cycle is summarised as *moves*, relative to unknown ends. Composing the moves in log order gives the
ends before each cycle; then all cycles can be encoded in parallel. The uploader's planner makes the moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.queue_table import QueueTable
from uploader.cycle_plan import CyclePlan
from uploader.queue_tails import UNKNOWN, QueueTails, TailChange

MOVE_FIELDS = ("first_base", "next_offset", "bytes", "end_phys", "new_generations")
"""First queue offset of the part; end of its last generation, in offsets, and in bytes since that generation or the
part began; physical end of its last record; generations that begin inside."""

Moves = NDArray[Any]


def moves_of(plan: CyclePlan, table: QueueTable) -> tuple[NDArray[np.int64], Moves]:
    """(ordinals, moves) of a ``plan`` made from unknown ends."""
    ordinals, after = plan.change.ordinals, plan.change.after
    assert (plan.change.before[:, 0] == UNKNOWN).all(), "moves are relative: the plan must not know any ends"
    position = {int(ordinal): row for row, ordinal in enumerate(ordinals.tolist())}
    first = np.full(len(ordinals), np.iinfo(np.int64).max, np.int64)
    for item in plan.objects:
        rows = np.array(
            [_row(position, table, key.topic, key.queue_id, key.generation) for key in item.queues], np.int64
        )
        row = rows[item.runs["queue"]]
        mine = row >= 0
        np.minimum.at(first, row[mine], item.runs["base_queue_offset"][mine])
    return ordinals, np.stack([first, after[:, 0], after[:, 1], after[:, 2], after[:, 3]], axis=1)


def _row(position: dict[int, int], table: QueueTable, topic: str, queue_id: int, generation: int) -> int:
    """The row of a queue; -1 for later generations and for parents that are only referred to."""
    ordinal = None if generation else table.find(topic, queue_id)
    return -1 if ordinal is None else position.get(ordinal, -1)


def advance(before: NDArray[np.int64], moves: Moves) -> NDArray[np.int64]:
    """TAIL_FIELDS after the part from those before it, one row for each queue of ``moves``."""
    restarts = (before[:, 0] != UNKNOWN) & (moves[:, 0] < before[:, 0])
    is_new = restarts | (moves[:, 4] > 0)
    return np.stack(
        [
            moves[:, 1],
            moves[:, 2] + np.where(is_new, 0, before[:, 1]),
            moves[:, 3],
            before[:, 3] + restarts + moves[:, 4],
        ],
        axis=1,
    )


def move(tails: QueueTails, ordinals: NDArray[np.int64], moves: Moves) -> NDArray[np.int64]:
    """Move ``tails`` over a part and return those before it."""
    before = tails.of(ordinals)
    tails.apply(TailChange(ordinals, before, advance(before, moves)))
    return before
