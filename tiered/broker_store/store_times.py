"""Store timestamps of records in the commitlog, read where the records are, without scanning."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.commit_log import CommitLog, LogFile
from tiered.consume_queue.store import LogView
from tiered.whole_file import file_error

_SYS_FLAG_AT: Final = 36
_STORED_AT: Final = 56
_V6_BYTES: Final = 12
_BORN_HOST_V6: Final = 0x10


def log_view(log: CommitLog) -> LogView:
    """What consume queues need of ``log``, whose broker does not run."""
    return LogView(lambda: log.broker_min_phys, lambda phys: store_timestamps(log, phys))


def store_timestamps(log: CommitLog, phys: NDArray[Any]) -> NDArray[np.int64]:
    """Store timestamps in ms of the records at ``phys``; 0 outside the log. The records are not checked."""
    wanted = np.asarray(phys, np.int64)
    found = np.zeros(len(wanted), np.int64)
    for file in log.files:
        rows = np.flatnonzero((wanted >= file.begin_phys) & (wanted + _STORED_AT + 24 <= file.end_phys))
        if len(rows):
            found[rows] = _in_file(file, wanted[rows] - file.begin_phys)
    return found


def _in_file(file: LogFile, at: NDArray[np.int64]) -> NDArray[np.int64]:
    try:
        data = np.memmap(file.path, np.uint8, "r")
    except OSError as error:
        raise file_error(error, file.path) from error
    is_v6 = data[at + _SYS_FLAG_AT + 3] & _BORN_HOST_V6 != 0
    places = (at + _STORED_AT + np.where(is_v6, _V6_BYTES, 0))[:, None] + np.arange(8)
    found: NDArray[np.int64] = np.asarray(data[places]).view(">i8")[:, 0].astype(np.int64)
    return found
