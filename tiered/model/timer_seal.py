"""Seals what proxy mode has judged, with a key of the archive: who sent a timer, and the handles that recall one. Pure.

A message in the gateway topic proves nothing about its sender. Proxy mode adds two properties: the account and host of
the client, and a code over them, the topic, the time and the body. It cannot be made without the key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import NamedTuple

from tiered.model.timer import DELIVER_MS, SEAL, SENDER, TOPIC, TimerPlace, place_of

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
    """Who sent the timer; None: proxy mode has not sealed it, or not with this content."""
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
        """A broker's, with the exact time, the place and a code behind it, which clients do not read."""
        words = f"{self.brokers_text()} {self.deliver_ms} {self.place.text}"
        return encoded_handle(f"{words} {_code(key, 'handle', words.encode())}")


def encoded_handle(text: str) -> str:
    """A handle as clients hold it."""
    return base64.urlsafe_b64encode(text.encode()).decode("ascii")


def handle_words(text: str) -> list[str] | None:
    """The words of a handle, which brokers read; None: it is not one."""
    try:
        words = base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)).decode().split(" ")
    except ValueError:
        return None
    return words if len(words) >= 5 and words[0] == _HANDLE_VERSION else None


def own_handle(key: bytes, words: list[str]) -> Handle | None:
    """A handle that was made with ``key``; None: another one, or a changed one."""
    *signed, code = words
    is_right = hmac.compare_digest(_code(key, "handle", " ".join(signed).encode()).encode(), code.encode())
    if not is_right:
        return None
    _, topic, broker, _, *unique_key, deliver_ms, place = signed
    found = place_of(place)
    assert found is not None
    return Handle(topic, broker, int(deliver_ms), " ".join(unique_key), found)
