"""Timers: messages of the gateway topic that are sent to their own topic at a later time. Names, and what is a timer.

Pure. A timer is its message in the gateway topic: its place identifies it, and keys, which producers choose, only find
it. The write path finds the same in ``tiered.kernels.timers``, which a test compares with this.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from tiered.model.dates import PLAUSIBLE_MS
from tiered.model.topic_names import refused_target

TOPIC, DELIVER_MS, QUEUE = "TIERED_TOPIC", "TIERED_DELIVER_MS", "TIERED_QUEUE"
"""Properties of a message in the gateway topic: its topic, the time at which it is sent there, in ms since 1970, and
the queue there (optional)."""
CANCEL, CANCEL_PLACE = "TIERED_CANCEL", "TIERED_CANCEL_PLACE"
"""Properties of a message in the gateway topic that cancels timers of TIERED_TOPIC: "<delivery time in ms> <unique
key>"; and, to cancel only one of them, its place, which proxy mode takes from a recall handle."""
PLACE = "TIERED_PLACE"
"""Property of a message that was handed over: the place and the physical offset of its timer."""
SENDER, SEAL = "TIERED_SENDER", "TIERED_SEAL"
"""Properties that proxy mode adds: "<account>@<host>" of who sent the timer, and the seal of ``timer_seal``."""
PROPERTIES = frozenset((TOPIC, DELIVER_MS, QUEUE, CANCEL, CANCEL_PLACE, PLACE, SENDER, SEAL))
UNIQUE_KEY = "UNIQ_KEY"
HOUR_MS = 3_600_000
QUEUES_MAX = 65_536
"""Queue ids of a topic are below it."""
_TRANSACTION, _INNER_BATCH = 0xC, 0x80
_MS = re.compile(r"[0-9]{1,18}\Z")
_QUEUE = re.compile(r"[0-9]{1,5}\Z")
_CANCEL = re.compile(r"([0-9]{1,18}) (.+)\Z", re.DOTALL)
_PLACE = re.compile(r"([0-9]{1,5}):([0-9]{1,18})\Z")


class EntryKind(IntEnum):
    """What an entry of a timer object is. CANCEL: timers of its time, key and topic with a lower order are not sent;
    CANCEL_PLACE: only the one of them at its place. REFUSED: a message that is not delivered; the key's hash is the
    Refusal. POSTPONED: a timer that the broker refused, and that is sent again."""

    TIMER = 0
    CANCEL = 1
    CANCEL_PLACE = 2
    REFUSED = 3
    POSTPONED = 4


CANCELS = (EntryKind.CANCEL, EntryKind.CANCEL_PLACE)


class Refusal(IntEnum):
    """Why a message of the gateway topic is not delivered."""

    NONE = 0
    TRANSACTION = 1
    BAD_TARGET = 2
    NO_TOPIC = 3
    BAD_TIME = 4
    TOO_FAR = 5
    BAD_CANCEL = 6
    SECONDS = 7
    BAD_QUEUE = 8
    BROKER = 9

    @property
    def text(self) -> str:
        """The reason in messages, as a clause after the timer's name; empty for NONE."""
        return {
            Refusal.NONE: "",
            Refusal.TRANSACTION: "a message of a transaction or an inner batch cannot be a timer",
            Refusal.BAD_TARGET: f"its {TOPIC} is not a topic that timers may be sent to",
            Refusal.NO_TOPIC: f"it has no {TOPIC}",
            Refusal.BAD_TIME: f"its {DELIVER_MS} is not a time of the years 2000 to 2099 in ms since 1970",
            Refusal.TOO_FAR: f"its {DELIVER_MS} is more than two years ahead",
            Refusal.BAD_CANCEL: f'its {CANCEL} is not "<delivery time in ms> <unique key>" with a time of the years '
            f'2000 to 2099, or its {CANCEL_PLACE} is not "<queue id>:<queue offset>"',
            Refusal.SECONDS: f"its {DELIVER_MS} looks like seconds: give milliseconds",
            Refusal.BAD_QUEUE: f"its {QUEUE} is not a queue id",
            Refusal.BROKER: "the broker refused it until timers.refused_ttl_ms after its time",
        }[self]


class TimerPlace(NamedTuple):
    """Where the message of a timer is in the gateway topic."""

    queue_id: int
    queue_offset: int

    @property
    def text(self) -> str:
        """``<queue id>:<queue offset>``, the form that commands and the property CANCEL_PLACE use."""
        return f"{self.queue_id}:{self.queue_offset}"


def place_of(text: str) -> TimerPlace | None:
    """The place that ``text`` names; None: it is not one."""
    found = _PLACE.match(text)
    return TimerPlace(int(found[1]), int(found[2])) if found and int(found[1]) < QUEUES_MAX else None


def cancel_properties(
    topic: str, deliver_ms: int, unique_key: str, place: TimerPlace | None = None
) -> dict[str, str]:
    """The properties of a message that cancels the timers of ``topic`` with the delivery time ``deliver_ms`` and the
    unique key, or only the one whose own message is at ``place``."""
    found = {TOPIC: topic, CANCEL: f"{deliver_ms} {unique_key}"}
    return found if place is None else {**found, CANCEL_PLACE: place.text}


def time_problem(ms: int) -> str:
    """Why ``ms`` cannot be a time of delivery, as the rest of a sentence; empty: it can."""
    if ms in PLAUSIBLE_MS:
        return ""
    if ms * 1000 in PLAUSIBLE_MS:
        return f"{ms} looks like seconds: give milliseconds"
    return f"{ms} is not a time of the years 2000 to 2099 in ms since 1970"


class TimerRequest(NamedTuple):
    """What a message of the gateway topic asks for. ``cancel``: delivery time and unique key of timers of ``topic`` to
    cancel, ``cancel_place``: only the one there."""

    topic: str = ""
    deliver_ms: int = 0
    unique_key: str = ""
    cancel: tuple[int, str] | None = None
    cancel_place: TimerPlace | None = None
    refusal: Refusal = Refusal.NONE


def timer_of(
    properties: Mapping[str, str], *, stored_ms: int, sys_flag: int, max_delay_ms: int
) -> TimerRequest:
    """What a message of the gateway topic with ``properties``, stored at ``stored_ms``, requests: to deliver a timer,
    to cancel others, or both. A request with a refusal has no effect; of several reasons it has the first.
    ``sys_flag``: of the record; ``max_delay_ms``: how far ahead a timer may be."""
    topic, deliver, unique_key = (properties.get(name, "") for name in (TOPIC, DELIVER_MS, UNIQUE_KEY))
    cancel, place, queue = (properties.get(name, "") for name in (CANCEL, CANCEL_PLACE, QUEUE))
    found, at, deliver_ms = _CANCEL.match(cancel), place_of(place), 0
    refusal = Refusal.TRANSACTION if sys_flag & (_TRANSACTION | _INNER_BATCH) else Refusal.NONE
    if cancel or place:
        is_valid = found is not None and int(found[1]) in PLAUSIBLE_MS and (at is not None or not place)
        refusal = refusal or (Refusal.NONE if is_valid else Refusal.BAD_CANCEL)
    refusal = refusal or (Refusal.NONE if topic else Refusal.NO_TOPIC)
    if deliver or not (cancel or place):
        deliver_ms = int(deliver) if _MS.match(deliver) else 0
        is_queue = not queue or (_QUEUE.match(queue) and int(queue) < QUEUES_MAX)
        refusal = (
            refusal
            or (Refusal.NONE if deliver_ms in PLAUSIBLE_MS else _of_time(deliver_ms))
            or (Refusal.NONE if deliver_ms - stored_ms <= max_delay_ms else Refusal.TOO_FAR)
            or (Refusal.NONE if is_queue else Refusal.BAD_QUEUE)
        )
    refusal = refusal or (Refusal.BAD_TARGET if refused_target(topic) else Refusal.NONE)
    cancelled = (int(found[1]), found[2]) if found else None
    return TimerRequest(topic, deliver_ms, unique_key, cancelled, at, refusal)


def _of_time(ms: int) -> Refusal:
    return Refusal.SECONDS if ms * 1000 in PLAUSIBLE_MS else Refusal.BAD_TIME


# A message in the gateway topic proves nothing about its sender. Proxy mode adds two properties: the account and host
# of the client, and a code over them, the topic, the time and the body, which cannot be made without the archive's key.
_HANDLE_VERSION = "v1"


def _code(key: bytes, purpose: str, *parts: bytes) -> str:
    found = hmac.new(key, purpose.encode(), hashlib.sha256)
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


def _seal(key: bytes, properties: Mapping[str, str], body: bytes) -> str:
    parts = (properties.get(name, "").encode() for name in (SENDER, TOPIC, DELIVER_MS))
    return _code(key, "timer", *parts, body)


def sealed(key: bytes, sender: str, properties: Mapping[str, str], body: bytes) -> dict[str, str]:
    """The properties of a timer, with those that say who sent it."""
    found = {**properties, SENDER: sender}
    return {**found, SEAL: _seal(key, found, body)}


def sender_of(key: bytes, properties: Mapping[str, str], body: bytes) -> str | None:
    """The account and host that sent a timer, as proxy mode noted them in its ``properties``; None if the code that
    protects them, made with the archive's ``key``, is missing or does not match."""
    right = _seal(key, properties, body)
    is_right = hmac.compare_digest(right.encode(), properties.get(SEAL, "").encode())
    return properties.get(SENDER) if is_right else None


class Handle(NamedTuple):
    """The recall handle of a timer in the archive, and where it is kept."""

    topic: str
    broker: str
    deliver_ms: int
    unique_key: str
    place: TimerPlace

    def brokers_text(self) -> str:
        """The handle of the same timer at a broker, of five words, in which the time is TIMER_OUT_MS + 1."""
        recall_ms = (self.deliver_ms - 1) // 1000 * 1000 + 1
        return " ".join((_HANDLE_VERSION, self.topic, self.broker, str(recall_ms), self.unique_key))

    def text(self, key: bytes) -> str:
        """The handle as clients get it: as a broker's, and behind that the exact time, the place and a code made with
        the archive's ``key``, which clients do not read."""
        words = f"{self.brokers_text()} {self.deliver_ms} {self.place.text}"
        return encoded_handle(f"{words} {_code(key, 'handle', words.encode())}")


def encoded_handle(text: str) -> str:
    """A handle as clients hold it."""
    return base64.urlsafe_b64encode(text.encode()).decode("ascii")


def handle_words(text: str) -> list[str] | None:
    """The words of a recall handle in the form that clients have; None if ``text`` is no handle."""
    try:
        words = base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)).decode().split(" ")
    except ValueError:
        return None
    return words if len(words) >= 5 and words[0] == _HANDLE_VERSION else None


def own_handle(key: bytes, words: list[str]) -> Handle | None:
    """The recall handle that ``words`` make if it was made with ``key``, the private key of the archive; None if it is
    of another archive or was changed."""
    *signed, code = words
    is_right = hmac.compare_digest(_code(key, "handle", " ".join(signed).encode()).encode(), code.encode())
    if not is_right:
        return None
    _, topic, broker, _, *unique_key, deliver_ms, place = signed
    found = place_of(place)
    assert found is not None
    return Handle(topic, broker, int(deliver_ms), " ".join(unique_key), found)
