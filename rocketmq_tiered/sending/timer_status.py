"""What became of timers in this process: figures for status and metrics."""

from dataclasses import dataclass


@dataclass
class TimerStatus:
    """``pending``: timers that are not handed over, ``next_hour`` those of this hour and the next; ``postponed``: of
    them, those that the broker refused; ``refused``: messages that are listed and not delivered. ``overdue_seconds``:
    how long the first has been due; ``late_p99_seconds``: how late the newest 10,000 were handed over. Others are
    counted since the start: ``delivered``, of them ``found`` at the broker after a failure; ``cancelled``; ``dropped``,
    without their message. ``problem``: why the broker, or this program, refused one last, or the last pass failed."""

    pending: int = 0
    next_hour: int = 0
    postponed: int = 0
    refused: int = 0
    objects: int = 0
    overdue_seconds: float = 0.0
    late_p99_seconds: float = 0.0
    delivered: int = 0
    found: int = 0
    cancelled: int = 0
    dropped: int = 0
    problem: str = ""
