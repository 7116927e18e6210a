"""Whether a log lost its end, told by consume queues that name records behind it.

A log whose last files are cut or gone, or that a power failure or a careless copy left behind its queues, ends like any
other. Not a gap of any queue: a broker that is started on it gives these offsets out again. Reads; decides nothing.
"""

from __future__ import annotations

import contextlib

import numpy as np

from tiered.broker_store.consume_queue_index import ConsumeQueueIndex
from tiered.catalog.state import CatalogState
from tiered.errors import AccessDeniedError, CorruptionError, UnreadableError
from tiered.model.tables import QUEUE_HIDDEN

QUEUES_MAX = 64
"""Those whose last archived record is the newest are looked at, a disk access each: a lost end is theirs first."""


def named_end_phys(index: ConsumeQueueIndex, state: CatalogState, end_phys: int) -> int:
    """Physical end of the last record that is named, or ``end_phys`` if none lies behind that."""
    shown = np.flatnonzero(state.table["flags"] & QUEUE_HIDDEN == 0)
    newest = shown[np.argsort(state.table["end_phys"][shown])[-QUEUES_MAX:]]
    for row in newest.tolist():
        topic, queue_id, _ = state.key_of(row)
        with contextlib.suppress(UnreadableError, AccessDeniedError, CorruptionError):
            unit = index.last_unit(topic, queue_id)
            if len(unit):
                end_phys = max(end_phys, int(unit["phys"][0]) + int(unit["size"][0]))
    return end_phys
