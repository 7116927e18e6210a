"""Candidates for compaction plans written as text: one object a string, of runs ``queue[base,end)bytes``."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from tiered.archive.rewrite.plan import Candidates, RewritePlan
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE

_RUN = re.compile(r"(\w+)\[(\d+),(\d+)\)(\d*)")

# Blocks of S3Stream's test fixtures: bytes are those of its index.
FIXTURE_F = (
    "S0[0,15)45 S1[25,30)45 S1[30,60)65 S2[30,60)65",
    "S0[15,20)44 S1[60,120)95",
    "S1[400,500)135 S2[230,270)75",
)
FIXTURE_G = (
    "S0[0,20) S1[30,60) S2[30,60)",
    "S0[20,25) S1[60,120)",
    "S1[400,500) S2[230,270)",
)


def candidates_of(objects: Sequence[str], floors: Mapping[str, int] | None = None) -> Candidates:
    """Object i is of version i + 1; a run without bytes has as many as offsets."""
    found = [(number, *run) for number, text in enumerate(objects) for run in _RUN.findall(text)]
    topics = sorted({run[1] for run in found})
    runs = np.zeros(len(found), RUN_DTYPE)
    for row, (number, topic, base, end, size) in zip(runs, found, strict=True):
        row["queue"], row["object"], row["version"] = topics.index(topic), number, number + 1
        row["base_queue_offset"], row["end_queue_offset"] = base, end
        row["rows"] = int(end) - int(base)
        row["byte_count"] = size or int(end) - int(base)
    for queue in range(len(topics)):
        mine = np.flatnonzero(runs["queue"] == queue)
        mine = mine[np.argsort(runs["base_queue_offset"][mine])]
        runs["base_byte"][mine] = np.cumsum(runs["byte_count"][mine]) - runs["byte_count"][mine]
    count = len(objects)
    rows_of = np.zeros(count, OBJECT_DTYPE)
    rows_of["rows"] = np.bincount(runs["object"], runs["rows"], minlength=count)
    return Candidates(
        queues=[QueueKey(topic, 0, 0) for topic in topics],
        runs=runs,
        objects=rows_of,
        object_keys=[f"sets/00/{number}-1-1.sso" for number in range(count)],
        is_set=np.ones(count, bool),
        floors=np.array([(floors or {}).get(topic, 0) for topic in topics], np.int64),
        is_fixed=np.zeros(count, bool),
        share=np.ones(count),
    )


def described(candidates: Candidates, plan: RewritePlan | None) -> list[list[str]]:
    """Each iteration as its outputs: ``SO 0: S1[25,120)205``. Offsets inside a cut run are proportional."""
    assert plan is not None
    found = []
    for iteration in plan.iterations:
        parts = []
        for part in iteration:
            merged: list[list[int]] = []
            for run, begin, end in part.ranges.tolist():
                row = candidates.runs[run]
                span = int(row["end_queue_offset"] - row["base_queue_offset"])
                size = int(row["byte_count"])
                first = int(row["base_queue_offset"]) + begin * span // size
                last = int(row["base_queue_offset"]) + end * span // size
                if merged and merged[-1][0] == row["queue"] and merged[-1][2] == first:
                    merged[-1][2:] = [last, merged[-1][3] + end - begin]
                else:
                    merged.append([int(row["queue"]), first, last, end - begin])
            text = " ".join(f"{candidates.queues[q].topic}[{a},{b}){n}" for q, a, b, n in merged)
            kind = "SSO" if plan.outputs[part.output].is_set else "SO"
            parts.append(f"{kind} {part.output}: {text}")
        found.append(parts)
    return found


def sources(plan: RewritePlan | None) -> list[int]:
    """Indexes of the objects that the plan replaces."""
    assert plan is not None
    return [int(number) for number in plan.sources]
