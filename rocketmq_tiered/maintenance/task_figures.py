"""What became of the tasks of one process. Imports nothing heavy: short commands print it."""

from dataclasses import dataclass

from tiered.archive.task import TaskStatus
from tiered.console import counted, size_text


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
    """Bytes of keys that were written to files, as they exceeded memory."""
    backlog_queues: int = 0
    """Queues with something new to compact."""
    backlog_bytes: int = 0

    @property
    def text(self) -> str:
        """The status in words for people; empty if nothing was compacted yet and nothing is due."""
        parts = []
        if self.rounds:
            share = self.kept_messages / max(1, self.read_messages)
            kept = f"{self.kept_messages:,} of {counted(self.read_messages, 'message')} ({share:.0%}) kept"
            parts.append(f"{kept}, {counted(self.keys, 'key')}")
        if self.backlog_queues:
            waiting = f"{counted(self.backlog_queues, 'queue')} with {size_text(self.backlog_bytes)}"
            parts.append(f"{waiting} of messages not compacted yet")
        return "; ".join(parts)


@dataclass(frozen=True)
class ScrubStatus:
    """Progress and results since the start. ``checked_version``: new objects up to it were read back. ``cycle_share``:
    of the cycle in progress. ``cycle_ms``: when the last cycle ended."""

    checked_version: int = 0
    cycle_share: float = 0.0
    cycle_ms: int | None = None
    objects: int = 0
    healed: int = 0
    damaged: int = 0
    """Damaged objects that could not be healed, and other anomalies of the last cycle."""
