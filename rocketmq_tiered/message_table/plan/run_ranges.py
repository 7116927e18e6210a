"""Runs of offset ranges: the newest pages of a catalog first, back to where the ranges begin."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from rocketmq_tiered.message_table.plan.filled_gaps import Layer
from rocketmq_tiered.message_table.plan.partitions import OffsetRange
from tiered.catalog.pages import Page, RunIndex, sorted_page
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.model.tables import RUN_DTYPE, Table


def pages_of(
    run_index: RunIndex, state: CatalogState, wanted: Mapping[QueueKey, OffsetRange]
) -> Iterator[tuple[int, Page]]:
    """(place in the catalog's order, living page) of each page that may have runs of ``wanted``, newest first.

    Later versions have higher offsets, so a queue's older pages are not read once its range begins in a newer one; all
    are where a gap was filled. Raises what reading pages raises.
    """
    left = {queue: one.begin for queue, one in wanted.items() if one.begin < one.end}
    names, place = sorted(left), {ref.key: number for number, ref in enumerate(state.pages)}
    if state.memory_runs and names:
        memory = sorted_page(state.directory.keys, state.memory)
        yield len(state.pages), memory
        _drop_reached(state, memory, left, names)
    for sequence in reversed(run_index.sequences(state)):
        for ref in reversed(sequence):
            if bisect_left(names, ref.first) < bisect_right(names, ref.last):
                page = run_index.living(state, run_index.page(ref))
                yield place[ref.key], page
                _drop_reached(state, page, left, names)


def runs_of(run_index: RunIndex, state: CatalogState, wanted: Layer) -> dict[QueueKey, Table]:
    """The runs with messages of each range, by base offset. Raises as ``pages_of``."""
    found: dict[QueueKey, list[Table]] = {queue: [np.zeros(0, RUN_DTYPE)] for queue in wanted}
    for _, page in pages_of(run_index, state, wanted):
        runs = page.chunk.runs
        for number, (begin, end) in enumerate(_spans(page)):
            queue = page.queues[number]
            one = wanted.get(queue)
            if one is not None:
                mine = runs[begin:end]
                inside = (mine["end_queue_offset"] > one.begin) & (mine["base_queue_offset"] < one.end)
                found[queue].append(mine[inside])
    tables = {queue: np.concatenate(parts) for queue, parts in found.items()}
    return {queue: runs[np.argsort(runs["base_queue_offset"])] for queue, runs in tables.items()}


def _drop_reached(state: CatalogState, page: Page, left: dict[QueueKey, int], names: list[QueueKey]) -> None:
    """Remove the queues whose ranges begin in ``page`` or after it."""
    bases = page.chunk.runs["base_queue_offset"]
    for number, (begin, end) in enumerate(_spans(page)):
        queue = page.queues[number]
        if begin < end and queue in left and int(bases[begin]) <= left[queue]:
            row = state.row_of(queue)
            if row is not None and state.is_ordered(row):
                del left[queue]
                names.pop(bisect_left(names, queue))


def _spans(page: Page) -> list[tuple[int, int]]:
    """Where the runs of each queue begin and end."""
    cuts = np.searchsorted(page.chunk.runs["queue"], np.arange(len(page.queues) + 1)).tolist()
    return list(pairwise(cuts))
