"""What became of key compaction in one process. Imports nothing heavy: short commands print it."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.archive.task import TaskStatus
from tiered.console import counted, size_text


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

    @property
    def text(self) -> str:
        """For people; empty before the first round, while nothing is due."""
        parts = []
        if self.rounds:
            share = self.kept_messages / max(1, self.read_messages)
            kept = f"{self.kept_messages:,} of {counted(self.read_messages, 'message')} ({share:.0%}) kept"
            parts.append(f"{kept}, {counted(self.keys, 'key')}")
        if self.backlog_queues:
            parts.append(f"{counted(self.backlog_queues, 'queue')} due, {size_text(self.backlog_bytes)} new")
        return "; ".join(parts)
