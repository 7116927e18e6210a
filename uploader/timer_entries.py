"""Entries of the timers that a cycle archives: found in the rows of the gateway topic, for an object of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiered.formats.timer_object import ENTRY_DTYPE, EncodedTimers, encode_timers, sorted_entries
from tiered.kernels.timers import find_timers, time_order
from tiered.model.queue import QueueKey
from tiered.model.tables import Table, concatenated
from tiered.model.timer import EntryKind
from tiered.object_store.interface import Body
from uploader.timer_rows import TimerRows


def timer_entries(rows: TimerRows, arena: NDArray[np.uint8], max_delay_ms: int) -> Table:
    """What the messages in ``rows`` ask for, whose records are in ``arena``, in their order."""
    found = find_timers(
        arena, rows.position.astype(np.int64), rows.size.astype(np.int64), max_delay_ms=max_delay_ms
    )
    deliver_ms, key_hash, refusal, cancelled_ms, cancelled_hash, has_cancel = found
    is_refused = refusal != 0
    is_timer, is_cancel = ~is_refused & (deliver_ms > 0), ~is_refused & (has_cancel == 1)
    parts = []
    everything = slice(None)
    for chosen, kind, ms, hashes in (
        (is_timer, EntryKind.TIMER, deliver_ms, key_hash),
        (is_cancel, EntryKind.CANCEL, cancelled_ms, cancelled_hash),
        (is_refused, EntryKind.REFUSED, np.zeros_like(refusal), refusal),
    ):
        if not (count := int(chosen.sum())):
            continue
        which = everything if count == len(refusal) else chosen  # copies less
        part = np.zeros(count, ENTRY_DTYPE)
        part["deliver_ms"], part["key_hash"] = ms[which], hashes[which].view(np.uint64)
        part["order"], part["queue_offset"] = rows.phys[which], rows.queue_offset[which]
        part["queue"], part["kind"] = rows.queue[which], kind
        parts.append(part)
    return concatenated(parts, ENTRY_DTYPE)


def encoded_body(entries: Table, queues: Sequence[QueueKey], encoded: list[EncodedTimers]) -> Body:
    """The object of ``entries``, which is added to ``encoded``: a thread's work, beside the next cycle."""
    encoded.append(encode_timers(iter([sorted_entries(entries, time_order)]), queues))
    return encoded[-1].body
