"""Random column pages and their encoding by the oracle."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.kernels.segment_oracle import PageRow, PageRun
from tiered.formats.segment_layout import RunView
from tiered.kernels.columns import encode_page
from tiered.model.tables import RUN_DTYPE, RunKind

I64 = st.integers(-(1 << 63), (1 << 63) - 1)


I32 = st.integers(1, (1 << 31) - 1)


COLUMNS = ("size", "tags_code", "store_timestamp", "phys", "inner_num", "parent", "parent_queue_offset")


KINDS = (np.int32, np.int64, np.int64, np.int64, np.int32, np.int32, np.int64)


@st.composite
def page_runs(draw: st.DrawFn) -> list[PageRun]:
    runs = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(list(RunKind)))
        row = st.builds(
            PageRow,
            I32,
            I64,
            I64,
            I64,
            I32 if kind == RunKind.BATCH else st.just(1),
            st.integers(0, (1 << 31) - 1) if kind == RunKind.LMQ else st.just(-1),
            I64 if kind == RunKind.LMQ else st.just(-1),
        )
        runs.append(PageRun(int(kind), draw(I64), draw(I64), draw(st.lists(row, min_size=1, max_size=8))))
    return runs


def _view(runs: list[PageRun]) -> RunView:
    table = np.zeros(len(runs), RUN_DTYPE)
    for index, run in enumerate(runs):
        table["rows"][index], table["kind"][index] = len(run.rows), run.kind
        table["min_store_timestamp"][index], table["min_phys"][index] = run.min_store_timestamp, run.min_phys
    return RunView.of(table)


def _encode(runs: list[PageRun], first: int, end: int) -> bytes:
    view = _view(runs)
    rows = [row for run in runs for row in run.rows]
    columns: list[Any] = [
        np.array([getattr(row, name) for row in rows], kind)
        for name, kind in zip(COLUMNS, KINDS, strict=True)
    ]
    streams, out = np.empty(70 * len(rows), np.uint8), np.empty(70 * len(rows) + 28, np.uint8)
    columns = [*view.columns, *columns, streams, out]
    return out[: encode_page(first, end, view.run_at(first), *columns)].tobytes()
