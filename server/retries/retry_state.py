"""What consumers sent back, as a state and the objects it is read back from.

An object says what was added and what was delivered, that is, given its place in its queue; a *base* says all there is,
so that older objects are needed no more. Deliveries are recorded, not recomputed: an offset a client saw is the same
after any restart.

Pure. Owns the state and its coding. Does not own who may write (retry_log.py) nor when (retry_queue.py).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from server.retries.retry_record import delivered
from tiered.errors import CorruptionError
from tiered.formats.container import decode_container, encode_container

KIND: Final = b"RMQTRETR"
UNDELIVERED: Final = -1
MESSAGE_BYTES: Final = 350
"""Memory of a message beside its record: numbers and places in tables, measured."""
QUEUE_BYTES: Final = 450
"""Memory of a queue without messages. Where it goes on must be known for as long as the archive is served."""


@dataclass(slots=True)
class RetryMessage:
    """One message; ``queue_offset`` is UNDELIVERED while its delay lasts. ``data`` is the record as delivered."""

    number: int
    topic: str
    due_ms: int
    data: bytes
    queue_offset: int = UNDELIVERED
    stored_ms: int = 0

    @property
    def nbytes(self) -> int:
        """Memory, about."""
        return MESSAGE_BYTES + len(self.data)


@dataclass(frozen=True)
class Delivery:
    """A message got its place."""

    number: int
    queue_offset: int
    stored_ms: int


@dataclass
class RetryQueue:
    """Queue 0 of a retry or dead-letter topic: what was delivered and is still kept, in order. ``first_offset``: where
    the archived part ended when the first one came."""

    first_offset: int
    next_offset: int
    offsets: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    @property
    def min_offset(self) -> int:
        """The first that is kept."""
        return self.offsets[0] if self.offsets else self.next_offset

    def at(self, queue_offset: int) -> int:
        """Index of the first at ``queue_offset`` or after it."""
        return bisect_left(self.offsets, queue_offset)


@dataclass(frozen=True)
class RetryObject:
    """One object. A base also has ``queues``: topic -> (first offset, next offset)."""

    version: int
    owner: str
    owner_name: str
    next_number: int
    added: tuple[RetryMessage, ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    queues: dict[str, tuple[int, int]] | None = None


class RetryState:
    """Everything sent back and kept."""

    def __init__(self) -> None:
        self.messages: dict[int, RetryMessage] = {}
        self.queues: dict[str, RetryQueue] = {}
        self.next_number = 0
        self.held_bytes = 0
        """Memory of all of it, about: small records weigh less than what is known of them."""
        self._topics: dict[str, str] = {}
        """One text for each topic: what is read back has one for each message."""
        self._waiting: list[tuple[int, int]] = []
        """(when due, number) of what is not delivered, in order."""

    def apply(self, found: RetryObject) -> None:
        """Take what an object says. Raises CorruptionError when it does not follow."""
        if found.queues is not None:
            self.messages, self.queues, self.held_bytes, self._waiting = {}, {}, 0, []
            self._topics = {}
            for topic, (first, following) in found.queues.items():
                self._queue(topic, RetryQueue(first, following))
        for message in found.added:
            message.topic = self._topic(message.topic)
            self.messages[message.number] = message
            self.held_bytes += message.nbytes
            if message.queue_offset != UNDELIVERED:
                self._append(message)
            else:
                insort(self._waiting, (message.due_ms, message.number))
        for delivery in found.deliveries:
            self._deliver(delivery)
        self.next_number = max(self.next_number, found.next_number)

    def _topic(self, name: str) -> str:
        if name not in self._topics:
            self._topics[name] = name
            self.held_bytes += queue_bytes(name)
        return self._topics[name]

    def has_topic(self, name: str) -> bool:
        """Whether messages of this topic came before."""
        return name in self._topics

    def _queue(self, topic: str, made: RetryQueue) -> RetryQueue:
        return self.queues.setdefault(self._topic(topic), made)

    def _deliver(self, delivery: Delivery) -> None:
        message = self.messages.get(delivery.number)
        if message is None or message.queue_offset != UNDELIVERED:
            raise CorruptionError(f"message {delivery.number} is delivered, but does not wait for it")
        del self._waiting[bisect_left(self._waiting, (message.due_ms, message.number))]
        message.queue_offset, message.stored_ms = delivery.queue_offset, delivery.stored_ms
        message.data = delivered(
            message.data,
            number=message.number,
            queue_offset=message.queue_offset,
            stored_ms=message.stored_ms,
        )
        self._append(message)

    def _append(self, message: RetryMessage) -> None:
        offset = message.queue_offset
        queue = self._queue(message.topic, RetryQueue(offset, offset))
        if queue.offsets and offset <= queue.offsets[-1]:
            raise CorruptionError(f"{message.topic}: offset {offset} after {queue.offsets[-1]}")
        queue.offsets.append(offset)
        queue.numbers.append(message.number)
        queue.next_offset = max(queue.next_offset, offset + 1)

    def due(self, now_ms: int) -> list[RetryMessage]:
        """What is to be delivered, in order."""
        end = bisect_right(self._waiting, (now_ms, self.next_number))
        return [self.messages[number] for _, number in self._waiting[:end]]

    def next_due_ms(self) -> int | None:
        """When the next one is due."""
        return self._waiting[0][0] if self._waiting else None

    def release(self, topic: str, below: int) -> int:
        """Forget what was delivered below the offset ``below``; how many."""
        queue = self.queues.get(topic)
        end = 0 if queue is None else queue.at(below)
        if queue is None or end == 0:
            return 0
        for number in queue.numbers[:end]:
            self.held_bytes -= self.messages.pop(number).nbytes
        del queue.numbers[:end], queue.offsets[:end]
        return end

    def base(self, version: int, owner: str, owner_name: str) -> RetryObject:
        """All of it as one object."""
        queues = {topic: (queue.first_offset, queue.next_offset) for topic, queue in self.queues.items()}
        added = tuple(sorted(self.messages.values(), key=lambda m: (m.queue_offset, m.number)))
        return RetryObject(version, owner, owner_name, self.next_number, added, (), queues)


def queue_bytes(topic: str) -> int:
    """Memory of a topic's queue, about."""
    return QUEUE_BYTES + sys.getsizeof(topic)


def placed(messages: Iterable[RetryMessage], next_offsets: dict[str, int], now_ms: int) -> list[Delivery]:
    """The next places for ``messages``, in order; ``next_offsets`` by topic is counted on."""
    found = []
    for message in messages:
        offset = next_offsets[message.topic]
        next_offsets[message.topic] = offset + 1
        found.append(Delivery(message.number, offset, now_ms))
    return found


def encode_object(found: RetryObject) -> bytes:
    """The object's bytes."""
    header = {
        "version": found.version, "owner": found.owner, "owner_name": found.owner_name,
        "next_number": found.next_number,
        "added": [[m.number, m.topic, m.due_ms, m.queue_offset, m.stored_ms, len(m.data)] for m in found.added],
        "deliveries": [[d.number, d.queue_offset, d.stored_ms] for d in found.deliveries],
        "queues": None if found.queues is None else {topic: list(pair) for topic, pair in found.queues.items()},
    }  # fmt: skip
    data = np.frombuffer(b"".join(m.data for m in found.added), np.uint8)
    return encode_container(KIND, header, {"records": data.view([("byte", np.uint8)])})


def decode_object(data: bytes, *, source: str) -> RetryObject:
    """Raises CorruptionError or UnsupportedFormatError naming ``source``."""
    container = decode_container(data, KIND, source=source)
    header = container.header
    try:
        records, at, added = container.tables["records"]["byte"].tobytes(), 0, []
        for number, topic, due_ms, queue_offset, stored_ms, size in header["added"]:
            if not 0 < size <= len(records) - at:
                raise ValueError(f"a record of {size} bytes is cut short")
            record = records[at : at + size]
            added.append(
                RetryMessage(int(number), str(topic), int(due_ms), record, int(queue_offset), int(stored_ms))
            )
            at += size
        deliveries = tuple(Delivery(int(a), int(b), int(c)) for a, b, c in header["deliveries"])
        queues = header["queues"]
        return RetryObject(
            int(header["version"]), str(header["owner"]), str(header["owner_name"]), int(header["next_number"]),
            tuple(added), deliveries,
            None if queues is None else {str(topic): (int(a), int(b)) for topic, (a, b) in queues.items()},
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{source}: messages sent back do not parse: {error!r}") from error
