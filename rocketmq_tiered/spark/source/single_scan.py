"""Refuses a second scan of a DataFrame whose filters were pushed down.

Spark 4.2 applies the filters pushed for one scan of a DataFrame to all its other scans, which lose rows.
Each host notes the first scan in a file: its filters in the driver, and in workers the task that reads a partition.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

from tiered.errors import UsageError

_PREFIX = "rocketmq-tiered-scan-"
_KEPT_S = 86_400.0


def note_scan(frame: str, what: str, scan: str, attempt: object) -> None:
    """Note that ``attempt`` of ``scan`` uses ``what`` of the DataFrame ``frame``. Raises UsageError if another scan
    did, or this one in the same attempt."""
    path = Path(tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}-{frame}")
    line = f"{what} {scan} {attempt}\n"
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = [one for one in file if one.startswith(f"{what} ")]
        file.write(line)
        if line in known or not all(one.startswith(f"{what} {scan} ") for one in known):
            raise UsageError(
                "pushFilters: this DataFrame has a second scan, to which Spark would apply the filters of the first",
                hint="load a DataFrame for each scan, or omit pushFilters",
            )


def forget_old_scans() -> None:
    """Remove the notes of DataFrames older than a day."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{os.getuid()}-*"):
        if time.time() - path.stat().st_mtime > _KEPT_S:
            path.unlink(missing_ok=True)
