"""Which part of the commitlog was left out last, damaged or missing, as commits carry it from process to process.

A queue whose record was lost there may go on only after a restart. Only then its gap is seen, and the cycle at hand
knows of no damage: without this the archive would say that nothing was ever there. Values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiered.catalog.state import CatalogState
from tiered.model.tables import GapReason
from uploader.log_batch import LogBatch

DAMAGED, LOST = "log_damaged", "log_lost"
"""Archive-wide settings: [log line, physical end] of the newest part that was left out."""


def skipped_settings(batch: LogBatch, line: int) -> dict[str, list[int]]:
    """What the commit of ``batch`` says besides."""
    found = {}
    if batch.damaged:
        found[DAMAGED] = [line, max(part.end_phys for part in batch.damaged)]
    if batch.lost:
        found[LOST] = [line, max(part.end_phys for part in batch.lost)]
    return found


@dataclass(frozen=True)
class SkippedLog:
    """Where the newest parts end that earlier commits of this log line left out; 0: none."""

    damaged_phys: int = 0
    lost_phys: int = 0

    @classmethod
    def of(cls, state: CatalogState) -> SkippedLog:
        """What ``state`` knows."""
        return cls(*(_end_phys(state.settings, name, state.cursor.history) for name in (DAMAGED, LOST)))

    def reason(self, end_phys: int) -> GapReason:
        """Why offsets are missing behind a queue's record that ends at ``end_phys``, as far as this tells."""
        if end_phys < self.damaged_phys:
            return GapReason.DAMAGED
        return GapReason.BROKER_DELETED if end_phys < self.lost_phys else GapReason.NEVER_WRITTEN


def _end_phys(settings: Mapping[str, Any], name: str, line: int) -> int:
    match settings.get(name):
        case [int(found), int(end_phys)] if found == line:
            return end_phys
    return 0
