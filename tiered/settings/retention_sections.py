"""The sections [gc] and [retention]: when messages expire, and when garbage is deleted."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.settings.declaration import setting
from tiered.settings.quantities import BadValueError, duration_ms

HOUR_MS = 3_600_000
MIN_ARCHIVED_MS = 72 * HOUR_MS


@dataclass(frozen=True)
class GcSettings:
    """Garbage collection."""

    grace_ms: int = setting(
        72 * HOUR_MS, "grace period: how long garbage is kept before gc deletes it", minimum=0
    )
    diverged_grace_ms: int = setting(
        30 * 24 * HOUR_MS,
        "grace period of messages that are no longer in the broker's log because it was truncated or replaced",
        minimum=0,
    )
    every_ms: int = setting(
        24 * HOUR_MS,
        "how often `tiered run` expires messages, and collects garbage if its account may delete; 0: it expires daily "
        "and never collects",
        minimum=0,
    )
    deletes_per_s: int = 1000
    """Objects that gc deletes in a second, at most: one bulk request."""


@dataclass(frozen=True)
class ScrubSettings:
    """Scrub: `tiered run` reads back what it stored, and stores again what is damaged while the broker has it."""

    every_ms: int = 60_000
    """How often `tiered run` reads new objects back, while it owns the archive."""
    cycle_ms: int = setting(
        30 * 24 * HOUR_MS, "time in which everything is read back once; 0: nothing is read back", minimum=0
    )
    bytes_per_s: int = 16 << 20
    """Bytes a second that `tiered run` reads for it: a quarter of it while it uploads or clients read, none while it
    is behind. In a month it reads 10 TB back."""


@dataclass(frozen=True)
class RetentionSettings:
    """How long messages stay, for topics without a rule in `topics.rules` ([RETENTION.md](RETENTION.md))."""

    ttl: str = setting("forever", "time to live of messages after the broker stored them, such as 12h or 7d")
    from_broker: bool = setting(
        True, "a topic's attribute reserve.time (hours) overrides retention.ttl where it is positive"
    )
    min_archived: str = setting(
        "",
        "messages expire no earlier than this after their upload, whatever the broker's clock was; empty: the smaller "
        "of the time to live and 72h",
    )
    max_share: float = setting(
        0.2, "a pass that would expire a larger share of the archive stops", minimum=0.0, maximum=1.0
    )

    @property
    def ttl_ms(self) -> int | None:
        """None: forever. Raises BadValueError unless checked."""
        return duration_ms(self.ttl)

    def min_archived_ms(self, ttl_ms: int | None) -> int:
        """``min_archived`` for a topic with this time to live."""
        if self.min_archived:
            return duration_ms(self.min_archived) or 0
        return MIN_ARCHIVED_MS if ttl_ms is None else min(ttl_ms, MIN_ARCHIVED_MS)

    def complaints(self) -> list[tuple[str, str]]:
        """(key, complaint) pairs, as in ``contradictions``."""
        found = []
        try:
            duration_ms(self.ttl)
        except BadValueError as error:
            found.append(("retention.ttl", str(error)))
        try:
            is_time = not self.min_archived or duration_ms(self.min_archived) is not None
        except BadValueError:
            is_time = False
        if not is_time:
            found.append(("retention.min_archived", 'use a time with its unit, such as "12h" or "3d", or ""'))
        return found
