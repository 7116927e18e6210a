"""Which clients are there: members of groups and what they subscribe to, from their heartbeats.

A member belongs to the connection it last sent a heartbeat by, and is gone when that closes, when it says so, or when
no heartbeat came for two minutes. When a group's members change, all are told, so that they share queues out anew.

Sources: org.apache.rocketmq.broker.client.ConsumerManager, ClientManageProcessor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fetcher.serving.wire.codes import RequestCode, ResponseCode
from fetcher.serving.wire.request import HandlerTable, Peer, Request, Response, json_response

EXPIRY_S = 120.0
TAG, SQL92 = "TAG", "SQL92"


@dataclass(frozen=True)
class Subscription:
    """What a group wants of a topic. ``expression_type`` is TAG or SQL92."""

    topic: str
    expression: str
    expression_type: str = TAG
    version: int = 0

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


@dataclass
class Group:
    """A consumer group as its members describe it."""

    name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from: str = "CONSUME_FROM_LAST_OFFSET"
    members: dict[str, Member] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)


class ClientTable:
    """All groups with members. Belongs to one event loop. ``now_s``: a monotonic clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._groups: dict[str, Group] = {}

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
        """Take one heartbeat; whether any group's members or subscriptions changed."""
        document = request.document()
        client_id = str(document.get("clientID", ""))
        without_subscriptions = bool(document.get("withoutSub", False))
        changed = False
        for data in document.get("consumerDataSet") or []:
            name = str(data.get("groupName", ""))
            if not name:
                continue
            group = self._groups.setdefault(name, Group(name))
            group.consume_type = str(data.get("consumeType", group.consume_type))
            group.message_model = str(data.get("messageModel", group.message_model))
            group.consume_from = str(data.get("consumeFromWhere", group.consume_from))
            is_new = client_id not in group.members
            command = request.command
            group.members[client_id] = Member(
                client_id, request.peer, command.language, command.version, self._now_s()
            )
            if not without_subscriptions:
                changed |= self._subscribe(group, data.get("subscriptionDataSet") or [])
            if is_new:
                changed = True
                self._notify(group)
        return changed

    def _subscribe(self, group: Group, documents: list[dict[str, Any]]) -> bool:
        changed = False
        wanted: dict[str, Subscription] = {}
        for document in documents:
            found = Subscription(
                str(document.get("topic", "")),
                str(document.get("subString") or "*"),
                str(document.get("expressionType") or TAG),
                int(document.get("subVersion") or 0),
            )
            known = group.subscriptions.get(found.topic)
            wanted[found.topic] = known if known is not None and known.version > found.version else found
        if wanted != group.subscriptions:
            group.subscriptions, changed = wanted, True
        return changed

    def leave(self, client_id: str, group_name: str) -> None:
        """A client says that it leaves a group."""
        group = self._groups.get(group_name)
        if group is not None and group.members.pop(client_id, None) is not None:
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
                del group.members[name]
            if gone:
                self._left(group)

    def _left(self, group: Group) -> None:
        if group.members:
            self._notify(group)
        else:
            del self._groups[group.name]

    def _notify(self, group: Group) -> None:
        for member in group.members.values():
            member.peer.push(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group.name})


def register_session_handlers(table: HandlerTable, clients: ClientTable) -> None:
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
            clients.leave(request.text("clientID"), group)
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
