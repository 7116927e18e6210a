"""GETs of readers that read each queue once from an empty cache, before and after a plan of compaction. Pure.

Of each object a tail, and blocks in ranges of 4 MiB. Stored bytes of a run are its share of its object's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.archive.rewrite.plan import RANGE_DTYPE, Candidates, RewritePlan
from tiered.model.tables import concatenated

READ_BYTES = 4 * 1024 * 1024


def reader_gets(candidates: Candidates, plan: RewritePlan) -> tuple[int, int]:
    """GETs for what ``plan`` moves: in its sources, and in its outputs."""
    runs = candidates.runs
    is_source = np.zeros(len(candidates.objects), bool)
    is_source[plan.sources] = True
    moved = is_source[runs["object"]]
    before = _gets(runs["queue"][moved], runs["object"][moved], stored_bytes(candidates)[moved])
    output, run, size_bytes = moved_bytes(candidates, plan)
    return before, _gets(runs["queue"][run], output, size_bytes)


def stored_bytes(candidates: Candidates) -> NDArray[np.float64]:
    """By run."""
    runs, objects = candidates.runs, candidates.objects
    ratio = objects["size_bytes"] / np.maximum(objects["raw_bytes"], 1)
    found: NDArray[np.float64] = runs["byte_count"] * ratio[runs["object"]]
    return found


def moved_bytes(
    candidates: Candidates, plan: RewritePlan
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Output, run and stored bytes of each range."""
    parts = [part for iteration in plan.iterations for part in iteration]
    if not parts:
        none = np.zeros(0, np.int64)
        return none, none, none.astype(float)
    ranges = concatenated((part.ranges for part in parts), RANGE_DTYPE)
    output = np.repeat([part.output for part in parts], [len(part.ranges) for part in parts])
    length = np.maximum(candidates.runs["byte_count"][ranges["run"]], 1)
    share = np.minimum(1.0, (ranges["end"] - ranges["begin"]) / length)
    return output, ranges["run"], stored_bytes(candidates)[ranges["run"]] * share


def _gets(queue: NDArray[Any], place: NDArray[np.int64], stored: NDArray[np.float64]) -> int:
    """GETs of reading each queue from the objects ``place`` once."""
    if not len(queue):
        return 0
    pairs, number = np.unique(queue.astype(np.int64) << 32 | place, return_inverse=True)
    sizes = np.bincount(number, weights=stored)
    return int(len(pairs) + np.ceil(np.maximum(sizes, 1) / READ_BYTES).sum())
