"""The permissions that each request code requires, actions on topics, groups and the cluster, and which names its body
has. Pure. The one place that reads bodies for access rules.

``NEEDS`` is the only place: a code without an entry is for administrators. Sources: PlainAccessValidator (ACL 1.0),
DefaultAuthorizationContextBuilder and RocketMQAction annotations (5.x). Stricter than both: ACL 1.0 judges reads of
offsets, configurations and members too, not only pulls; LITE_PULL_MESSAGE is treated as PULL_MESSAGE; resetting a group
requires topic and group; naming a message by physical offset requires its own topic (``record_permissions``), whatever
topic the request names. A missing name is judged as an empty one: by default rules.

A broker's JSON parser (fastjson 1 and 2) also takes a name in other cases, with underscores or dashes or a leading
``is``, single quotes, comments, and the last of duplicates: rules that read exact names would not see those. So a body
is strict JSON of the names in ``BODIES``, each once, with values of the declared shape; anything else is refused. A
broker gets this, encoded again. Sources: HeartbeatData, ConsumerData, SubscriptionData, ProducerData,
LockBatchRequestBody, CheckClientRequestBody, QueryAssignmentRequestBody, SetMessageRequestModeRequestBody, BatchAck,
MessageQueue of 4.9.7 to 5.5.0.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from rocketmq_tiered.server.wire.request import (
    DOCUMENT_BYTES_MAX,
    DOCUMENT_VALUES_MAX,
    NAME_CHARS_MAX,
    BadRequestError,
    Request,
)
from tiered.formats.record import Record, parse_properties
from tiered.model.queue import DEAD_PREFIX, RETRY_PREFIX
from tiered.model.topic_names import shortened
from tiered.remoting.command import RequestCode as R
from tiered.remoting.command import request_name

TEXT: Final = "text"
PLAIN: Final = "plain"
"""A scalar, or a list of them."""

Shape = str | Mapping[str, Any] | list[Any]
"""TEXT, PLAIN, names with their shapes, or a list of one shape."""

_QUEUE: Final = {"topic": TEXT, "brokerName": TEXT, "queueId": PLAIN}
_SUBSCRIPTION: Final = {
    "topic": TEXT,
    "subString": TEXT,
    "expressionType": TEXT,
    "subVersion": PLAIN,
    "tagsSet": PLAIN,
    "codeSet": PLAIN,
    "classFilterMode": PLAIN,
}
_CONSUMER: Final = {
    "groupName": TEXT,
    "consumeType": PLAIN,
    "messageModel": PLAIN,
    "consumeFromWhere": PLAIN,
    "unitMode": PLAIN,
    "subscriptionDataSet": [_SUBSCRIPTION],
}
_LOCKS: Final[Mapping[str, Shape]] = {
    "consumerGroup": TEXT,
    "clientId": TEXT,
    "mqSet": [_QUEUE],
    "onlyThisBroker": PLAIN,
}
_ACK: Final = {
    "c": TEXT,
    "t": TEXT,
    "r": TEXT,
    "so": PLAIN,
    "q": PLAIN,
    "rq": PLAIN,
    "st": PLAIN,
    "pt": PLAIN,
    "it": PLAIN,
    "b": PLAIN,
    "bs": PLAIN,
}
_ASSIGNMENT: Final = {
    "topic": TEXT,
    "consumerGroup": TEXT,
    "clientId": TEXT,
    "strategyName": TEXT,
    "messageModel": PLAIN,
}
BODIES: Final[Mapping[int, Mapping[str, Shape]]] = {
    R.HEART_BEAT: {
        "clientID": TEXT,
        "consumerDataSet": [_CONSUMER],
        "producerDataSet": [{"groupName": TEXT}],
        "heartbeatFingerprint": PLAIN,
        "withoutSub": PLAIN,
    },
    R.LOCK_BATCH_MQ: _LOCKS,
    R.UNLOCK_BATCH_MQ: _LOCKS,
    R.CHECK_CLIENT_CONFIG: {
        "clientId": TEXT,
        "group": TEXT,
        "namespace": TEXT,
        "subscriptionData": _SUBSCRIPTION,
    },
    R.QUERY_ASSIGNMENT: _ASSIGNMENT,
    R.SET_MESSAGE_REQUEST_MODE: {
        "topic": TEXT,
        "consumerGroup": TEXT,
        "mode": PLAIN,
        "popShareQueueNum": PLAIN,
    },
    R.BATCH_ACK_MESSAGE: {"brokerName": TEXT, "acks": [_ACK]},
}
"""Bodies that name topics or groups."""
OPAQUE: Final = frozenset(
    {
        R.SEND_MESSAGE,
        R.SEND_MESSAGE_V2,
        R.SEND_BATCH_MESSAGE,
        R.SEND_REPLY_MESSAGE,
        R.SEND_REPLY_MESSAGE_V2,
        R.UPDATE_BROKER_CONFIG,
        R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    }
)
"""Codes with a body of which access does not depend: messages, and settings of the whole broker."""


def read_body(request: Request) -> dict[str, Any]:
    """Return the body of a request whose code BODIES has, as JSON without nulls. Raises BadRequestError unless it is
    strict JSON of the declared names, each once, and of a size that may be parsed."""
    body = request.command.body
    if len(body) > DOCUMENT_BYTES_MAX or body.count(b",") >= DOCUMENT_VALUES_MAX:
        raise BadRequestError(
            f"the body of {request_name(request.code)} has {len(body)} bytes and about {body.count(b',')} values; at"
            f" most {DOCUMENT_BYTES_MAX} bytes and {DOCUMENT_VALUES_MAX} values are parsed"
        )
    try:
        parsed = json.loads(body.decode(), object_pairs_hook=_named_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body of the request is not strict JSON: {error}") from error
    document: dict[str, Any] = _shaped(parsed, BODIES[request.code], "the body of the request")
    return document


def encoded_body(request: Request) -> bytes:
    """Return a request's body encoded again from what access rules have read of it. Bodies that the rules need not read
    stay as they are. Raises BadRequestError for a body that does not parse, or with a code that has none."""
    if request.code in OPAQUE:
        return request.command.body
    if request.code not in BODIES:
        raise BadRequestError(f"request {request_name(request.code)} must not have a body")
    try:
        return json.dumps(read_body(request), separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(f"the body of the request is not strict JSON: {error}") from error


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _shaped(value: Any, shape: Shape, name: str) -> Any:
    """Return a parsed JSON value without its nulls. Raises BadRequestError unless it has the ``shape`` that is declared
    for ``name``: what access rules do not know they cannot judge."""
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            raise BadRequestError(f"{name} is not a JSON object")
        if unknown := value.keys() - shape.keys():
            raise BadRequestError(f"{name} has the unknown name {min(unknown)[:64]}")
        return {
            member: _shaped(child, shape[member], f"{member} in the body of the request")
            for member, child in value.items()
            if child is not None
        }
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise BadRequestError(f"{name} is not a JSON list")
        return [_shaped(item, shape[0], name) for item in value]
    if shape == TEXT and not isinstance(value, str):
        raise BadRequestError(f"{name} is not a JSON string")
    if any(isinstance(item, dict | list) for item in (value if isinstance(value, list) else (value,))):
        raise BadRequestError(f"{name} is a JSON list or object, and has to be a single value")
    return value


_PLAIN: Final = re.compile(rf"[!-~]{{0,{NAME_CHARS_MAX}}}")
REAL_TOPIC, LMQS = "REAL_TOPIC", "INNER_MULTI_DISPATCH"
"""Properties: the topic of a half or delayed message; LMQs that get a message too."""


class Kind(Enum):
    """The kind of resource."""

    TOPIC = "Topic"
    GROUP = "Group"
    CLUSTER = "Cluster"


class Action(Enum):
    """ACL 1.0 has PUB and SUB only."""

    PUB = "Pub"
    SUB = "Sub"
    GET = "Get"
    LIST = "List"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"


Actions = frozenset[Action]


class Permission(NamedTuple):
    """Any of ``actions`` on one resource."""

    kind: Kind
    name: str
    actions: Actions


Resource = tuple[Kind, str]


class Need(NamedTuple):
    """What a request code requires: on each of ``resources``, any of ``actions`` in 5.x, any of ``acl_1`` in ACL 1.0.
    ``acl_1`` None: an administrator."""

    resources: Callable[[Request], Iterable[Resource]]
    actions: Actions
    acl_1: Actions | None


def _topic(name: str) -> Resource:
    """Retry and dead-letter topics count as their group."""
    for prefix in (RETRY_PREFIX, DEAD_PREFIX):
        if name.startswith(prefix):
            return Kind.GROUP, name[len(prefix) :]
    return Kind.TOPIC, name


def _topic_in(field: str = "topic") -> Callable[[Request], list[Resource]]:
    return lambda request: [_topic(request.fields.get(field, ""))]


def _sent(request: Request) -> list[Resource]:
    """Return what a send needs permission for: its topic, and the LMQs that the broker adds the message to. Raises
    BadRequestError for a batch with a message for LMQs, which only the broker could find."""
    fields = request.fields
    if f"{LMQS}\x01".encode() in request.command.body:
        raise BadRequestError(
            "a batch has a message for LMQs (property INNER_MULTI_DISPATCH): send such messages one by one"
        )
    lmqs = parse_properties(fields.get("properties", "").encode()).get(LMQS, "")
    return [_topic(name) for name in (fields.get("topic", ""), *filter(None, lmqs.split(",")))]


def _group_in(field: str = "consumerGroup") -> Callable[[Request], list[Resource]]:
    return lambda request: [(Kind.GROUP, request.fields.get(field, ""))]


def _both_in(group_field: str = "consumerGroup") -> Callable[[Request], list[Resource]]:
    return lambda request: _topic_in()(request) + _group_in(group_field)(request)


def _all(kind: Kind) -> Callable[[Request], list[Resource]]:
    return lambda request: [(kind, "*")]


def _named_topic(request: Request) -> list[Resource]:
    """VIEW_MESSAGE_BY_ID, END_TRANSACTION: 4.9 names no topic, and the message's own one is judged later."""
    return _topic_in()(request) if "topic" in request.fields else []


def _retried(request: Request) -> list[Resource]:
    """CONSUMER_SEND_MSG_BACK: the message's own topic is judged later."""
    fields = request.fields
    topic = [_topic(fields["originTopic"])] if fields.get("originTopic") else []
    return [*topic, (Kind.GROUP, fields.get("group", ""))]


def _stats(request: Request) -> list[Resource]:
    """GET_CONSUME_STATS: of one topic, some, or all of the group."""
    fields = request.fields
    names = {fields.get("topic", ""), *fields.get("topicList", "").split(";")} - {""}
    return [*map(_topic, sorted(names)), *_group_in()(request)]


def _consume_queue(request: Request) -> list[Resource]:
    """QUERY_CONSUME_QUEUE: with the filter of a group, if it names one."""
    return _topic_in()(request) + _unregistered(request)


def _unregistered(request: Request) -> list[Resource]:
    return _group_in()(request) if request.fields.get("consumerGroup") else []


def _heartbeat(request: Request) -> list[Resource]:
    found: list[Resource] = []
    for data in read_body(request).get("consumerDataSet", []):
        found.append((Kind.GROUP, data.get("groupName", "")))
        found += [_topic(one.get("topic", "")) for one in data.get("subscriptionDataSet", [])]
    return found


def _checked_client(request: Request) -> list[Resource]:
    document = read_body(request)
    topic = document.get("subscriptionData", {}).get("topic", "")
    return [_topic(topic), (Kind.GROUP, document.get("group", ""))]


def _acknowledged(request: Request) -> list[Resource]:
    acks = read_body(request).get("acks", [])
    return [_topic(one.get("t", "")) for one in acks] + [(Kind.GROUP, one.get("c", "")) for one in acks]


def _assigned(request: Request) -> list[Resource]:
    document = read_body(request)
    return [_topic(document.get("topic", "")), (Kind.GROUP, document.get("consumerGroup", ""))]


def _locked(request: Request) -> list[Resource]:
    document = read_body(request)
    topics = {queue.get("topic", "") for queue in document.get("mqSet", [])}
    return [(Kind.GROUP, document.get("consumerGroup", "")), *map(_topic, sorted(topics))]


PUB, SUB = frozenset({Action.PUB}), frozenset({Action.SUB})
_GET, _LIST = frozenset({Action.GET}), frozenset({Action.LIST})
_READ, _MOVE = SUB | _GET, SUB | {Action.UPDATE}
_ROUTE = PUB | SUB | _GET
_CREATE, _UPDATE, _DELETE = frozenset({Action.CREATE}), frozenset({Action.UPDATE}), frozenset({Action.DELETE})
ADMIN: Final = None

NEEDS: Final[Mapping[int, Need]] = {
    # messages
    R.SEND_MESSAGE: Need(_sent, PUB, PUB),
    R.SEND_MESSAGE_V2: Need(_sent, PUB, PUB),
    R.SEND_BATCH_MESSAGE: Need(_sent, PUB, PUB),
    R.SEND_REPLY_MESSAGE: Need(_sent, PUB, PUB),
    R.SEND_REPLY_MESSAGE_V2: Need(_sent, PUB, PUB),
    R.END_TRANSACTION: Need(_named_topic, PUB, PUB),
    R.RECALL_MESSAGE: Need(_topic_in(), PUB, PUB),
    R.PULL_MESSAGE: Need(_both_in(), SUB, SUB),
    R.LITE_PULL_MESSAGE: Need(_both_in(), SUB, SUB),
    R.POP_MESSAGE: Need(_both_in(), SUB, SUB),
    R.PEEK_MESSAGE: Need(_both_in(), SUB, SUB),
    R.NOTIFICATION: Need(_both_in(), SUB, SUB),
    R.POLLING_INFO: Need(_both_in(), _READ, SUB),
    R.ACK_MESSAGE: Need(_both_in(), SUB, SUB),
    R.BATCH_ACK_MESSAGE: Need(_acknowledged, SUB, SUB),
    R.CHANGE_MESSAGE_INVISIBLETIME: Need(_both_in(), SUB, SUB),
    R.CONSUMER_SEND_MSG_BACK: Need(_retried, SUB, SUB),
    R.QUERY_MESSAGE: Need(_topic_in(), _READ, SUB),
    R.VIEW_MESSAGE_BY_ID: Need(_named_topic, _READ, SUB),
    # offsets
    R.QUERY_CONSUMER_OFFSET: Need(_both_in(), _READ, SUB),
    R.UPDATE_CONSUMER_OFFSET: Need(_both_in(), _MOVE, SUB),
    R.INVOKE_BROKER_TO_RESET_OFFSET: Need(_both_in("group"), _MOVE, SUB),
    R.SEARCH_OFFSET_BY_TIMESTAMP: Need(_topic_in(), _READ, SUB),
    R.GET_MAX_OFFSET: Need(_topic_in(), _READ, SUB),
    R.GET_MIN_OFFSET: Need(_topic_in(), _READ, SUB),
    R.GET_EARLIEST_MSG_STORETIME: Need(_topic_in(), _READ, SUB),
    R.GET_TOPIC_STATS_INFO: Need(_topic_in(), _GET, SUB),
    R.GET_CONSUME_STATS: Need(_stats, _GET, SUB),
    R.GET_BROKER_CONSUME_STATS: Need(_all(Kind.CLUSTER), _GET, ADMIN),
    R.QUERY_CONSUME_QUEUE: Need(_consume_queue, _GET, SUB),
    R.GET_ALL_CONSUMER_OFFSET: Need(_all(Kind.CLUSTER), _GET, ADMIN),
    R.GET_ALL_DELAY_OFFSET: Need(_all(Kind.CLUSTER), _GET, ADMIN),
    # members
    R.HEART_BEAT: Need(_heartbeat, SUB, SUB),
    R.UNREGISTER_CLIENT: Need(_unregistered, SUB, SUB),
    R.CHECK_CLIENT_CONFIG: Need(_checked_client, SUB, SUB),
    R.GET_CONSUMER_LIST_BY_GROUP: Need(_group_in(), _READ, SUB),
    R.GET_CONSUMER_CONNECTION_LIST: Need(_group_in(), _GET, SUB),
    R.GET_CONSUMER_RUNNING_INFO: Need(_group_in(), _GET, SUB),
    R.LOCK_BATCH_MQ: Need(_locked, SUB, SUB),
    R.UNLOCK_BATCH_MQ: Need(_locked, SUB, SUB),
    R.QUERY_ASSIGNMENT: Need(_assigned, _READ, SUB),
    R.SET_MESSAGE_REQUEST_MODE: Need(_assigned, _MOVE, SUB),
    # topics, groups, broker
    R.GET_ROUTEINFO_BY_TOPIC: Need(_topic_in(), _ROUTE, PUB | SUB),
    R.GET_TOPIC_CONFIG: Need(_topic_in(), _GET, PUB | SUB),
    R.GET_SUBSCRIPTIONGROUP_CONFIG: Need(_group_in("group"), _GET, SUB),
    R.QUERY_TOPIC_CONSUME_BY_WHO: Need(_topic_in(), _GET, SUB),
    R.QUERY_TOPICS_BY_CONSUMER: Need(_group_in("group"), _GET, SUB),
    R.GET_ALL_TOPIC_CONFIG: Need(_all(Kind.TOPIC), _LIST, ADMIN),
    R.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: Need(_all(Kind.TOPIC), _LIST, ADMIN),
    R.GET_TOPICS_BY_CLUSTER: Need(_all(Kind.TOPIC), _LIST, ADMIN),
    R.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: Need(_all(Kind.TOPIC), _LIST, ADMIN),
    R.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Need(_all(Kind.GROUP), _LIST, ADMIN),
    R.GET_KV_CONFIG: Need(_all(Kind.CLUSTER), _GET, ADMIN),
    R.GET_BROKER_CLUSTER_INFO: Need(_all(Kind.CLUSTER), _GET, ADMIN),
    R.GET_BROKER_CONFIG: Need(_all(Kind.CLUSTER), _GET, ADMIN),
    R.GET_BROKER_RUNTIME_INFO: Need(_all(Kind.CLUSTER), _GET, ADMIN),
    R.UPDATE_BROKER_CONFIG: Need(_all(Kind.CLUSTER), _UPDATE, ADMIN),
    R.UPDATE_AND_CREATE_TOPIC: Need(_topic_in(), _CREATE, ADMIN),
    R.DELETE_TOPIC_IN_BROKER: Need(_topic_in(), _DELETE, ADMIN),
    R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: Need(_all(Kind.CLUSTER), _UPDATE, ADMIN),
    R.DELETE_SUBSCRIPTIONGROUP: Need(_group_in("groupName"), _DELETE, ADMIN),
}


def record_permissions(request: Request, record: Record) -> list[Permission]:
    """Return the permissions that a request needs to name ``record`` by its physical offset: to send to its topic in
    order to end its transaction, else to read it. A half or delayed message lies in a topic of the broker's and has its
    real topic as a property; reading it takes both."""
    real_topic = record.properties.get(REAL_TOPIC)
    if request.code == R.END_TRANSACTION:
        return [topic_permission(real_topic or record.topic, PUB)]
    return [topic_permission(name, _READ) for name in (record.topic, real_topic) if name]


def topic_permission(name: str, actions: Actions) -> Permission:
    """Any of ``actions`` on a topic, or on the group that it belongs to."""
    return _permission(*_topic(name), actions)


def _permission(kind: Kind, name: str, actions: Actions) -> Permission:
    """A group has no PUB: who sends to its retry topic consumes."""
    return Permission(kind, name, SUB if kind is Kind.GROUP and actions == PUB else actions)


def permissions_for(request: Request) -> list[Permission] | None:
    """The permissions that a 5.x broker requires for ``request``; None: only a super user may send it. Raises
    BadRequestError for a body that does not parse."""
    need = NEEDS.get(request.command.code)
    return None if need is None else _permissions(need, need.actions, request)


def acl_1_permissions(request: Request) -> list[Permission] | None:
    """The permissions that ACL 1.0 requires for ``request``; None: only an administrator may send it. Raises
    BadRequestError for a body that does not parse."""
    need = NEEDS.get(request.command.code)
    return None if need is None or need.acl_1 is None else _permissions(need, need.acl_1, request)


def _permissions(need: Need, actions: Actions, request: Request) -> list[Permission]:
    return [_permission(kind, _plain(name), actions) for kind, name in need.resources(request)]


def _plain(name: str) -> str:
    """Return ``name`` if rules, records and logs may get it. Raises BadRequestError for separators and other characters
    that no client library takes for a topic or group. Old archives may have names that brokers refuse today."""
    if _PLAIN.fullmatch(name) is None:
        raise BadRequestError(f"{shortened(ascii(name))} cannot be the name of a topic or group")
    return name
