"""Which sends ask for a time that the broker does not take, and what they become for the gateway topic. Pure.

The rules are the broker's, in its order: a delay level wins, TIMER_OUT_MS is no timer, then TIMER_DELAY_SEC,
TIMER_DELAY_MS, TIMER_DELIVER_MS. Sources: HookUtils.handleScheduleMessage, SendMessageRequestHeaderV2,
RecallMessageHandle.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from tiered.errors import TieredError
from tiered.formats.record import parse_properties
from tiered.model.timer import CANCEL, DELIVER_MS, PROPERTIES, QUEUE, TOPIC, UNIQUE_KEY
from tiered.remoting.codes import RequestCode, ResponseCode
from tiered.remoting.command import RemotingCommand
from tiered.remoting.credentials import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE

SENDS = frozenset({RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE})
TIMER_PROPERTIES = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")
_CANCELLED, _LEVEL = "TIMER_DEL_UNIQKEY", "DELAY"
_DROPPED = frozenset({*TIMER_PROPERTIES, _CANCELLED, _LEVEL, *PROPERTIES})
_TRANSACTION_TYPE = 0xC
"""Bits of sysFlag."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
_HANDLE_VERSION = "v1"


class _Fields(NamedTuple):
    """Names of a send's fields."""

    topic: str
    default_topic: str
    queue_id: str
    sys_flag: str
    properties: str
    is_batch: str


_V1 = _Fields("topic", "defaultTopic", "queueId", "sysFlag", "properties", "batch")
_V2 = _Fields("b", "c", "e", "f", "i", "m")


class RefusedTimerError(TieredError):
    """A timer that neither the broker nor the archive takes. ``code``: of the reply; producers do not retry 13."""

    def __init__(self, words: str, code: int = ResponseCode.MESSAGE_ILLEGAL) -> None:
        super().__init__(words)
        self.code = code


@dataclass(frozen=True)
class AskedTimer:
    """A send at a time ahead. ``fields``: the names of its command's fields."""

    command: RemotingCommand
    fields: _Fields
    properties: Mapping[str, str]
    deliver_ms: int

    @property
    def topic(self) -> str:
        """Its real topic."""
        return self.command.ext_fields.get(self.fields.topic, "")

    @property
    def cancels(self) -> str:
        """The unique key of the timer that this one deletes; empty: it is a timer. Brokers from 5.3.2 to 5.3.3 have the
        topic in front."""
        return self.properties.get(_CANCELLED, "").removeprefix(self.topic).removeprefix("+")

    def for_gateway(self, gateway_topic: str) -> tuple[RemotingCommand, str]:
        """The send to the gateway topic, unsigned, to a queue that the broker chooses; and the unique key. A message
        without one gets one, as at a broker."""
        text = self.command.ext_fields
        kept = {name: value for name, value in self.properties.items() if name not in _DROPPED}
        unique_key = kept.setdefault(UNIQUE_KEY, uuid.uuid4().hex.upper())
        if key := self.cancels:
            kept[CANCEL] = f"{self.deliver_ms} {key}"
        else:
            kept |= {TOPIC: self.topic, DELIVER_MS: str(self.deliver_ms)}
            queue_id = text.get(self.fields.queue_id, "")
            kept |= {QUEUE: queue_id} if queue_id.isdecimal() else {}
        fields = {
            **text,
            self.fields.topic: gateway_topic,
            self.fields.default_topic: gateway_topic,
            self.fields.queue_id: "-1",
            self.fields.properties: _text(kept),
        }
        return replace(self.command, ext_fields=unsigned(fields)), unique_key


def asked_timer(command: RemotingCommand, now_ms: int) -> AskedTimer | None:
    """The timer that a send asks for; None: none that lies ahead. Raises RefusedTimerError for one that no broker
    delivers at its time: without a valid time, of a transaction, in a batch."""
    names = _V1 if command.code == RequestCode.SEND_MESSAGE else _V2
    text = command.ext_fields.get(names.properties, "")
    is_batch = (
        command.code == RequestCode.SEND_BATCH_MESSAGE or command.ext_fields.get(names.is_batch) == "true"
    )
    if "TIMER_DE" not in text:
        if is_batch and b"TIMER_DEL" in command.body and _has_timer(command.body):
            raise RefusedTimerError("timers cannot be sent in a batch: send them one by one")
        return None
    properties = parse_properties(text.encode())
    found = next(((name, properties[name]) for name in TIMER_PROPERTIES if name in properties), None)
    if found is None or "TIMER_OUT_MS" in properties or _is_level(properties.get(_LEVEL, "")):
        return None
    if is_batch:
        raise RefusedTimerError("timers cannot be sent in a batch: send them one by one")
    sys_flag = command.ext_fields.get(names.sys_flag, "0")
    if _NUMBER.fullmatch(sys_flag) and int(sys_flag) & _TRANSACTION_TYPE:
        raise RefusedTimerError("a transactional message cannot be a timer: remove one of both")
    name, value = found
    if not _NUMBER.fullmatch(value):
        raise RefusedTimerError(f"{name} = {value[:40]} is not a number of {'s' if 'SEC' in name else 'ms'}")
    number = int(value)
    if name != "TIMER_DELIVER_MS":
        number = now_ms + number * (1000 if name == "TIMER_DELAY_SEC" else 1)
    return AskedTimer(command, names, properties, number) if number > now_ms else None


def _is_level(delay: str) -> bool:
    return bool(_NUMBER.fullmatch(delay)) and int(delay) > 0


def _has_timer(body: bytes) -> bool:
    """Whether a batch's body has a property of a timer's name, by its separators."""
    return any(name.encode() + b"\x01" in body for name in TIMER_PROPERTIES)


def _text(properties: Mapping[str, str]) -> str:
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])


def unsigned(fields: Mapping[str, str]) -> dict[str, str]:
    """``fields`` without a client's signature."""
    return {k: v for k, v in fields.items() if k not in (ACCESS_KEY, SIGNATURE, SECURITY_TOKEN)}


class Handle(NamedTuple):
    """The recall handle of a timer in the archive."""

    topic: str
    broker: str
    deliver_ms: int
    unique_key: str

    def text(self, *, is_ours: bool = True) -> str:
        """As a broker's, of five words, in which the time is TIMER_OUT_MS + 1; ``is_ours``: with the exact time as a
        sixth, which clients do not read."""
        recall_ms = (self.deliver_ms - 1) // 1000 * 1000 + 1
        words = [_HANDLE_VERSION, self.topic, self.broker, str(recall_ms), self.unique_key]
        words += [str(self.deliver_ms)] * is_ours
        return base64.urlsafe_b64encode(" ".join(words).encode()).decode("ascii")


def own_handle(text: str) -> Handle | None:
    """A handle of ours; None: the broker's, or invalid."""
    try:
        words = base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)).decode().split(" ")
    except ValueError:
        return None
    if len(words) != 6 or words[0] != _HANDLE_VERSION or not _NUMBER.fullmatch(words[5]):
        return None
    return Handle(words[1], words[2], int(words[5]), words[4])


def cancel_send(handle: Handle, group: str, gateway_topic: str, now_ms: int) -> RemotingCommand:
    """The send to the gateway topic that cancels a timer. It has a body: 5.x brokers fail without one."""
    properties = {UNIQUE_KEY: uuid.uuid4().hex.upper(), CANCEL: f"{handle.deliver_ms} {handle.unique_key}"}
    fields = {
        "a": group,
        "b": gateway_topic,
        "c": gateway_topic,
        "d": "4",
        "e": "-1",
        "f": "0",
        "g": str(now_ms),
        "h": "0",
        "i": _text(properties),
        "j": "0",
        "k": "false",
        "m": "false",
    }
    return RemotingCommand(int(RequestCode.SEND_MESSAGE_V2), 0, ext_fields=fields, body=b"0")
