"""Views of the last message of each key of a queue: the queue is read twice, first for the offsets that stay.

Keys are those of key compaction: the KEYS property as a whole; messages without one are in no view.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from rocketmq_tiered.message_table.options.source_options import View
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.archive_scan import archive_chunks
from rocketmq_tiered.message_table.scan.queue_scan import ArchiveScan
from rocketmq_tiered.message_table.scan.row_chunk import RowChunk
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.offset_map import OffsetMap, entries_of
from tiered.model.tables import picked

MEMORY_BYTES = 64 << 20
"""Of the map of keys; the rest is in a file of the temporary directory."""


def view_chunks(
    scan: ArchiveScan, part: Slices, view: View, explode: Callable[[RowChunk], RowChunk]
) -> Iterator[RowChunk]:
    """The rows of ``part``, which is of one queue, that ``view`` shows. Raises as ``archive_chunks``, and OSError."""
    if not len(part.table):
        return
    kept = KeptOffsets(int(part.table["begin"].min()), int(part.table["end"].max()))
    keys = OffsetMap(Path(tempfile.gettempdir()), MEMORY_BYTES)
    try:
        for chunk in map(explode, archive_chunks(scan, part)):
            if not len(chunk):
                continue
            entries = entries_of(chunk.data, chunk.starts, chunk.size, chunk.queue_offset)
            keys.add(picked(entries, entries["has_key"] > 0))
        for latest in keys.latest():
            shown = latest if view is View.CHANGES else picked(latest, latest["is_tombstone"] == 0)
            kept.keep(shown["offset"].astype(np.int64))
    finally:
        keys.close()
    # Damage was reported by the first pass.
    again = replace(scan, on_corrupt=lambda place: None)
    for chunk in map(explode, archive_chunks(again, part)):
        yield chunk.taken(np.flatnonzero(kept.mask(chunk.queue_offset)))
