"""Whether a log lost its end, told by consume queues that name records behind it.

A log whose last files are cut or gone, or that a power failure or a careless copy left behind its queues, ends like any
other. Not a gap of any queue: a broker that is started on it gives these offsets out again. Reads; decides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Set

from tiered.broker_store.consume_queue_index import ConsumeQueueIndex
from tiered.catalog.state import CatalogState
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
    """Physical end of the last record that is named, or ``end_phys`` if none lies behind that.

    Looked at are the archive's queues that do not end where what is archived of them does, and those of ``shown``,
    which the broker has units of, that the archive does not have, or only an ended life of: all their records may have
    been in the lost end.
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
