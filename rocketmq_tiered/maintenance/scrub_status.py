"""What scrub reports, in one shape for status, metrics and page."""

from __future__ import annotations

from dataclasses import dataclass


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
