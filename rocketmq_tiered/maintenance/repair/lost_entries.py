"""Entries of LMQs whose message is lost: they stay, and give nothing to a reader."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiered.archive.run_passes import LivingRuns
from tiered.archive.salvage import Lost
from tiered.archive.segment_reader import SegmentCache
from tiered.catalog.state import CatalogState
from tiered.errors import TieredError
from tiered.formats.run_part import CatalogRun
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind
from tiered.object_store.interface import ObjectStore


def lost_entries(store: ObjectStore, state: CatalogState, lost: Sequence[Lost]) -> list[Lost]:
    """The offsets of LMQs that refer to ``lost`` offsets. Reads the tail of each object with LMQ entries."""
    of_queue: dict[QueueKey, list[tuple[int, int]]] = {}
    for queue, begin, end in lost:
        of_queue.setdefault(queue, []).append((begin, end))
    found: list[Lost] = []
    segments = SegmentCache(store)
    for page in LivingRuns(store, state).between(0, 1 << 62) if lost else ():
        chunk = page.chunk
        for run in chunk.runs[chunk.runs["kind"] == RunKind.LMQ]:
            try:
                reader = segments.of_run(chunk, run)
                rows = reader.row_columns(CatalogRun.of(run))
            except TieredError:
                continue
            is_lost = np.zeros(len(rows), bool)
            for number, parent in enumerate(reader.queues):
                for begin, end in of_queue.get(parent, ()):
                    offsets = rows.parent_queue_offset
                    is_lost |= (rows.parent == number) & (begin <= offsets) & (offsets < end)
            found += [
                (page.queues[int(run["queue"])], offset, offset + 1)
                for offset in rows.queue_offset[is_lost].tolist()
            ]
    return found
