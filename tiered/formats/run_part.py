"""Parts of runs: the catalog may name some rows of a run of an object, so that cutting a run copies no bytes. Pure.

A part is a run of its own for readers: rows before and after it in its blocks are like those of other runs.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from tiered.formats.segment import RowTable
from tiered.model.tables import RUN_DTYPE, RunKind


class RunPart(Protocol):
    """Rows [first_row, first_row + rows) of the run ``ordinal`` of an object. Offsets [base, end) are the queue's,
    ``byte_count`` bytes from ``base_byte`` on are of the queue's TieredCommitLog."""

    @property
    def ordinal(self) -> int: ...
    @property
    def first_row(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def base_byte(self) -> int: ...
    @property
    def byte_count(self) -> int: ...


class CatalogRun(NamedTuple):
    """The part that a run of the catalog (RUN_DTYPE) is."""

    ordinal: int
    first_row: int
    rows: int
    base: int
    end: int
    base_byte: int
    byte_count: int

    @classmethod
    def of(cls, run: np.void) -> CatalogRun:
        """The part of an object's run of rows that ``run``, a row of the catalog's table of runs (RUN_DTYPE), names."""
        return cls(
            int(run["ordinal"]),
            int(run["first_row"]),
            int(run["rows"]),
            int(run["base_queue_offset"]),
            int(run["end_queue_offset"]),
            int(run["base_byte"]),
            int(run["byte_count"]),
        )


def cut_run(run: np.void, rows: RowTable, first: int, end: int) -> np.void:
    """``run`` (a row of RUN_DTYPE) with its rows [first, end) alone; ``rows``: the columns of the whole ``run``, as
    ``SegmentIndex.row_columns(CatalogRun.of(run))`` returns them. Raises ValueError for other rows."""
    if len(rows) != int(run["rows"]) or not 0 <= first < end <= len(rows):
        raise ValueError(f"rows [{first}, {end}) of a run of {int(run['rows'])}, with columns of {len(rows)}")
    cut: np.void = np.array([run], RUN_DTYPE)[0]
    part = slice(first, end)
    cut["first_row"], cut["rows"] = int(run["first_row"]) + first, end - first
    ends = rows.queue_offset + rows.inner_num
    if first:  # a hole of a sparse run belongs to the row behind it, or to the end
        cut["base_queue_offset"] = ends[first - 1]
    if end < len(rows):
        cut["end_queue_offset"] = ends[end - 1]
    if int(run["kind"]) != RunKind.LMQ:
        cut["base_byte"] = int(run["base_byte"]) + int(rows.size[:first].sum(dtype=np.int64))
        cut["byte_count"] = rows.size[part].sum(dtype=np.int64)
    cut["min_store_timestamp"] = rows.store_timestamp[part].min()
    cut["max_store_timestamp"] = rows.store_timestamp[part].max()
    cut["min_phys"] = rows.phys[part].min()
    cut["end_phys"] = (rows.phys[part] + rows.size[part]).max()
    return cut
