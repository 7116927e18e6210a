"""Whether a round of compaction is worth its requests, and whether it is due. Pure.

`tiered run` compacts again and again: it waits until small objects of a day, or of many bytes, have come together, so
that each is written once and not with every round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rocketmq_tiered.maintenance.compaction_plan import dead_share
from rocketmq_tiered.maintenance.reader_gets import reader_gets
from tiered.archive.rewrite.plan import Candidates, RewritePlan
from tiered.formats.keys import is_compacted

IsWanted = Callable[[Candidates, RewritePlan], bool]
GAIN_MIN = 2
"""A plan has at most one output for so many sources, or readers take so many times fewer GETs."""
BUSY_GAIN_MIN = 4
"""So many times fewer GETs in `tiered run`: a busy broker writes objects with over a megabyte of each queue, and moving
all of them would save half of the GETs at best."""
DEAD_SHARE = 0.5
"""Sources of which so much is dead are rewritten for the space."""


def gains(candidates: Candidates, plan: RewritePlan, gets_min: int = GAIN_MIN) -> bool:
    """Whether the plan saves objects, GETs or space."""
    if len(plan.outputs) * GAIN_MIN <= candidates.share[plan.sources].sum():
        return True
    before, after = reader_gets(candidates, plan)
    return after * gets_min <= before or _is_mostly_dead(candidates, plan)


@dataclass(frozen=True)
class Due:
    """Due is a plan that gains, and moves new objects with ``full_bytes`` of messages, or with one from before
    ``before_ms``; or only what compaction wrote; or mostly dead messages."""

    full_bytes: int
    before_ms: int

    def __call__(self, candidates: Candidates, plan: RewritePlan) -> bool:
        """Whether ``plan`` is due."""
        if not gains(candidates, plan, BUSY_GAIN_MIN):
            return False
        new = [number for number in plan.sources.tolist() if not is_compacted(candidates.object_keys[number])]
        if plan.copies or not new or _is_mostly_dead(candidates, plan):
            return True
        is_new = np.isin(candidates.runs["object"], new)
        is_full = int(candidates.runs["byte_count"][is_new].sum()) >= self.full_bytes
        return is_full or int(candidates.runs["min_store_timestamp"][is_new].min()) < self.before_ms


def _is_mostly_dead(candidates: Candidates, plan: RewritePlan) -> bool:
    sizes = candidates.objects["raw_bytes"][plan.sources] + 1
    dead = (dead_share(candidates)[plan.sources] * sizes).sum()
    return bool(dead >= DEAD_SHARE * sizes.sum())
