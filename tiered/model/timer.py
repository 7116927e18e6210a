"""Timers: messages of the gateway topic that are sent to their own topic at a later time. Names, and what is a timer.

Pure. The write path finds the same in ``tiered.kernels.timers``, which a test compares with this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

TOPIC, DELIVER_MS, QUEUE, CANCEL = "TIERED_TOPIC", "TIERED_DELIVER_MS", "TIERED_QUEUE", "TIERED_CANCEL"
"""Properties of a message in the gateway topic: where it goes; when, ms since the epoch; to which queue there
(optional); which timer it cancels: its delivery time, a space, its unique key."""
PROPERTIES = frozenset((TOPIC, DELIVER_MS, QUEUE, CANCEL))
UNIQUE_KEY = "UNIQ_KEY"
HOUR_MS = 3_600_000
_TRANSACTION, _INNER_BATCH = 0xC, 0x80
_MS = re.compile(r"[0-9]{1,18}\Z")
_CANCEL = re.compile(r"([0-9]{1,18}) (.+)\Z", re.DOTALL)


class EntryKind(IntEnum):
    """What an entry of a timer object is."""

    TIMER = 0
    CANCEL = 1
    """Timers of its key and time with a lower order are not sent."""
    REFUSED = 2
    """A message of the gateway topic that is no timer; the key's hash is the Refusal."""


class Refusal(IntEnum):
    """Why a message of the gateway topic is no timer."""

    NONE = 0
    TRANSACTION = 1
    NO_KEY = 2
    NO_TOPIC = 3
    BAD_TIME = 4
    TOO_FAR = 5
    BAD_CANCEL = 6

    @property
    def text(self) -> str:
        """For people."""
        return {
            Refusal.NONE: "",
            Refusal.TRANSACTION: "a message of a transaction or an inner batch cannot be a timer",
            Refusal.NO_KEY: f"it has no {UNIQUE_KEY}",
            Refusal.NO_TOPIC: f"it has neither {TOPIC} nor {CANCEL}",
            Refusal.BAD_TIME: f"its {DELIVER_MS} is not a time in ms since the epoch",
            Refusal.TOO_FAR: f"its {DELIVER_MS} is more than two years ahead",
            Refusal.BAD_CANCEL: f'its {CANCEL} is not "<delivery time in ms> <unique key>"',
        }[self]


class TimerRequest(NamedTuple):
    """What a message of the gateway topic asks for. ``cancel``: delivery time and unique key of the timer to cancel."""

    topic: str = ""
    deliver_ms: int = 0
    unique_key: str = ""
    cancel: tuple[int, str] | None = None
    refusal: Refusal = Refusal.NONE


def timer_of(
    properties: Mapping[str, str], *, stored_ms: int, sys_flag: int, max_delay_ms: int
) -> TimerRequest:
    """What a message with ``properties``, stored at ``stored_ms``, asks for. One that is refused does nothing."""
    topic, deliver, unique_key = (properties.get(name, "") for name in (TOPIC, DELIVER_MS, UNIQUE_KEY))
    cancel, deliver_ms, cancelled = properties.get(CANCEL, ""), 0, None
    refusal = Refusal.TRANSACTION if sys_flag & (_TRANSACTION | _INNER_BATCH) else Refusal.NONE
    if cancel:
        found = _CANCEL.match(cancel)
        cancelled = (int(found[1]), found[2]) if found else None
        refusal = refusal or (Refusal.NONE if found else Refusal.BAD_CANCEL)
    if topic or deliver or not cancel:
        deliver_ms = int(deliver) if _MS.match(deliver) else 0
        refusal = (
            refusal
            or (Refusal.NONE if topic else Refusal.NO_TOPIC)
            or (Refusal.NONE if unique_key else Refusal.NO_KEY)
            or (Refusal.NONE if deliver_ms > 0 else Refusal.BAD_TIME)
            or (Refusal.NONE if deliver_ms - stored_ms <= max_delay_ms else Refusal.TOO_FAR)
        )
    return TimerRequest(topic, deliver_ms, unique_key, cancelled, refusal)


def hour_of(deliver_ms: int) -> int:
    """Hours since the epoch."""
    return deliver_ms // HOUR_MS
