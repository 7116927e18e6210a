"""Detects a truncated log by consume queues that reference records beyond its end.

A log whose last files are cut or missing, or that fell behind its queues in a power failure or a copy, ends like any
other. It is not a gap: a broker started on it assigns these offsets again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Set

from tiered.catalog.state import CatalogState
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.errors import AccessDeniedError, CorruptionError, UnreadableError
from tiered.model.queue import TopicFilter
from tiered.model.tables import QUEUE_HIDDEN


def referenced_end_phys(
    index: ConsumeQueueIndex,
    state: CatalogState,
    end_phys: int,
    *,
    shown: Set[tuple[str, int]],
    topics: TopicFilter,
) -> int:
    """Physical end of the last referenced record, at least ``end_phys``.

    Reads the queues that end elsewhere in the broker than in the archive, and the queues of ``shown``, those with units
    at the broker, that the archive does not have in their present generation.
    """
    ends = {
        (key.topic, key.queue_id): int(row["end_queue_offset"])
        for key, row in state.current_queues()
        if not row["flags"] & QUEUE_HIDDEN
    }
    unknown = [queue for queue in shown - ends.keys() if topics.admits(queue[0])]
    for queue in (*index.that_end_elsewhere(ends), *unknown):
        with contextlib.suppress(UnreadableError, AccessDeniedError, CorruptionError):
            unit = index.last_unit(*queue)
            if len(unit):
                end_phys = max(end_phys, int(unit["phys"][0]) + int(unit["size"][0]))
    return end_phys
