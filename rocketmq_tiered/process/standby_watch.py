"""Decides when a standby takes an archive over from a writer that is silent. No I/O.

The lag is the heartbeat: an idle writer commits nothing, and costs nothing. A standby beside the current master takes
over when its own log has held records that are not archived for ``lag_ms``, and the archive has not advanced in that
time, by this process's own clock. After each take-over the time doubles until this process has archived something, so
that two writers that both cannot upload do not alternate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered.catalog.state import CatalogState
from tiered.console import duration_text

WAIT_MAX_MS = 3_600_000

Progress = tuple[int, int, int]
"""Epoch, log history and physical end of an archive."""


@dataclass
class StandbyWatch:
    """What one process has seen of an archive that another writer owns."""

    lag_ms: int
    _progress: Progress | None = None
    _since_ms: float = 0.0
    _seen_ms: float | None = None
    """When the archive was seen without progress although the log has more; None otherwise."""
    _wait_ms: int = field(default=0)

    def may_take_over(self, state: CatalogState, *, has_lag: bool, now_ms: float) -> bool:
        """Whether the owner of ``state`` is to be fenced now. ``has_lag``: whether the master's log has messages that
        are not archived; ``now_ms``: monotonic."""
        progress = state.epoch, state.cursor.history, state.cursor.phys
        self._seen_ms = now_ms if has_lag else None
        if progress != self._progress or not has_lag:
            self._progress, self._since_ms = progress, now_ms
            return False
        wait_ms = self._wait_ms or self.lag_ms
        if not self.lag_ms or now_ms - self._since_ms < wait_ms:
            return False
        # Two writers that both cannot upload must not fence each other in turn.
        self._wait_ms = min(2 * wait_ms, WAIT_MAX_MS)
        self._progress = self._seen_ms = None
        return True

    @property
    def is_silent(self) -> bool:
        """Whether the owner was silent between the last two looks, although the log here has more."""
        return self._seen_ms is not None and self._seen_ms > self._since_ms

    @property
    def plan(self) -> str:
        """When this process takes over, by what it saw last."""
        if not self.lag_ms:
            return "this one takes over only with --take-over, because process.take_over_lag_ms is 0"
        wait_ms = self._wait_ms or self.lag_ms
        if self._seen_ms is not None:
            left_ms = wait_ms - (self._seen_ms - self._since_ms)
            return f"this one takes over in {duration_text(left_ms / 1000)} unless the archive advances"
        return (
            "this one takes over once its broker is the master and has had messages to archive for "
            f"{duration_text(wait_ms / 1000)} without any progress of the archive"
        )

    def archived(self) -> None:
        """This process has archived messages: the next silence counts as the first."""
        self._wait_ms, self._progress, self._seen_ms = 0, None, None
