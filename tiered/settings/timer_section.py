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
    max_delay_ms: int = 2 * 365 * 24 * HOUR_MS
    """A timer farther ahead than two years is refused: it is a mistaken unit."""
    ahead_ms: int = setting(
        HOUR_MS,
        "how long before its time a timer is handed over to a 5.x broker, as a timer of the broker's; a 4.9 broker "
        "gets each at its time",
        minimum=0,
    )
    refused_ttl_ms: int = setting(
        7 * 24 * HOUR_MS,
        "how long after its time a timer that the broker refuses is sent again, every ten minutes, and how long "
        "`tiered timers ls --refused` has messages that are not delivered",
        minimum=HOUR_MS,
    )
    rate_per_s: int = 10_000
    """Timers handed over in a second, at most: a fifth of what a broker takes beside its producers. 0: any number."""

    @property
    def listed_ms(self) -> int:
        """From a refusal to the end of its entry, which is read ``ahead_ms`` before its time."""
        return self.refused_ttl_ms + self.ahead_ms
