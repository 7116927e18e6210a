"""What a timer becomes when it is handed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fetcher.rows.message import Message
from rocketmq_tiered.sending.outgoing import OutgoingMessage, outgoing_messages
from tiered.archive.timers import hash_of
from tiered.model.timer import DELIVER_MS, PLACE, PROPERTIES, QUEUE, TOPIC, UNIQUE_KEY, TimerPlace
from tiered.model.topic_names import refused_target


@dataclass(frozen=True, slots=True)
class TimerSend:
    """A message to hand over. ``place``: the property that it carries, which no other message has. ``queue``: modulo
    the number of queues of its topic. ``refusal``: why it may not be sent; empty: it may."""

    message: OutgoingMessage
    place: str
    queue: int
    deliver_ms: int
    refusal: str = ""

    @property
    def key(self) -> str:
        """What the broker finds it by, perhaps among others."""
        return self.message.properties[UNIQUE_KEY]


Judge = Callable[[Mapping[str, str], bytes], str | None]
"""Why the sender of a message of the gateway topic, by its properties and body, may not send it to its own topic; None:
it may."""


def everyone(_properties: Mapping[str, str], _body: bytes) -> None:
    """Without access rules every sender may send to every topic."""


def timer_send(message: Message, deliver_ms: int, judge: Judge = everyone, *, has_timers: bool) -> TimerSend:
    """What a message of the gateway topic becomes at ``deliver_ms``. One without a unique key gets one, as at a broker.
    Raises CorruptionError."""
    properties, record = message.properties, message.record
    topic, queue = properties.get(TOPIC, ""), properties.get(QUEUE, "")
    _, outgoing = next(outgoing_messages(message, topic))
    kept, at = outgoing.properties, TimerPlace(message.queue.queue_id, message.queue_offset)
    for name in PROPERTIES:
        kept.pop(name, None)
    kept[PLACE] = f"{at.text}:{record.physical_offset}"  # which tells apart topics and generations
    kept.setdefault(UNIQUE_KEY, f"{at.queue_id:04X}{at.queue_offset:012X}{record.physical_offset:016X}")
    if has_timers:
        kept["TIMER_DELIVER_MS"] = str(deliver_ms)
    refusal = refused_target(topic, message.queue.topic) or judge(properties, record.stored_body) or ""
    return TimerSend(
        outgoing, kept[PLACE], int(queue) if queue.isdecimal() else at.queue_offset, deliver_ms, refusal
    )


def is_entry_of(message: Message, deliver_ms: int, order: int, key_hash: int, topic: str) -> bool:
    """Whether an entry of ``topic`` was made of ``message``: another log history may have another one at its place. A
    timer has another time and an ``order`` higher by one each time it is moved, which stays inside its message."""
    properties, physical_offset = message.properties, message.record.physical_offset
    key, is_moved = properties.get(UNIQUE_KEY, ""), 0 < order - physical_offset < len(message.data)
    return (
        (is_moved or (physical_offset == order and properties.get(DELIVER_MS) == str(deliver_ms)))
        and (hash_of(key) if key else physical_offset) == key_hash
        and properties.get(TOPIC, "") == topic
    )
