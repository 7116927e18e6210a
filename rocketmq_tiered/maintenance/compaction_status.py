"""What became of object compaction in one process. Imports nothing heavy: short commands print it."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.archive.task import TaskStatus


@dataclass(frozen=True)
class CompactionStatus(TaskStatus):
    """Object compaction of this process since its start."""

    rounds: int = 0
    round_seconds: float = 0.0
    """Duration of the last round."""
    joined_objects: int = 0
    made_objects: int = 0
    gets: int = 0
    bytes_read: int = 0
    bytes_sent: int = 0
    bytes_copied: int = 0
    """Inside the object store."""
    backlog_objects: int = 0
    """Due to be joined."""
    backlog_bytes: int = 0
    is_backlog_estimated: bool = False
    """Whether rounds of large parts of the catalog were not planned, but taken for the like of another one."""
