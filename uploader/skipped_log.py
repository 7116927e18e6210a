"""The newest damaged or missing part of the commitlog, recorded by commits for later processes.

A queue whose record was lost there may continue only after a restart. Its gap is found then, in a cycle without damage:
without this record the archive would report offsets that were never written. Values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiered.catalog.state import CatalogState
from tiered.model.tables import GapReason
from uploader.log_batch import LogBatch

DAMAGED, LOST = "log_damaged", "log_lost"
"""Archive-wide settings: [log history, physical end] of the newest skipped part."""


def skipped_settings(batch: LogBatch, history: int) -> dict[str, Any]:
    """The archive's settings that the commit of ``batch``, which belongs to log history ``history``, must have: where
    the last damaged and the last missing part of the log in it end. Empty if it has none."""
    settings: dict[str, Any] = {}
    if batch.damaged:
        settings[DAMAGED] = [history, max(damage.end_phys for damage in batch.damaged)]
    if batch.lost:
        settings[LOST] = [history, max(lost.end_phys for lost in batch.lost)]
    return settings


@dataclass(frozen=True)
class SkippedLog:
    """Ends of the newest parts that commits of this log history skipped; 0: none."""

    damaged_phys: int = 0
    lost_phys: int = 0

    @classmethod
    def of(cls, state: CatalogState) -> SkippedLog:
        """What commits recorded in ``state`` of the skipped parts of the present log history."""
        return cls(*(_end_phys(state.settings, name, state.cursor.history) for name in (DAMAGED, LOST)))

    def reason(self, end_phys: int) -> GapReason:
        """Why offsets are missing after a queue's record that ends at ``end_phys``."""
        if end_phys < self.damaged_phys:
            return GapReason.DAMAGED
        return GapReason.BROKER_DELETED if end_phys < self.lost_phys else GapReason.NEVER_WRITTEN


def _end_phys(settings: Mapping[str, Any], name: str, history: int) -> int:
    match settings.get(name):
        case [int(found), int(end_phys)] if found == history:
            return end_phys
    return 0
