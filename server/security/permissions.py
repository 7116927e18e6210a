"""The permissions a request requires: actions on topics, groups and the cluster. Pure.

Sources: org.apache.rocketmq.acl.plain.PlainAccessValidator (ACL 1.0), DefaultAuthorizationContextBuilder (5.x).
Stricter than both: LITE_PULL_MESSAGE is treated as PULL_MESSAGE; resetting a group requires topic and group; reading a
message by physical offset requires its own topic (``message_permissions``), whatever topic the request names.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from server.wire.codes import RequestCode
from server.wire.request import BadRequestError, Request

RETRY_PREFIX, DEAD_PREFIX = "%RETRY%", "%DLQ%"


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


class Permission(NamedTuple):
    """Any of ``actions`` on one resource."""

    kind: Kind
    name: str
    actions: frozenset[Action]


SUB = frozenset({Action.SUB})
_READ = frozenset({Action.SUB, Action.GET})
_MOVE = frozenset({Action.SUB, Action.UPDATE})
_ROUTE = frozenset({Action.PUB, Action.SUB, Action.GET})
_GET = frozenset({Action.GET})

ADMIN_CODES = frozenset({
    RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.UPDATE_BROKER_CONFIG, RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, RequestCode.DELETE_SUBSCRIPTIONGROUP,
})  # fmt: skip
_ADMIN_ACTIONS = {
    RequestCode.UPDATE_AND_CREATE_TOPIC: (Kind.TOPIC, "topic", Action.CREATE),
    RequestCode.DELETE_TOPIC_IN_BROKER: (Kind.TOPIC, "topic", Action.DELETE),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: (Kind.GROUP, "groupName", Action.DELETE),
    RequestCode.UPDATE_BROKER_CONFIG: (Kind.CLUSTER, "", Action.UPDATE),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: (Kind.CLUSTER, "", Action.UPDATE),
}
_TOPIC_AND_GROUP = {
    RequestCode.PULL_MESSAGE: (SUB, "consumerGroup"),
    RequestCode.LITE_PULL_MESSAGE: (SUB, "consumerGroup"),
    RequestCode.POP_MESSAGE: (SUB, "consumerGroup"),
    RequestCode.ACK_MESSAGE: (SUB, "consumerGroup"),
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: (SUB, "consumerGroup"),
    RequestCode.UPDATE_CONSUMER_OFFSET: (_MOVE, "consumerGroup"),
    RequestCode.QUERY_CONSUMER_OFFSET: (_READ, "consumerGroup"),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: (_MOVE, "group"),
    RequestCode.CONSUMER_SEND_MSG_BACK: (SUB, "group"),
}
_TOPIC = {
    RequestCode.QUERY_MESSAGE: _READ, RequestCode.VIEW_MESSAGE_BY_ID: _READ, RequestCode.GET_MAX_OFFSET: _READ,
    RequestCode.GET_MIN_OFFSET: _READ, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _READ,
    RequestCode.GET_EARLIEST_MSG_STORETIME: _READ, RequestCode.GET_TOPIC_STATS_INFO: _GET,
    RequestCode.QUERY_CONSUME_QUEUE: _GET, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _GET,
    RequestCode.GET_TOPIC_CONFIG: _GET, RequestCode.GET_ROUTEINFO_BY_TOPIC: _ROUTE,
}  # fmt: skip
_GROUP = {
    RequestCode.UNREGISTER_CLIENT: ("consumerGroup", SUB),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: ("consumerGroup", _READ),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: ("consumerGroup", _GET),
    RequestCode.GET_CONSUME_STATS: ("consumerGroup", _GET),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: ("group", _GET),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: ("group", _GET),
}
_ACL_1 = frozenset(_TOPIC_AND_GROUP) - {RequestCode.QUERY_CONSUMER_OFFSET} | {
    RequestCode.QUERY_MESSAGE, RequestCode.UNREGISTER_CLIENT, RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    RequestCode.HEART_BEAT,
}  # fmt: skip
_LOCKS = frozenset({RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ})


def message_permissions(topic: str) -> list[Permission]:
    """Required to read a message of ``topic``."""
    return _topics([topic], _READ)


def permissions_for(request: Request) -> list[Permission]:
    """As required by 5.x. Raises BadRequestError for a body that does not parse."""
    try:
        return _permissions_for(request)
    except (AttributeError, TypeError) as error:
        raise BadRequestError(f"body does not match the request code: {error}") from error


def _permissions_for(request: Request) -> list[Permission]:
    code, fields = request.command.code, request.command.ext_fields
    if (both := _TOPIC_AND_GROUP.get(code)) is not None:  # type: ignore[call-overload]
        actions, group_field = both
        topic = fields.get("topic", fields.get("originTopic", ""))
        return _topics([topic] if topic else [], actions) + _groups([fields.get(group_field, "")], actions)
    if (actions := _TOPIC.get(code)) is not None:  # type: ignore[call-overload]
        return _topics([fields.get("topic", "")], actions)
    if (one := _GROUP.get(code)) is not None:  # type: ignore[call-overload]
        group = fields.get(one[0], "")
        return _groups([group], one[1]) if group else []
    if code == RequestCode.HEART_BEAT:
        return _heartbeat(request)
    if code == RequestCode.BATCH_ACK_MESSAGE:
        acks = request.document().get("acks") or []
        return _topics([str(one.get("t", "")) for one in acks], SUB) + _groups(
            [str(one.get("c", "")) for one in acks], SUB
        )
    if code in (RequestCode.QUERY_ASSIGNMENT, RequestCode.SET_MESSAGE_REQUEST_MODE):
        document, actions = request.document(), _READ if code == RequestCode.QUERY_ASSIGNMENT else _MOVE
        return _topics([str(document.get("topic", ""))], actions) + _groups(
            [str(document.get("consumerGroup", ""))], actions
        )
    if code in _LOCKS:
        return _groups([str(request.document().get("consumerGroup", ""))], SUB)
    if (admin := _ADMIN_ACTIONS.get(code)) is not None:  # type: ignore[call-overload]
        kind, name_field, action = admin
        return [Permission(kind, fields.get(name_field, "") if name_field else "*", frozenset({action}))]
    return []


def acl_1_permissions(request: Request) -> list[Permission]:
    """As required by ACL 1.0: only a signature for codes it does not list."""
    if request.command.code in _ACL_1:
        return [Permission(one.kind, one.name, SUB) for one in permissions_for(request)]
    return []


def _heartbeat(request: Request) -> list[Permission]:
    found: list[Permission] = []
    for data in request.document().get("consumerDataSet") or []:
        found += _groups([str(data.get("groupName", ""))], SUB)
        found += _topics([str(s.get("topic", "")) for s in data.get("subscriptionDataSet") or []], SUB)
    return found


def _topics(names: list[str], actions: frozenset[Action]) -> list[Permission]:
    """Retry and dead-letter topics count as their group."""
    found = []
    for name in names:
        for prefix in (RETRY_PREFIX, DEAD_PREFIX):
            if name.startswith(prefix):
                found.append(Permission(Kind.GROUP, name[len(prefix) :], actions))
                break
        else:
            found.append(Permission(Kind.TOPIC, name, actions))
    return found


def _groups(names: list[str], actions: frozenset[Action]) -> list[Permission]:
    return [Permission(Kind.GROUP, name, actions) for name in names]
