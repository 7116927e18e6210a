"""The bodies of requests: which names each code's body has. The one place that reads them for access rules.

A broker's JSON parser (fastjson 1 and 2) also takes a name in other cases, with underscores or dashes or a leading
``is``, single quotes, comments, and the last of duplicates: rules that read exact names would not see those. So a body
is strict JSON of these names, each once, with values of the declared shape; anything else is refused. A broker
gets this, encoded again.

Sources: HeartbeatData, ConsumerData, SubscriptionData, ProducerData, LockBatchRequestBody, CheckClientRequestBody,
QueryAssignmentRequestBody, SetMessageRequestModeRequestBody, BatchAck, MessageQueue of 4.9.7 to 5.5.0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from rocketmq_tiered.server.wire.codes import RequestCode as R
from rocketmq_tiered.server.wire.request import (
    DOCUMENT_BYTES_MAX,
    DOCUMENT_VALUES_MAX,
    BadRequestError,
    Request,
)

TEXT: Final = "text"
PLAIN: Final = "plain"
"""A scalar, or a list of them."""

Shape = str | Mapping[str, Any] | list[Any]
"""TEXT, PLAIN, names with their shapes, or a list of one shape."""

_QUEUE: Final = {"topic": TEXT, "brokerName": TEXT, "queueId": PLAIN}
_SUBSCRIPTION: Final = {
    "topic": TEXT, "subString": TEXT, "expressionType": TEXT, "subVersion": PLAIN, "tagsSet": PLAIN,
    "codeSet": PLAIN, "classFilterMode": PLAIN,
}  # fmt: skip
_CONSUMER: Final = {
    "groupName": TEXT, "consumeType": PLAIN, "messageModel": PLAIN, "consumeFromWhere": PLAIN, "unitMode": PLAIN,
    "subscriptionDataSet": [_SUBSCRIPTION],
}  # fmt: skip
_LOCKS: Final[Mapping[str, Shape]] = {
    "consumerGroup": TEXT,
    "clientId": TEXT,
    "mqSet": [_QUEUE],
    "onlyThisBroker": PLAIN,
}
_ACK: Final = {
    "c": TEXT, "t": TEXT, "r": TEXT, "so": PLAIN, "q": PLAIN, "rq": PLAIN, "st": PLAIN, "pt": PLAIN, "it": PLAIN,
    "b": PLAIN, "bs": PLAIN,
}  # fmt: skip
_ASSIGNMENT: Final = {
    "topic": TEXT, "consumerGroup": TEXT, "clientId": TEXT, "strategyName": TEXT, "messageModel": PLAIN,
}  # fmt: skip
BODIES: Final[Mapping[int, Mapping[str, Shape]]] = {
    R.HEART_BEAT: {
        "clientID": TEXT, "consumerDataSet": [_CONSUMER], "producerDataSet": [{"groupName": TEXT}],
        "heartbeatFingerprint": PLAIN, "withoutSub": PLAIN,
    },
    R.LOCK_BATCH_MQ: _LOCKS,
    R.UNLOCK_BATCH_MQ: _LOCKS,
    R.CHECK_CLIENT_CONFIG: {
        "clientId": TEXT, "group": TEXT, "namespace": TEXT, "subscriptionData": _SUBSCRIPTION,
    },
    R.QUERY_ASSIGNMENT: _ASSIGNMENT,
    R.SET_MESSAGE_REQUEST_MODE: {
        "topic": TEXT, "consumerGroup": TEXT, "mode": PLAIN, "popShareQueueNum": PLAIN,
    },
    R.BATCH_ACK_MESSAGE: {"brokerName": TEXT, "acks": [_ACK]},
}  # fmt: skip
"""Bodies that name topics or groups."""
OPAQUE: Final = frozenset({
    R.SEND_MESSAGE, R.SEND_MESSAGE_V2, R.SEND_BATCH_MESSAGE, R.SEND_REPLY_MESSAGE, R.SEND_REPLY_MESSAGE_V2,
    R.UPDATE_BROKER_CONFIG, R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
})  # fmt: skip
"""Codes with a body of which access does not depend: messages, and settings of the whole broker."""


def read_body(request: Request) -> dict[str, Any]:
    """The body of one of BODIES, without nulls. Raises BadRequestError."""
    body = request.command.body
    if len(body) > DOCUMENT_BYTES_MAX or body.count(b",") >= DOCUMENT_VALUES_MAX:
        raise BadRequestError(f"body of {len(body)} bytes has too many values")
    try:
        found = json.loads(body.decode(), object_pairs_hook=_named_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"body is not strict JSON: {error}") from error
    document: dict[str, Any] = _shaped(found, BODIES[request.code], "the body")
    return document


def encoded_body(request: Request) -> bytes:
    """The body encoded again: what access rules have seen, and nothing else. Raises BadRequestError, also for codes
    without a body."""
    if request.code in OPAQUE:
        return request.command.body
    if request.code not in BODIES:
        raise BadRequestError(f"requests of code {request.code} have no body")
    try:
        return json.dumps(read_body(request), separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(f"body is not strict JSON: {error}") from error


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _shaped(value: Any, shape: Shape, name: str) -> Any:
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            raise BadRequestError(f"{name} is not a JSON object")
        if unknown := value.keys() - shape.keys():
            raise BadRequestError(f"{name} has the unknown name {min(unknown)[:64]}")
        return {one: _shaped(found, shape[one], one) for one, found in value.items() if found is not None}
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise BadRequestError(f"{name} is not a list")
        return [_shaped(found, shape[0], name) for found in value]
    if shape == TEXT and not isinstance(value, str):
        raise BadRequestError(f"{name} is not text")
    if any(isinstance(found, dict | list) for found in (value if isinstance(value, list) else (value,))):
        raise BadRequestError(f"{name} has values of its own")
    return value
