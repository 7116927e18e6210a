"""Retry messages as a state, and the objects that store it; a retry message or dead letter as a commitlog record,
encoded as a broker does.

Numbered objects under ``state/serve/retry/``, each created only if absent. An object lists messages added and delivered
(given a queue offset); a *base* lists everything, so that older objects are obsolete. Deliveries are stored, not
recomputed: an offset that a client saw is the same after a restart. Queue offset and store time are set on delivery
(``delivered``).

The new owner of the groups (group_state.py) first writes a base as the next number. A fenced server finds its next
number taken, or later numbers if that was removed, so its successor has read every message it acknowledged.
``RetryLog`` blocks; one task uses it. Sources: AbstractSendMessageProcessor.consumerSendMsgBack,
ScheduleMessageService.messageTimeup, MessageExtEncoder.
"""

from __future__ import annotations

import ipaddress
import secrets
import struct
import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tiered.errors import AlreadyExistsError, CorruptionError, FencedError, NotFoundError, UsageError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.keys import SERVE_PREFIX, is_version_name
from tiered.formats.memory_bound import LARGE, stored_bytes_max
from tiered.formats.record import (
    MAGIC_V1,
    MAGIC_V2,
    SYS_BORN_HOST_V6,
    SYS_STORE_HOST_V6,
    Record,
    encode_properties,
)
from tiered.object_store.interface import ObjectStore

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"
PHYS_BASE: Final = 1 << 62
"""Physical offsets of messages written here begin above every commitlog, so that repeated retries find them."""

_DELAYS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""A broker's default messageDelayLevel; levels count from 1."""
_FIRST_LEVEL = 3
_HEAD = struct.Struct(">iIIiiqqiq")
_OFFSET_AT, _PHYS_AT = 20, 28
_PROPERTIES_BYTES_MAX = 32_767
_V1_TOPIC_BYTES_MAX = 127


@dataclass(frozen=True)
class EncodedRetry:
    """A record without its place. ``delay_ms`` is 0 for dead letters."""

    topic: str
    delay_ms: int
    data: bytes


def is_dead(source: Record, delay_level: int, times_max: int) -> bool:
    """Whether it becomes a dead letter."""
    return source.reconsume_times >= times_max or delay_level < 0


def delay_ms_of(level: int) -> int:
    """Delay of a level; higher levels mean the last."""
    return _DELAYS_S[min(max(level, 1), len(_DELAYS_S)) - 1] * 1000


def encode_retry(
    source: Record, group: str, *, delay_level: int, times_max: int, address: str | None = None
) -> EncodedRetry:
    """The retry message of ``source``. ``address``: ``ip:port`` of the server, for ids. Raises UsageError if too
    large."""
    dead = is_dead(source, delay_level, times_max)
    topic = (DEAD_PREFIX if dead else RETRY_PREFIX) + group
    properties = dict(source.properties)
    properties.setdefault("RETRY_TOPIC", source.topic)
    properties["WAIT"] = "false"
    if not properties.get("ORIGIN_MESSAGE_ID"):
        properties["ORIGIN_MESSAGE_ID"] = source.offset_msg_id
    for name in ("DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC"):
        properties.pop(name, None)
    delay_ms = 0
    if dead:
        properties["DELAY"] = "0"
    else:
        level = delay_level if delay_level > 0 else _FIRST_LEVEL + source.reconsume_times
        delay_ms = delay_ms_of(level)
        properties |= {"REAL_TOPIC": topic, "REAL_QID": "0"}
    return EncodedRetry(topic, delay_ms, _encode(source, topic, properties, _host(address)))


def _host(address: str | None) -> bytes | None:
    """Address and port in the form of a record's host fields; None for a host name."""
    host, _, port = (address or "").rpartition(":")
    try:
        return ipaddress.ip_address(host.strip("[]")).packed + struct.pack(">i", int(port))
    except ValueError:
        return None


def _encode(source: Record, topic: str, properties: dict[str, str], host: bytes | None) -> bytes:
    """The record of a retry message: the source's, with another topic and properties, and one more reconsumption."""
    encoded = encode_properties(properties).encode("utf-8", "replace")
    if len(encoded) > _PROPERTIES_BYTES_MAX:
        raise UsageError(f"properties of {len(encoded)} bytes are too large for a retry message")
    born_end = _HEAD.size + (20 if source.sys_flag & SYS_BORN_HOST_V6 else 8)
    born_host = source.data[_HEAD.size : born_end]
    is_v6 = bool(source.sys_flag & SYS_STORE_HOST_V6)
    store_host = source.data[born_end + 8 : born_end + 8 + (20 if is_v6 else 8)]
    sys_flag = source.sys_flag
    if host is not None:
        store_host = host
        sys_flag = sys_flag & ~SYS_STORE_HOST_V6 | (SYS_STORE_HOST_V6 if len(host) == 20 else 0)
    return encode_record(
        topic,
        encoded,
        source.stored_body,
        (born_host, store_host),
        flag=source.flag,
        sys_flag=sys_flag,
        born_ms=source.born_timestamp,
        body_crc=source.body_crc,
        times=source.reconsume_times + 1,
    )


def encode_record(
    topic: str,
    properties: bytes,
    body: bytes,
    hosts: tuple[bytes | memoryview, bytes | memoryview],
    *,
    flag: int,
    sys_flag: int,
    born_ms: int,
    body_crc: int,
    times: int = 0,
) -> bytes:
    """A record without its place, as a broker stores it. ``hosts``: born and store host; ``times``: reconsumed."""
    name = topic.encode()
    magic = MAGIC_V1 if len(name) <= _V1_TOPIC_BYTES_MAX else MAGIC_V2
    tail = b"".join(
        (
            hosts[0],
            bytes(8),
            hosts[1],
            struct.pack(">iqi", times, 0, len(body)),
            body,
            struct.pack(">b" if magic == MAGIC_V1 else ">h", len(name)),
            name,
            struct.pack(">h", len(properties)),
            properties,
        )
    )
    size = _HEAD.size + len(tail)
    return _HEAD.pack(size, magic, body_crc, 0, flag, 0, PHYS_BASE, sys_flag, born_ms) + tail


def delivered(data: bytes, *, number: int, queue_offset: int, stored_ms: int) -> bytes:
    """A record with its offset and store time; ``number`` counts all retry messages."""
    record = bytearray(data)
    struct.pack_into(">qq", record, _OFFSET_AT, queue_offset, PHYS_BASE + number)
    (sys_flag,) = struct.unpack_from(">i", record, _PHYS_AT + 8)
    struct.pack_into(">q", record, _HEAD.size + (20 if sys_flag & SYS_BORN_HOST_V6 else 8), stored_ms)
    return bytes(record)


KIND: Final = b"RMQTRETR"
UNDELIVERED: Final = -1
MESSAGE_BYTES: Final = 350
"""Measured memory of a message without its record."""
QUEUE_BYTES: Final = 450
"""Memory of a queue without messages, which is kept for its next offset."""


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
        """Memory estimate."""
        return MESSAGE_BYTES + len(self.data)


@dataclass(frozen=True)
class Delivery:
    """The place of a delivered message."""

    number: int
    queue_offset: int
    stored_ms: int


@dataclass
class RetryQueue:
    """Queue 0 of a retry or dead-letter topic: stored delivered messages, in order. ``first_offset``: the end of the
    archived part at the first delivery."""

    first_offset: int
    next_offset: int
    offsets: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    @property
    def min_offset(self) -> int:
        """Offset of the first stored message."""
        return self.offsets[0] if self.offsets else self.next_offset

    def at(self, queue_offset: int) -> int:
        """Index of the first message from ``queue_offset`` on."""
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
    """All stored retry messages."""

    def __init__(self) -> None:
        """Empty: ``apply`` adds the stored objects in order."""
        self.messages: dict[int, RetryMessage] = {}
        self.queues: dict[str, RetryQueue] = {}
        self.next_number = 0
        self.held_bytes = 0
        """Memory estimate; small records take less than their tables."""
        self._topics: dict[str, str] = {}
        """Interned topic names: decoded objects have one string per message."""
        self._waiting: list[tuple[int, int]] = []
        """(due time, number) of undelivered messages, in order."""

    def apply(self, found: RetryObject) -> None:
        """Apply an object. Raises CorruptionError if it does not fit the state."""
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
        """Whether the topic has had messages."""
        return name in self._topics

    def _queue(self, topic: str, made: RetryQueue) -> RetryQueue:
        return self.queues.setdefault(self._topic(topic), made)

    def _deliver(self, delivery: Delivery) -> None:
        """Give a waiting message its queue offset; from now on consumers can pull it."""
        message = self.messages.get(delivery.number)
        if message is None or message.queue_offset != UNDELIVERED:
            raise CorruptionError(f"message {delivery.number} is delivered but was not waiting")
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
        """Add a delivered message to its queue, whose offsets only grow."""
        offset = message.queue_offset
        queue = self._queue(message.topic, RetryQueue(offset, offset))
        if queue.offsets and offset <= queue.offsets[-1]:
            raise CorruptionError(f"{message.topic}: offset {offset} after {queue.offsets[-1]}")
        queue.offsets.append(offset)
        queue.numbers.append(message.number)
        queue.next_offset = max(queue.next_offset, offset + 1)

    def due(self, now_ms: int) -> list[RetryMessage]:
        """Messages to deliver, in order."""
        end = bisect_right(self._waiting, (now_ms, self.next_number))
        return [self.messages[number] for _, number in self._waiting[:end]]

    def next_due_ms(self) -> int | None:
        """Due time of the next message."""
        return self._waiting[0][0] if self._waiting else None

    def release(self, topic: str, below: int) -> int:
        """Remove delivered messages below offset ``below``; returns their number."""
        queue = self.queues.get(topic)
        end = 0 if queue is None else queue.at(below)
        if queue is None or end == 0:
            return 0
        for number in queue.numbers[:end]:
            self.held_bytes -= self.messages.pop(number).nbytes
        del queue.numbers[:end], queue.offsets[:end]
        return end

    def base(self, version: int, owner: str, owner_name: str) -> RetryObject:
        """The whole state as one object."""
        queues = {topic: (queue.first_offset, queue.next_offset) for topic, queue in self.queues.items()}
        added = tuple(sorted(self.messages.values(), key=lambda m: (m.queue_offset, m.number)))
        return RetryObject(version, owner, owner_name, self.next_number, added, (), queues)


def queue_bytes(topic: str) -> int:
    """Memory estimate of a topic's queue."""
    return QUEUE_BYTES + sys.getsizeof(topic)


def assign_offsets(
    messages: Iterable[RetryMessage], next_offsets: dict[str, int], now_ms: int
) -> list[Delivery]:
    """The places of ``messages``, in order; advances ``next_offsets`` (by topic)."""
    found = []
    for message in messages:
        offset = next_offsets[message.topic]
        next_offsets[message.topic] = offset + 1
        found.append(Delivery(message.number, offset, now_ms))
    return found


def encode_object(found: RetryObject) -> bytes:
    """The object's bytes."""
    header = {
        "version": found.version,
        "owner": found.owner,
        "owner_name": found.owner_name,
        "next_number": found.next_number,
        "added": [
            [m.number, m.topic, m.due_ms, m.queue_offset, m.stored_ms, len(m.data)] for m in found.added
        ],
        "deliveries": [[d.number, d.queue_offset, d.stored_ms] for d in found.deliveries],
        "queues": None
        if found.queues is None
        else {topic: list(pair) for topic, pair in found.queues.items()},
    }
    data = np.frombuffer(b"".join(m.data for m in found.added), np.uint8)
    return encode_container(KIND, header, {"records": data.view([("byte", np.uint8)])})


def decode_object(data: bytes, *, source: str) -> RetryObject:
    """Raises CorruptionError or UnsupportedFormatError naming ``source``."""
    container = decode_container(data, KIND, source=source, allowance=LARGE)
    header = container.header
    try:
        records, at, added = container.tables["records"]["byte"].tobytes(), 0, []
        for number, topic, due_ms, queue_offset, stored_ms, size in header["added"]:
            if not 0 < size <= len(records) - at:
                raise ValueError(f"a retry message of {size} bytes is longer than what is left of its object")
            record = records[at : at + size]
            added.append(
                RetryMessage(int(number), str(topic), int(due_ms), record, int(queue_offset), int(stored_ms))
            )
            at += size
        deliveries = tuple(Delivery(int(a), int(b), int(c)) for a, b, c in header["deliveries"])
        queues = header["queues"]
        return RetryObject(
            int(header["version"]),
            str(header["owner"]),
            str(header["owner_name"]),
            int(header["next_number"]),
            tuple(added),
            deliveries,
            None if queues is None else {str(topic): (int(a), int(b)) for topic, (a, b) in queues.items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{source}: these retry messages are damaged: {error}") from error


RETRY_KEYS: Final = f"{SERVE_PREFIX}retry/"
CLAIMS_MAX: Final = 20


def object_key(version: int) -> str:
    """Key of an object; later versions sort later."""
    return f"{RETRY_KEYS}{version:020d}"


def _is_ours(key: str) -> bool:
    return is_version_name(key.removeprefix(RETRY_KEYS))


def load_objects(store: ObjectStore) -> list[RetryObject]:
    """The newest base and the objects after it, in order; empty if there is none. Raises CorruptionError."""
    for _ in range(CLAIMS_MAX):
        keys = sorted(info.key for info in store.list(RETRY_KEYS) if _is_ours(info.key))
        try:
            return _from_newest_base(store, keys)
        except NotFoundError:
            continue  # replaced by a newer base since the listing
    raise CorruptionError(f"{store.url}/{RETRY_KEYS}: objects keep disappearing while they are read")


def _from_newest_base(store: ObjectStore, keys: list[str]) -> list[RetryObject]:
    """The newest base and all objects after it, in order; a missing one in between is damage."""
    found: list[RetryObject] = []
    for key in reversed(keys):
        one = decode_object(store.get(key, stored_bytes_max()), source=f"{store.url}/{key}")
        if key != object_key(one.version) or (found and one.version != found[-1].version - 1):
            raise CorruptionError(f"{store.url}/{key}: version {one.version} is out of order")
        found.append(one)
        if one.queues is not None:
            return found[::-1]
    if found:
        raise CorruptionError(
            f"{store.url}/{keys[0]}: the objects before this one are lost, and with them retry messages"
        )
    return []


class RetryLog:
    """Writes an archive's retry messages as one server."""

    def __init__(self, store: ObjectStore, owner_name: str) -> None:
        self._store = store
        self.owner = secrets.token_hex(8)
        self.owner_name = owner_name
        self.version = 0
        self.base_version = 0

    def claim(self) -> RetryState:
        """Read all objects and become the writer. Raises FencedError while another server keeps writing."""
        for _ in range(CLAIMS_MAX):
            state, objects = RetryState(), load_objects(self._store)
            for found in objects:
                state.apply(found)
            self.version = objects[-1].version if objects else 0
            try:
                self.write(state.base(self.version + 1, self.owner, self.owner_name))
            except FencedError:
                continue  # the other server's last append came in between
            return state
        raise FencedError(
            f"another server still writes retry messages to {self._store.url}",
            hint="stop it, or wait until it has noticed that the consumer groups are no longer its own",
        )

    def write(self, found: RetryObject) -> None:
        """Write the next object. Raises FencedError if another server wrote it. After other errors it may or may not
        exist: the caller writes the same object again."""
        assert found.version == self.version + 1
        key = object_key(found.version)
        try:
            self._store.put_if_absent(key, [encode_object(found)])
        except AlreadyExistsError:
            there = decode_object(self._store.get(key, stored_bytes_max()), source=f"{self._store.url}/{key}")
            if there.owner != self.owner:
                raise FencedError(f"{there.owner_name} has taken over the retry messages") from None
        if any(_is_ours(info.key) for info in self._store.list(RETRY_KEYS, start_after=key)):
            raise FencedError("another server has taken over the retry messages of this archive")
        self.version = found.version
        if found.queues is not None:
            self.base_version = found.version

    def remove_replaced(self) -> None:
        """Delete objects that the newest base replaces."""
        base = object_key(self.base_version)
        keys = [info.key for info in self._store.list(RETRY_KEYS) if info.key < base and _is_ours(info.key)]
        if keys:
            self._store.delete(keys)
