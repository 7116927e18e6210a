"""The section [timers]: messages that are delivered later than brokers can."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.settings.declaration import setting

HOUR_MS = 3_600_000


@dataclass(frozen=True)
class TimerSettings:
    """Messages of the gateway topic, which are delivered to another topic at a later time."""

    topic: str = setting(
        "TIERED_TIMERS",
        "the gateway topic: its messages are delivered later, to another topic; empty: no timers",
    )
    max_delay_ms: int = setting(
        2 * 365 * 24 * HOUR_MS, "a timer farther ahead than this is refused", minimum=HOUR_MS
    )
    ahead_ms: int = setting(
        HOUR_MS,
        "how long before its time a timer is handed over to a 5.x broker, as a timer of the broker's; a 4.9 broker "
        "gets each at its time",
        minimum=0,
    )
    rate_per_s: int = setting(10_000, "timers handed over in a second, at most; 0: any number", minimum=0)
