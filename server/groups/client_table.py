"""Which clients are there: members of groups and what they subscribe to, from their heartbeats.

A member belongs to the connection it last sent a heartbeat by, and is gone when that closes, when it says so, or when
no heartbeat came for two minutes. When a group's members change, all are told, so that they share queues out anew.

Sources: org.apache.rocketmq.broker.client.ConsumerManager, ClientManageProcessor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.wire.codes import RequestCode, ResponseCode
from server.wire.request import (
    NAME_CHARS_MAX,
    BadRequestError,
    HandlerTable,
    Peer,
    Request,
    Response,
    json_response,
)

EXPIRY_S = 120.0
BYTES_MAX = 64 * 1024 * 1024
ENTRY_BYTES, CHAR_BYTES = 400, 4
"""An entry of a table with its objects; a character of text at most."""
TAG, SQL92 = "TAG", "SQL92"
CONSUME_TYPES = "CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP"
MESSAGE_MODELS = "BROADCASTING", "CLUSTERING"
CONSUME_FROM = (
    "CONSUME_FROM_LAST_OFFSET", "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST", "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET", "CONSUME_FROM_FIRST_OFFSET", "CONSUME_FROM_TIMESTAMP",
)  # fmt: skip


@dataclass(frozen=True)
class Subscription:
    """What a group wants of a topic. ``expression_type`` is TAG or SQL92."""

    topic: str
    expression: str
    expression_type: str = TAG
    version: int = 0

    @property
    def nbytes(self) -> int:
        """Memory, about."""
        return ENTRY_BYTES + CHAR_BYTES * (len(self.topic) + len(self.expression))

    def document(self) -> dict[str, Any]:
        """SubscriptionData as Java writes it, without what a reader derives from the expression."""
        tags = (
            [] if self.expression in ("", "*") or self.expression_type != TAG else self.expression.split("||")
        )
        return {
            "classFilterMode": False, "codeSet": [], "expressionType": self.expression_type,
            "subString": self.expression, "subVersion": self.version,
            "tagsSet": [tag.strip() for tag in tags if tag.strip()], "topic": self.topic,
        }  # fmt: skip


@dataclass
class Member:
    """One client of a group."""

    client_id: str
    peer: Peer
    language: str
    version: int
    seen_s: float

    @property
    def nbytes(self) -> int:
        """Memory, about."""
        return ENTRY_BYTES + CHAR_BYTES * len(self.client_id)


@dataclass
class Group:
    """A consumer group as its members describe it."""

    name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from: str = "CONSUME_FROM_LAST_OFFSET"
    members: dict[str, Member] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Memory of the group alone, about."""
        return 3 * ENTRY_BYTES + CHAR_BYTES * len(self.name)


class ClientTable:
    """All groups with members. Belongs to one event loop. ``now_s``: a monotonic clock.

    Clients name groups, members and subscriptions as they like: all of them have at most about ``bytes_max``.
    """

    def __init__(self, now_s: Callable[[], float], *, bytes_max: int = BYTES_MAX) -> None:
        self._now_s = now_s
        self._bytes_max = bytes_max
        self._groups: dict[str, Group] = {}
        self.held_bytes = 0
        """What is remembered, about."""

    def group(self, name: str) -> Group | None:
        """The group, if anybody is in it."""
        return self._groups.get(name)

    def groups(self) -> Iterator[Group]:
        """All of them."""
        return iter(list(self._groups.values()))

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """What ``group`` wants of ``topic``, as its members last said."""
        found = self._groups.get(group)
        return found.subscriptions.get(topic) if found is not None else None

    def heartbeat(self, request: Request) -> bool:
        """Take one heartbeat; whether any group's members or subscriptions changed. Raises BadRequestError for what
        is none, or would make all that is remembered too much."""
        try:
            return self._heartbeat(request)
        except (AttributeError, TypeError, ValueError) as error:
            raise BadRequestError(f"the body is no heartbeat: {error}") from error

    def _heartbeat(self, request: Request) -> bool:
        document = request.document()
        client_id = _name(document.get("clientID", ""), "clientID")
        without_subscriptions = bool(document.get("withoutSub", False))
        changed = False
        for data in document.get("consumerDataSet") or []:
            name = _name(data.get("groupName", ""), "groupName")
            if not name:
                continue
            member = Member(
                client_id, request.peer, request.command.language[:16], request.command.version, self._now_s()
            )
            group = self._groups.get(name) or Group(name)
            subscriptions = group.subscriptions
            if not without_subscriptions:
                subscriptions = _merged(subscriptions, data.get("subscriptionDataSet") or [])
            consume_type = _named(data, "consumeType", group.consume_type, CONSUME_TYPES)
            message_model = _named(data, "messageModel", group.message_model, MESSAGE_MODELS)
            consume_from = _named(data, "consumeFromWhere", group.consume_from, CONSUME_FROM)
            self._hold(group, member, subscriptions)
            group.consume_type, group.message_model, group.consume_from = (
                consume_type,
                message_model,
                consume_from,
            )
            is_new = client_id not in group.members
            group.members[client_id] = member
            changed |= is_new or subscriptions != group.subscriptions
            group.subscriptions = subscriptions
            self._groups[name] = group
            if is_new:
                self._notify(group)
        return changed

    def _hold(self, group: Group, member: Member, subscriptions: dict[str, Subscription]) -> None:
        """Count what is about to be remembered. Raises BadRequestError if that is too much."""
        known = group.members.get(member.client_id)
        more_bytes = member.nbytes - (0 if known is None else known.nbytes)
        if group.name not in self._groups:
            more_bytes += group.nbytes
        if subscriptions is not group.subscriptions:
            more_bytes += _bytes_of(subscriptions) - _bytes_of(group.subscriptions)
        if more_bytes > 0 and self.held_bytes + more_bytes > self._bytes_max:
            raise BadRequestError(
                f"groups, members and subscriptions of all clients have {self.held_bytes} bytes; no more than "
                f"{self._bytes_max} are remembered (serve.session_bytes_max)"
            )
        self.held_bytes += more_bytes

    def leave(self, client_id: str, group_name: str, peer: Peer) -> None:
        """A client says by its connection that it leaves a group. One that has the same id, at another connection, has
        not said so."""
        group = self._groups.get(group_name)
        member = None if group is None else group.members.get(client_id)
        if group is not None and member is not None and member.peer is peer:
            self._forget(group, client_id)
            self._left(group)

    def closed(self, peer: Peer) -> None:
        """A connection is gone, and with it the members that came by it."""
        self._drop(lambda member: member.peer is peer)

    def expire(self) -> None:
        """Forget members without a heartbeat for EXPIRY_S."""
        limit_s = self._now_s() - EXPIRY_S
        self._drop(lambda member: member.seen_s < limit_s)

    def _drop(self, is_gone: Callable[[Member], bool]) -> None:
        for group in list(self._groups.values()):
            gone = [name for name, member in group.members.items() if is_gone(member)]
            for name in gone:
                self._forget(group, name)
            if gone:
                self._left(group)

    def _forget(self, group: Group, client_id: str) -> None:
        self.held_bytes -= group.members.pop(client_id).nbytes

    def _left(self, group: Group) -> None:
        if group.members:
            self._notify(group)
        else:
            del self._groups[group.name]
            self.held_bytes -= group.nbytes + _bytes_of(group.subscriptions)

    def _notify(self, group: Group) -> None:
        for member in group.members.values():
            member.peer.push(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group.name})


def _name(value: Any, field_name: str) -> str:
    name = str(value)
    if len(name) > NAME_CHARS_MAX:
        raise BadRequestError(f"{field_name} has {len(name)} characters, at most {NAME_CHARS_MAX} are a name")
    return name


def _named(data: dict[str, Any], field_name: str, default: str, names: Sequence[str]) -> str:
    """A member of a Java enum. C++ clients write its number."""
    value = data.get(field_name, default)
    if type(value) is int and 0 <= value < len(names):
        return names[value]
    return _name(value, field_name)


def _merged(known: dict[str, Subscription], documents: list[dict[str, Any]]) -> dict[str, Subscription]:
    """``known``, if a heartbeat with ``documents`` says nothing else."""
    wanted: dict[str, Subscription] = {}
    for document in documents:
        expression_type = _name(document.get("expressionType") or TAG, "expressionType")
        found = Subscription(
            _name(document.get("topic", ""), "topic"),
            str(document.get("subString") or ("*" if expression_type == TAG else "")),
            expression_type,
            int(document.get("subVersion") or 0),
        )
        before = known.get(found.topic)
        wanted[found.topic] = before if before is not None and before.version > found.version else found
    return known if wanted == known else wanted


def _bytes_of(subscriptions: dict[str, Subscription]) -> int:
    return sum(one.nbytes for one in subscriptions.values())


def register_client_handlers(table: HandlerTable, clients: ClientTable) -> None:
    """Heartbeat, leaving, member lists."""

    @table.register(RequestCode.HEART_BEAT)
    async def heartbeat(request: Request) -> Response:
        changed = clients.heartbeat(request)
        ext = {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true" if changed else "false"}
        return Response(ext=ext)

    @table.register(RequestCode.UNREGISTER_CLIENT)
    async def unregister(request: Request) -> Response:
        group = request.text("consumerGroup", "")
        if group:
            clients.leave(request.text("clientID"), group, request.peer)
        return Response()

    @table.register(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    async def members(request: Request) -> Response:
        group = clients.group(request.text("consumerGroup"))
        if group is None:
            return Response(ResponseCode.SYSTEM_ERROR, remark="no consumer of this group")
        return json_response({"consumerIdList": sorted(group.members)})

    @table.register(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    async def connections(request: Request) -> Response:
        group = clients.group(request.text("consumerGroup"))
        if group is None:
            return Response(ResponseCode.CONSUMER_NOT_ONLINE, remark="the consumer group is not online")
        return json_response({
            "connectionSet": [
                {
                    "clientAddr": member.peer.address, "clientId": member.client_id,
                    "language": member.language, "version": member.version,
                }
                for member in group.members.values()
            ],
            "subscriptionTable": {s.topic: s.document() for s in group.subscriptions.values()},
            "consumeType": group.consume_type,
            "messageModel": group.message_model,
            "consumeFromWhere": group.consume_from,
        })  # fmt: skip
