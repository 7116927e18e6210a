"""Records a benchmark: every row as a JSON line when it is measured, progress on stderr, and at the end the summaries,
their table and missed targets.

Owns the results file, which is only added to. Does not own figures nor targets.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from benchmarks.machine import note
from benchmarks.report import Row

BUSY_LOAD = 1.0
"""Above this load of the machine (runnable processes, over a minute) a figure is marked as busy: do not trust it."""


def loaded(row: Row) -> Row:
    """``row`` with the load of the machine beside it, marked as ``busy`` if that is high."""
    load = round(os.getloadavg()[0], 2)
    return row | {"load": load} | ({"busy": True} if load > BUSY_LOAD else {})


def record(
    out: Path,
    measured: Iterable[Row],
    summarize: Callable[[Sequence[Row]], list[Row]],
    table: Callable[[Sequence[Row]], str],
    *,
    quiet: Collection[str] = (),
) -> int:
    """Write rows as ``measured`` gives them, then what ``summarize`` makes of all, and print its ``table``; 1 when a
    summary names a missed target, else 0. ``quiet``: fields not shown in the progress."""
    rows: list[Row] = []
    with out.open("a", encoding="utf-8") as file:
        for row in map(loaded, measured):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            note(json.dumps({name: value for name, value in row.items() if name not in quiet}))
        summaries = summarize(rows)
        file.writelines(json.dumps(summary) + "\n" for summary in summaries)
    print(table(summaries))
    if busy := sum("busy" in row for row in rows):
        print(f"{busy} of {len(rows)} figures were measured on a busy machine (load above {BUSY_LOAD:g})")
    return int(any(summary["missed"] for summary in summaries))
