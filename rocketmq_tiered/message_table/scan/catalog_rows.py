"""Rows of plain runs as the catalog alone describes them, for columns that need nothing else: topic, queue, generation.

A plain run has a row at every offset. Other kinds have rows that only footers know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rocketmq_tiered.message_table.options.columns import Cost
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.row_chunk import RowChunk
from tiered.model.tables import RunKind

CHUNK_ROWS = 1 << 18
_DECIDED = frozenset({"queueId", "generation"})
"""Conditions that the plan has applied already."""


def needs_catalog_only(cost: Cost, predicate: Predicate) -> bool:
    """Whether rows of plain runs can be had without reading objects."""
    return cost <= Cost.CATALOG and predicate.tags is None and predicate.numbers.keys() <= _DECIDED


def without_catalog_rows(part: Slices) -> Slices:
    """The slices of other kinds of runs."""
    return replace(part, table=part.table[part.table["kind"] != RunKind.PLAIN])


def catalog_chunks(part: Slices) -> Iterator[RowChunk]:
    """The rows of plain runs. Only ``queue`` of a row has its value; other columns are 0."""
    table = part.table[part.table["kind"] == RunKind.PLAIN]
    rows = table["end"] - table["begin"]
    groups = np.cumsum(rows) // CHUNK_ROWS
    for mine in np.split(np.arange(len(table)), np.flatnonzero(np.diff(groups)) + 1):
        queue = np.repeat(table["queue"][mine], rows[mine])
        zeros = np.broadcast_to(np.int64(0), len(queue))
        yield RowChunk(
            part.archive.cluster, part.archive.broker, part.queues, queue,
            zeros, zeros, zeros, zeros, zeros, zeros, zeros,
        )  # fmt: skip
