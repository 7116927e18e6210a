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
from tiered.model.queue import DEAD_PREFIX, RETRY_PREFIX
from tiered.object_store.interface import ObjectStore

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
    """Return the retry message that ``source``, a record which a consumer of ``group`` could not process, becomes;
    after ``times_max`` attempts, or for a negative ``delay_level``, it is a dead letter. ``address``: ``ip:port`` of
    this server, which message ids contain. Raises UsageError if the properties are too large."""
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
        # Without a level from the consumer, each attempt waits longer than the one before.
        level = delay_level if delay_level > 0 else _FIRST_LEVEL + source.reconsume_times
        delay_ms = delay_ms_of(level)
        properties |= {"REAL_TOPIC": topic, "REAL_QID": "0"}
    return EncodedRetry(topic, delay_ms, _encode(source, topic, properties, host_bytes(address or "")))


def host_bytes(address: str) -> bytes | None:
    """Return IP address and port of ``address`` in the form of a record's host fields; None for a host name."""
    host, _, port = address.rpartition(":")
    try:
        return ipaddress.ip_address(host.strip("[]")).packed + struct.pack(">i", int(port))
    except ValueError:
        return None


def _encode(source: Record, topic: str, properties: dict[str, str], host: bytes | None) -> bytes:
    """Return the record of a retry message: that of ``source`` with another topic and properties, and one consumption
    more. ``host``: this server's address as its store host, None: the source's. Raises UsageError if the properties are
    too large."""
    encoded = encode_properties(properties).encode("utf-8", "replace")
    if len(encoded) > _PROPERTIES_BYTES_MAX:
        raise UsageError(
            f"the message's properties are {len(encoded)} bytes as a retry message, and {_PROPERTIES_BYTES_MAX} are"
            " allowed"
        )
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
    """Return a record as a broker stores it, with zeros for its offset and store time, which ``delivered`` sets.
    ``hosts``: born and store host; ``times``: how often it was consumed before."""
    name = topic.encode()
    # The first version of the format has one byte for the length of the topic.
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
    """Return the record ``data`` with its queue offset and store time. Its physical offset is made of ``number``, which
    counts all retry messages and lies above all offsets of a commitlog."""
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
        """Begin without messages: ``apply`` adds those of the stored objects, in order."""
        self.messages: dict[int, RetryMessage] = {}
        self.queues: dict[str, RetryQueue] = {}
        self.next_number = 0
        self.held_bytes = 0
        """Memory estimate; small records take less than their tables."""
        self._topics: dict[str, str] = {}
        """Interned topic names: decoded objects have one string per message."""
        self._waiting: list[tuple[int, int]] = []
        """(due time, number) of undelivered messages, in order."""

    def apply(self, retry_object: RetryObject) -> None:
        """Change this state as an object says: it adds messages and delivers waiting ones; a base replaces everything.
        Raises CorruptionError if the object does not fit the state."""
        if retry_object.queues is not None:
            self.messages, self.queues, self.held_bytes, self._waiting = {}, {}, 0, []
            self._topics = {}
            for topic, (first_offset, next_offset) in retry_object.queues.items():
                self._queue(topic, RetryQueue(first_offset, next_offset))
        for message in retry_object.added:
            message.topic = self._topic(message.topic)
            self.messages[message.number] = message
            self.held_bytes += message.nbytes
            if message.queue_offset != UNDELIVERED:
                self._append(message)
            else:
                insort(self._waiting, (message.due_ms, message.number))
        for delivery in retry_object.deliveries:
            self._deliver(delivery)
        self.next_number = max(self.next_number, retry_object.next_number)

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
        """Give a waiting message its queue offset, so that consumers can pull it. Raises CorruptionError if no such
        message waits."""
        message = self.messages.get(delivery.number)
        if message is None or message.queue_offset != UNDELIVERED:
            raise CorruptionError(
                f"the stored retry messages are inconsistent: message number {delivery.number} is delivered, but does"
                " not wait for it"
            )
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
        """Add a delivered message at the end of its topic's queue. Raises CorruptionError if its offset is not above
        those of the messages before."""
        offset = message.queue_offset
        queue = self._queue(message.topic, RetryQueue(offset, offset))
        if queue.offsets and offset <= queue.offsets[-1]:
            raise CorruptionError(
                f"the stored retry messages are inconsistent: in {message.topic} offset {offset} follows offset"
                f" {queue.offsets[-1]}"
            )
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
        """Remove the delivered messages of a topic below the offset ``below``, and return how many there were."""
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
    """Return a delivery for each of ``messages``, in order: the next offset of its topic, and ``now_ms`` as its store
    time. ``next_offsets``, by topic, is advanced."""
    deliveries = []
    for message in messages:
        offset = next_offsets[message.topic]
        next_offsets[message.topic] = offset + 1
        deliveries.append(Delivery(message.number, offset, now_ms))
    return deliveries


def encode_object(retry_object: RetryObject) -> bytes:
    """Return the bytes that an object of retry messages is stored as: a header, and all records one after another."""
    added, queues = retry_object.added, retry_object.queues
    header = {
        "version": retry_object.version,
        "owner": retry_object.owner,
        "owner_name": retry_object.owner_name,
        "next_number": retry_object.next_number,
        "added": [[m.number, m.topic, m.due_ms, m.queue_offset, m.stored_ms, len(m.data)] for m in added],
        "deliveries": [[d.number, d.queue_offset, d.stored_ms] for d in retry_object.deliveries],
        "queues": None if queues is None else {topic: list(pair) for topic, pair in queues.items()},
    }
    data = np.frombuffer(b"".join(m.data for m in added), np.uint8)
    return encode_container(KIND, header, {"records": data.view([("byte", np.uint8)])})


def decode_object(data: bytes, *, source: str) -> RetryObject:
    """Return the retry messages and deliveries in an object's bytes. Raises CorruptionError or UnsupportedFormatError
    with the object's address ``source``."""
    container = decode_container(data, KIND, source=source, allowance=LARGE)
    header = container.header
    try:
        records, begin, added = container.tables["records"]["byte"].tobytes(), 0, []
        for number, topic, due_ms, queue_offset, stored_ms, size in header["added"]:
            if not 0 < size <= len(records) - begin:
                raise ValueError(
                    f"message number {number} has {size} bytes, and {len(records) - begin} are left of the object"
                )
            record = records[begin : begin + size]
            added.append(
                RetryMessage(int(number), str(topic), int(due_ms), record, int(queue_offset), int(stored_ms))
            )
            begin += size
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
    """Return the stored retry messages: the newest base, an object with everything up to it, and the objects after it
    in order; an empty list if there is none. Raises CorruptionError if an object is damaged or missing."""
    for _ in range(CLAIMS_MAX):
        keys = sorted(info.key for info in store.list(RETRY_KEYS) if _is_ours(info.key))
        try:
            return _from_newest_base(store, keys)
        except NotFoundError:
            continue  # replaced by a newer base since the listing
    raise CorruptionError(
        f"the retry messages in {store.url}/{RETRY_KEYS} cannot be read: in each of {CLAIMS_MAX} attempts an object"
        " was deleted after it was listed"
    )


def _from_newest_base(store: ObjectStore, keys: list[str]) -> list[RetryObject]:
    """Return the objects at ``keys``, which are sorted, from the newest base on: an object with all retry messages up
    to it. Raises CorruptionError if an object after the base is missing or damaged, or if there is no base."""
    objects: list[RetryObject] = []
    for key in reversed(keys):
        read = decode_object(store.get(key, stored_bytes_max()), source=f"{store.url}/{key}")
        if key != object_key(read.version) or (objects and read.version != objects[-1].version - 1):
            raise CorruptionError(
                f"{store.url}/{key} is damaged or a copy of another object: it has version {read.version} of the retry"
                f" messages, where {objects[-1].version - 1 if objects else 'that of its key'} is expected"
            )
        objects.append(read)
        if read.queues is not None:
            return objects[::-1]
    if objects:
        raise CorruptionError(
            f"{store.url}/{keys[0]}: this is the oldest object of retry messages, and those before it are lost"
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
        """Read all retry messages and become the server that writes them, by writing a base: an object with all of
        them. Raises FencedError while another server keeps writing."""
        for _ in range(CLAIMS_MAX):
            state, objects = RetryState(), load_objects(self._store)
            for retry_object in objects:
                state.apply(retry_object)
            self.version = objects[-1].version if objects else 0
            try:
                self.write(state.base(self.version + 1, self.owner, self.owner_name))
            except FencedError:
                continue  # the other server's last append came in between
            return state
        raise FencedError(
            f"another server still writes retry messages to {self._store.url}",
            hint="stop that server, or wait until it has noticed that the consumer groups are no longer its own",
        )

    def write(self, retry_object: RetryObject) -> None:
        """Write the next object. Raises FencedError if another server has written one of its version or a later one.
        After other errors it may or may not exist: the caller writes the same object again."""
        assert retry_object.version == self.version + 1
        key = object_key(retry_object.version)
        try:
            self._store.put_if_absent(key, [encode_object(retry_object)])
        except AlreadyExistsError:
            try:
                data = self._store.get(key, stored_bytes_max())
            except NotFoundError:  # a successor has removed it since
                raise FencedError(
                    "another server has taken over the retry messages of this archive"
                ) from None
            winner = decode_object(data, source=f"{self._store.url}/{key}")
            if winner.owner != self.owner:  # else it is ours, whose reply was lost
                raise FencedError(
                    f"the server {winner.owner_name} has taken over the retry messages of this archive"
                ) from None
        # A successor may have written this version and removed it, while this process slept.
        if any(_is_ours(info.key) for info in self._store.list(RETRY_KEYS, start_after=key)):
            raise FencedError("another server has taken over the retry messages of this archive")
        self.version = retry_object.version
        if retry_object.queues is not None:
            self.base_version = retry_object.version

    def remove_replaced(self) -> None:
        """Delete objects that the newest base replaces."""
        base = object_key(self.base_version)
        keys = [info.key for info in self._store.list(RETRY_KEYS) if info.key < base and _is_ours(info.key)]
        if keys:
            self._store.delete(keys)
