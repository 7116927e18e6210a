"""What a timer becomes when it is handed over."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

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
        """The unique key, by which the broker finds the message; others may have the same."""
        return self.message.properties[UNIQUE_KEY]


Judge = Callable[[Mapping[str, str], bytes], str | None]
"""Why the sender of a message of the gateway topic, by its properties and body, may not send it to its own topic; None:
it may."""


def everyone(_properties: Mapping[str, str], _body: bytes) -> None:
    """Without access rules every sender may send to every topic."""


def timer_send(message: Message, deliver_ms: int, judge: Judge = everyone, *, has_timers: bool) -> TimerSend:
    """Return what is sent at ``deliver_ms`` for ``message``, which set a timer by its arrival in the gateway topic.
    ``judge`` says why its sender may not send to the timer's topic, or None; ``has_timers``: the broker keeps the
    message until its time. Raises CorruptionError for a damaged record."""
    properties, record = message.properties, message.record
    topic, queue = properties.get(TOPIC, ""), properties.get(QUEUE, "")
    _, outgoing = next(outgoing_messages(message, topic))
    sent_properties, place = outgoing.properties, TimerPlace(message.queue.queue_id, message.queue_offset)
    for name in PROPERTIES:  # those that set the timer
        sent_properties.pop(name, None)
    # Queue offsets repeat in generations of the gateway topic, and physical offsets in a new, empty log.
    sent_properties[PLACE] = f"{place.text}:{record.physical_offset}:{record.store_timestamp}"
    # A broker, too, adds a unique key where a producer has set none.
    unique_key = f"{place.queue_id:04X}{place.queue_offset:012X}{record.physical_offset:016X}"
    sent_properties.setdefault(UNIQUE_KEY, unique_key)
    if has_timers:
        sent_properties["TIMER_DELIVER_MS"] = str(deliver_ms)
    refusal = refused_target(topic, message.queue.topic) or judge(properties, record.stored_body) or ""
    queue_number = int(queue) if queue.isdecimal() else place.queue_offset
    return TimerSend(outgoing, sent_properties[PLACE], queue_number, deliver_ms, refusal)


def is_entry_of(message: Message, entry: np.void, topic: str) -> bool:
    """Return whether ``message`` set the timer of ``entry``, a row of the archive's timers whose topic is ``topic``:
    after a loss of the end of the broker's log, another message may have got its queue offset."""
    properties, physical_offset = message.properties, message.record.physical_offset
    key, said_ms = properties.get(UNIQUE_KEY, ""), entry["deliver_ms"] - entry["moved_ms"]
    return (
        physical_offset == entry["physical_offset"]
        and properties.get(DELIVER_MS) == str(said_ms)
        and (hash_of(key) if key else physical_offset) == entry["key_hash"]
        and properties.get(TOPIC, "") == topic
    )
