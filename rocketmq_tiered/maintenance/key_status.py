"""What became of key compaction in one process. Imports nothing heavy: short commands print it."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.archive.task import TaskStatus


@dataclass(frozen=True)
class KeyCompactionStatus(TaskStatus):
    """Key compaction of this process since its start."""

    rounds: int = 0
    keys: int = 0
    read_messages: int = 0
    kept_messages: int = 0
    read_bytes: int = 0
    """Message bytes of queues that were compacted, before and after."""
    kept_bytes: int = 0
    spooled_bytes: int = 0
    """Of keys that exceeded memory."""
    backlog_queues: int = 0
    """With something new to compact."""
    backlog_bytes: int = 0
