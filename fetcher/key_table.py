"""The latest message of each key of a topic: a view that key compaction does not change."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fetcher.rows.message import Message, MessageBatch
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.offset_map import OffsetMap, entries_of
from tiered.formats.record import decode_record
from tiered.model.tables import picked

if TYPE_CHECKING:
    from fetcher.archive import Queue

MAP_BYTES = 64 << 20
"""Memory for keys; more go to a file in the temporary directory."""
KEYS = "KEYS"


def latest_offsets(batches: Iterable[MessageBatch], begin: int, end: int) -> KeptOffsets:
    """Of the messages in ``batches``, below ``end``, the last one of each key, unless it is a tombstone."""
    kept = KeptOffsets(begin, end)
    keys = OffsetMap(Path(tempfile.gettempdir()), MAP_BYTES)
    try:
        for batch in batches:
            data, starts = batch.joined()
            entries = entries_of(data, starts, batch.sizes, batch.queue_offsets)
            keys.add(picked(entries, (entries["has_key"] > 0) & (entries["offset"] < end)))
        for latest in keys.latest():
            kept.keep(latest["offset"][latest["is_tombstone"] == 0].astype(np.int64))
    finally:
        keys.close()
    return kept


class KeyTable(Mapping[str, Message]):
    """Key to its latest message, as of when it was made. It reads the queues twice, and holds the place of each key;
    access reads the message. A key of several queues has the message that was stored last."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        self._places: dict[str, tuple[Queue, int, int]] = {}
        for queue in queues:
            begin, end = queue.min_offset, queue.max_offset
            kept = latest_offsets(queue.batches(), begin, end)
            for batch in queue.batches():
                offsets = batch.queue_offsets
                self._add(queue, batch.select(kept.mask(offsets) & (offsets < end)))

    def _add(self, queue: Queue, batch: MessageBatch) -> None:
        for offset, stored_ms, data in zip(
            batch.queue_offsets.tolist(), batch.store_timestamp.tolist(), batch.records(), strict=True
        ):
            key = decode_record(data).properties[KEYS]
            known = self._places.get(key)
            if known is None or known[2] <= stored_ms:
                self._places[key] = queue, offset, stored_ms

    def __getitem__(self, key: str) -> Message:
        queue, offset, _ = self._places[key]
        return next(iter(queue.messages(offset, limit=1)))

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"KeyTable({len(self)} keys)"
