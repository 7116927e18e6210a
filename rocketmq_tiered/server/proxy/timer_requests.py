"""Which sends ask for a time that the broker does not take, and what they become for the gateway topic. Pure.

The rules are the broker's, in its order: a delay level wins, TIMER_OUT_MS is no timer, then TIMER_DELAY_SEC,
TIMER_DELAY_MS, TIMER_DELIVER_MS. Sources: HookUtils.handleScheduleMessage, SendMessageRequestHeaderV2,
RecallMessageHandle.
"""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rocketmq_tiered.server.wire.request import Request
from rocketmq_tiered.server.wire.request_fields import LETTERS, encoded_fields
from tiered.errors import TieredError
from tiered.formats.record import SEPARATORS, encode_properties, parse_properties
from tiered.model.timer import (
    DELIVER_MS,
    PLACE,
    QUEUE,
    TOPIC,
    UNIQUE_KEY,
    Handle,
    TimerPlace,
    cancel_properties,
    sealed,
    time_problem,
)
from tiered.model.topic_names import refused_target, shortened
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode

SENDS = frozenset({RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE})
TIMER_PROPERTIES = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")
_CANCELLED, _LEVEL, _RESERVED = "TIMER_DEL_UNIQKEY", "DELAY", "TIERED_"
_DROPPED = frozenset({*TIMER_PROPERTIES, _CANCELLED, _LEVEL, PLACE})
"""Properties that are dropped from a message that its consumer sends again."""
_TRANSACTION_TYPE = 0xC
"""Bits of sysFlag."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
_NOT_IN_A_BATCH = "timers cannot be sent in a batch: send them one by one"


class RefusedTimerError(TieredError):
    """A timer that neither the broker nor the archive takes. ``code``: of the reply; producers do not retry 13."""

    def __init__(self, words: str, code: int = ResponseCode.MESSAGE_ILLEGAL) -> None:
        super().__init__(words)
        self.code = code


@dataclass(frozen=True)
class AskedTimer:
    """A send at a time ahead. ``fields``: see Request."""

    command: RemotingCommand
    fields: Mapping[str, str]
    properties: Mapping[str, str]
    deliver_ms: int

    @property
    def topic(self) -> str:
        """The topic to which the timer is delivered."""
        return self.fields.get("topic", "")

    @property
    def cancels(self) -> str:
        """The unique key of the timer that this one deletes; empty: it is a timer. Brokers from 5.3.2 to 5.3.3 have the
        topic in front."""
        return self.properties.get(_CANCELLED, "").removeprefix(self.topic).removeprefix("+")

    def for_gateway(self, gateway_topic: str, sender: str, key: bytes) -> tuple[RemotingCommand, str]:
        """Return the request that sends this timer to the gateway topic, and the message's unique key, which is made if
        it has none. With the archive's private ``key`` the message is marked as one of ``sender``, an account and host.
        Raises RefusedTimerError for a topic, a time or a property that a timer may not have."""
        if (why := refused_target(self.topic, gateway_topic)) is not None:
            raise RefusedTimerError(f"a timer cannot be sent to this topic: {why}")
        if problem := time_problem(self.deliver_ms):
            raise RefusedTimerError(f"the timer is refused: its time of delivery {problem}")
        properties = {name: value for name, value in self.properties.items() if name not in _DROPPED}
        if reserved := [name for name in properties if name.startswith(_RESERVED)]:
            raise RefusedTimerError(
                f"the timer is refused: property {shortened(reserved[0])} has a reserved name, choose another one"
            )
        if any(SEPARATORS.search(text) for pair in properties.items() for text in pair):
            raise RefusedTimerError(
                "the timer is refused: a property has one of the control characters that separate properties"
            )
        unique_key = properties.setdefault(UNIQUE_KEY, uuid.uuid4().hex.upper())
        if cancelled := self.cancels:
            properties |= cancel_properties(self.topic, self.deliver_ms, cancelled)
        else:
            properties |= {TOPIC: self.topic, DELIVER_MS: str(self.deliver_ms)}
            queue_id = self.fields.get("queueId", "")
            properties |= {QUEUE: queue_id} if queue_id.isdecimal() else {}
            properties = sealed(key, sender, properties, self.command.body)
        return _gateway_send(self.command, self.fields, gateway_topic, properties), unique_key


def _gateway_send(
    command: RemotingCommand, fields: Mapping[str, str], gateway_topic: str, properties: Mapping[str, str]
) -> RemotingCommand:
    """Return a request, without a signature, that sends the body of ``command`` with ``properties`` to the gateway
    topic, to a queue that the broker chooses. Of ``fields`` it has those that a send declares."""
    code = RequestCode.SEND_MESSAGE_V2
    declared = {name: fields[name] for name in LETTERS.values() if name in fields}
    declared |= {"topic": gateway_topic, "defaultTopic": gateway_topic, "queueId": "-1"}
    declared["properties"] = encode_properties(properties)
    return replace(command, code=int(code), ext_fields=encoded_fields(code, declared))


def asked_timer(request: Request, now_ms: int) -> AskedTimer | None:
    """Return the timer that a send asks for by its properties; None if it asks for none, or for a time that has passed.
    Raises RefusedTimerError for one that no broker delivers at its time: without a valid time, in a transaction, in a
    batch."""
    command, fields = request.command, request.fields
    text = fields.get("properties", "")
    is_batch = command.code == RequestCode.SEND_BATCH_MESSAGE or request.flag("batch")
    if "TIMER_DE" not in text:  # most sends: the properties need not be parsed
        if is_batch and b"TIMER_DEL" in command.body and _has_timer(command.body):
            raise RefusedTimerError(_NOT_IN_A_BATCH)
        return None
    properties = parse_properties(text.encode())
    name = next((name for name in TIMER_PROPERTIES if name in properties), None)
    if name is None or "TIMER_OUT_MS" in properties or _is_level(properties.get(_LEVEL, "")):
        return None
    if is_batch:
        raise RefusedTimerError(_NOT_IN_A_BATCH)
    sys_flag = fields.get("sysFlag", "0")
    if _NUMBER.fullmatch(sys_flag) and int(sys_flag) & _TRANSACTION_TYPE:
        raise RefusedTimerError(
            "a message of a transaction cannot be a timer: send it without a delivery time, or outside a transaction"
        )
    value = properties[name]
    if not _NUMBER.fullmatch(value):
        raise RefusedTimerError(
            f"{name} = {shortened(value)} is not a number of {'s' if 'SEC' in name else 'ms'}"
        )
    deliver_ms = int(value)
    if name != "TIMER_DELIVER_MS":  # the property is a delay
        deliver_ms = now_ms + deliver_ms * (1000 if name == "TIMER_DELAY_SEC" else 1)
    elif deliver_ms <= now_ms and (problem := time_problem(deliver_ms)):
        raise RefusedTimerError(f"{name} = {problem}")
    return AskedTimer(command, fields, properties, deliver_ms) if deliver_ms > now_ms else None


def _is_level(delay: str) -> bool:
    return bool(_NUMBER.fullmatch(delay)) and int(delay) > 0


def _has_timer(body: bytes) -> bool:
    """Whether a batch's body has a property of a timer's name, by its separators."""
    return any(name.encode() + b"\x01" in body for name in TIMER_PROPERTIES)


def kept_place(fields: Mapping[str, str]) -> TimerPlace | None:
    """Where a broker has stored a message, by its reply to the send; None: it does not say."""
    queue_id, offset = fields.get("queueId", ""), fields.get("queueOffset", "")
    return TimerPlace(int(queue_id), int(offset)) if queue_id.isdecimal() and offset.isdecimal() else None


def cancel_send(handle: Handle, request: Request, gateway_topic: str, now_ms: int) -> RemotingCommand:
    """Return the request that sends a message to the gateway topic which cancels the timer of ``handle``, for a
    producer's recall ``request``. It has a body, as 5.x brokers fail without one."""
    properties = {UNIQUE_KEY: uuid.uuid4().hex.upper()}
    properties |= cancel_properties(handle.topic, handle.deliver_ms, handle.unique_key, handle.place)
    fields = {
        "producerGroup": request.text("producerGroup", ""),
        "defaultTopicQueueNums": "4",
        "sysFlag": "0",
        "bornTimestamp": str(now_ms),
        "flag": "0",
        "reconsumeTimes": "0",
        "unitMode": "false",
        "batch": "false",
    }
    return _gateway_send(replace(request.command, body=b"0"), fields, gateway_topic, properties)
