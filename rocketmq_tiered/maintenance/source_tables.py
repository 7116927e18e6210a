"""Tables of one source of a compaction: all of a decoded one, or those of consecutive runs of a kept one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocketmq_tiered.maintenance.iteration_spool import ROW_DTYPE
from tiered.errors import CorruptionError
from tiered.formats.segment_index import CATALOG_RUN_FIELDS, KeySection, SegmentBounds, SegmentIndex
from tiered.formats.segment_layout import SEGMENT_RUN_DTYPE
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table, picked

SOURCE_RUN_DTYPE = np.dtype([
    *((name, SEGMENT_RUN_DTYPE[name]) for name in CATALOG_RUN_FIELDS),
    ("queue", "<u8"),  # its hash
])  # fmt: skip
"""What is checked of a run, and needed of it."""
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class SourceRows(NamedTuple):
    """Consecutive rows (ROW_DTYPE) of an object, across runs, and their key hashes, row after row."""

    table: Table
    hashes: NDArray[np.uint64]


class Parents:
    """Numbers of the queues that ``parent`` of LMQ rows names: those of the candidates, then others."""

    def __init__(self, queues: Sequence[QueueKey]) -> None:
        self.queues: list[QueueKey] = list(queues)
        self._numbers = {queue: number for number, queue in enumerate(self.queues)}

    def numbers_of(self, queues: Sequence[QueueKey], parent: NDArray[Any]) -> NDArray[np.int32]:
        """``parent`` indexes ``queues``, or is -1."""
        if int(parent.max(initial=-1)) >= len(queues):
            raise CorruptionError("the parent of an LMQ row is not in the footer")
        numbers = np.full(len(queues) + 1, -1, np.int32)
        for local in np.unique(parent[parent >= 0]).tolist():
            number = self._numbers.setdefault(queues[local], len(self.queues))
            if number == len(self.queues):
                self.queues.append(queues[local])
            numbers[local] = number
        found: NDArray[np.int32] = numbers[parent]
        return found


@dataclass(frozen=True)
class SourceTables:
    """``runs`` (SOURCE_RUN_DTYPE or more), of which ``first_run`` is the first, and ``blocks`` (BLOCK_DTYPE) that hold
    them. ``block_offsets``, ``first_row`` and ``bounds`` count from the object's begin, the latter two with the end
    of the last. ``rows`` reads rows [first, end) of the object."""

    key: str
    first_run: int
    runs: Table
    blocks: Table
    block_offsets: NDArray[np.int64]
    first_row: NDArray[np.int64]
    bounds: SegmentBounds
    rows: Callable[[int, int], SourceRows]

    @property
    def has_lmqs(self) -> bool:
        """Whether a run is one of an LMQ."""
        return bool((self.runs["kind"] == RunKind.LMQ).any())

    @classmethod
    def of(cls, index: SegmentIndex, keys: KeySection, parents: Parents) -> SourceTables:
        """Of a whole object."""
        runs = np.empty(len(index.runs), SOURCE_RUN_DTYPE)
        for name in CATALOG_RUN_FIELDS:
            runs[name] = index.runs[name]
        queues = picked(index.queue_table, index.runs["queue"])
        runs["queue"] = _hashes(index.topics, queues["topic"], queues["queue_id"], queues["generation"])
        rows = _DecodedRows(index, keys, parents)
        return cls(
            index.key, 0, runs, index.blocks, index.block_offsets[:-1], index.first_row, index.bounds, rows
        )


class _DecodedRows:
    """Rows of an open object; ``parent`` of LMQ rows is a number of ``parents``."""

    def __init__(self, index: SegmentIndex, keys: KeySection, parents: Parents) -> None:
        self._index, self._keys, self._parents = index, keys, parents

    def __call__(self, first: int, end: int) -> SourceRows:
        columns = self._index.stored_columns(first, end)
        table = np.empty(end - first, ROW_DTYPE)
        for name, column in zip(ROW_DTYPE.names or (), columns, strict=False):
            table[name] = column
        if int(columns[5].max(initial=-1)) >= 0:
            table["parent"] = self._parents.numbers_of(self._index.queues, columns[5])
        table["key_count"] = counts = self._keys.counts[first:end]
        begin = int(self._keys.counts[:first].sum(dtype=np.int64))
        return SourceRows(table, self._keys.hashes[begin : begin + int(counts.sum(dtype=np.int64))])


def queue_hashes(queues: Sequence[QueueKey]) -> NDArray[np.uint64]:
    """A hash of each of ``queues``, the same one within this process."""
    numbers = np.array([queue[1:] for queue in queues], np.int64).reshape(-1, 2)
    return _hashes([queue.topic for queue in queues], slice(None), numbers[:, 0], numbers[:, 1])


def _hashes(
    topics: Sequence[str], topic: NDArray[Any] | slice, queue_id: NDArray[Any], generation: NDArray[Any]
) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = np.array(list(map(hash, topics)), np.int64).view(np.uint64)[topic]
    for column in (queue_id, generation):
        found = found * _HASH_FACTOR + column.astype(np.uint64)
    return found
