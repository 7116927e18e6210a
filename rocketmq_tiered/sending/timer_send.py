"""What a timer becomes when it is handed over, and what is required of the broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fetcher.rows.message import Message
from rocketmq_tiered.sending.outgoing import OutgoingMessage, outgoing_messages
from rocketmq_tiered.sending.timer_plan import BrokerTimers
from tiered.archive.timers import hash_of
from tiered.model.timer import PROPERTIES, QUEUE, TOPIC, UNIQUE_KEY


@dataclass(frozen=True, slots=True)
class TimerSend:
    """A message to hand over. ``queue``: -1 for any."""

    message: OutgoingMessage
    key: str
    key_hash: int
    queue: int
    deliver_ms: int


class TimerBroker(Protocol):
    """The broker beside the archive's owner. Methods raise UnavailableError while it is away."""

    def timers(self) -> BrokerTimers:
        """What it can do."""
        ...

    def is_settled(self) -> bool:
        """Whether all that it has stored can be found by key."""
        ...

    def has(self, topic: str, unique_key: str) -> bool:
        """Whether it has a message of ``topic`` with this key, pending or delivered."""
        ...

    def send(
        self, sends: Sequence[TimerSend], sent: Callable[[TimerSend], None], until_s: float
    ) -> Mapping[int, str]:
        """Send all, in order as far as possible, and call ``sent`` for each; position -> why the broker refuses it.
        Raises UnavailableError if any is in doubt, and after ``until_s`` (monotonic)."""
        ...


def timer_send(message: Message, deliver_ms: int, *, has_timers: bool) -> TimerSend:
    """What a message of the gateway topic becomes at ``deliver_ms``. Raises CorruptionError."""
    properties = message.properties
    topic, wanted = properties.get(TOPIC, ""), properties.get(QUEUE, "")
    _, outgoing = next(outgoing_messages(message, topic))
    kept, key = outgoing.properties, properties.get(UNIQUE_KEY, "")
    for name in PROPERTIES:
        kept.pop(name, None)
    if has_timers:
        kept["TIMER_DELIVER_MS"] = str(deliver_ms)
    queue = int(wanted) if wanted.isdecimal() and len(wanted) < 6 else -1
    return TimerSend(outgoing, key, hash_of(key), queue, deliver_ms)
