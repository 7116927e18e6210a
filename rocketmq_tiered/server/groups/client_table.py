"""Members of consumer groups and their subscriptions, from heartbeats; the requests about them.

A member belongs to the connection of its last heartbeat. It leaves when that connection closes, when it unregisters, or
after two minutes without a heartbeat. All members are notified of a change, so that they rebalance: at a bounded rate,
however many clients join and leave, and of several changes in between once.

A subscription counts for pulls of the connection that sent it, whatever other members subscribe to.

Sources: org.apache.rocketmq.broker.client.ConsumerManager, ClientManageProcessor.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rocketmq_tiered.server.wire.request import (
    NAME_CHARS_MAX,
    BadRequestError,
    HandlerTable,
    Peer,
    Request,
    Response,
    json_response,
)
from tiered.clock import Clock
from tiered.remoting.command import RequestCode, ResponseCode

NOTICES_MAX = 256
"""Sent at once, and every PERIOD_S while more wait."""
PERIOD_S = 0.05


class ChangeNotices:
    """``peers_of``: the connections of a group's members now."""

    def __init__(self, peers_of: Callable[[str], Sequence[Peer]]) -> None:
        self._peers_of = peers_of
        self._notices_left, self._period_began_s = NOTICES_MAX, float("-inf")
        self._changed: dict[str, None] = {}
        self._group, self._peers = "", list[Peer]()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, group: str) -> None:
        """``group`` has changed."""
        self._changed[group] = None
        if self._timer is None:
            self._send()

    def _send(self) -> None:
        """Notify as many connections of changed groups as PERIOD_S allows, and set a timer for the rest."""
        self._timer = None
        now_s = time.monotonic()
        if now_s - self._period_began_s >= PERIOD_S:
            self._notices_left, self._period_began_s = NOTICES_MAX, now_s
        while self._notices_left and (self._peers or self._changed):
            if not self._peers:  # all of one group were notified: take the next group
                self._group = next(iter(self._changed))
                del self._changed[self._group]
                self._peers = list(self._peers_of(self._group))
            count = min(self._notices_left, len(self._peers))
            self._notices_left -= max(1, count)
            for peer in self._peers[:count]:
                peer.push(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": self._group})
            del self._peers[:count]
        if self._peers or self._changed:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._send)


EXPIRY_S = 120.0
HEARTBEAT_GROUPS_MAX = 512
"""A client has a few. Each new one takes some ten microseconds."""
BYTES_MAX = 64 * 1024 * 1024
ENTRY_BYTES, CHAR_BYTES = 400, 4
"""Memory estimate of a table entry with its objects, and of a character."""
TAG, SQL92 = "TAG", "SQL92"
CONSUME_TYPES = "CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP"
MESSAGE_MODELS = "BROADCASTING", "CLUSTERING"
CONSUME_FROM = (
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)


@dataclass(frozen=True)
class Subscription:
    """A group's filter of a topic. ``expression_type``: TAG or SQL92."""

    topic: str
    expression: str
    expression_type: str = TAG
    version: int = 0

    @property
    def nbytes(self) -> int:
        """Memory estimate."""
        return ENTRY_BYTES + CHAR_BYTES * (len(self.topic) + len(self.expression))

    def document(self) -> dict[str, Any]:
        """Return the JSON object that RocketMQ's SubscriptionData is written as. Its code set is empty: clients compute
        it from the tags."""
        tags = (
            [] if self.expression in ("", "*") or self.expression_type != TAG else self.expression.split("||")
        )
        return {
            "classFilterMode": False,
            "codeSet": [],
            "expressionType": self.expression_type,
            "subString": self.expression,
            "subVersion": self.version,
            "tagsSet": [tag.strip() for tag in tags if tag.strip()],
            "topic": self.topic,
        }


@dataclass
class Member:
    """One client of a group."""

    client_id: str
    peer: Peer
    language: str
    version: int
    seen_s: float
    subscriptions: dict[str, Subscription] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Memory estimate."""
        return ENTRY_BYTES + CHAR_BYTES * len(self.client_id)


@dataclass
class ConsumerGroup:
    """A consumer group, as described by its members."""

    name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from: str = "CONSUME_FROM_LAST_OFFSET"
    members: dict[str, Member] = field(default_factory=dict)
    member_counts: Counter[int] = field(default_factory=Counter)
    """Members by connection."""

    def add(self, member: Member) -> None:
        """Add a member, instead of one with the same id."""
        if member.client_id in self.members:
            self.remove(member.client_id)
        self.members[member.client_id] = member
        self.member_counts[member.peer.id] += 1

    def remove(self, client_id: str) -> Member:
        """Remove a member."""
        member = self.members.pop(client_id)
        self.member_counts[member.peer.id] -= 1
        if not self.member_counts[member.peer.id]:
            del self.member_counts[member.peer.id]
        return member

    @property
    def subscriptions(self) -> dict[str, Subscription]:
        """Return for each topic the newest subscription that any member has sent, to show it."""
        newest: dict[str, Subscription] = {}
        for member in self.members.values():
            for topic, subscription in member.subscriptions.items():
                if topic not in newest or newest[topic].version < subscription.version:
                    newest[topic] = subscription
        return newest

    @property
    def nbytes(self) -> int:
        """Memory estimate, without members and subscriptions."""
        return 3 * ENTRY_BYTES + CHAR_BYTES * len(self.name)


class _Sent(NamedTuple):
    """The subscriptions that one connection sent for a group."""

    subscriptions: dict[str, Subscription]
    nbytes: int


class ClientTable:
    """All groups with members. Belongs to one event loop. ``bytes_max`` bounds all names
    together, because clients choose them freely."""

    def __init__(self, clock: Clock, *, bytes_max: int = BYTES_MAX) -> None:
        """``bytes_max``: of memory for all names, which clients choose freely. A group appears with its first heartbeat
        and goes with its last member."""
        self._clock = clock
        self._bytes_max = bytes_max
        self._groups: dict[str, ConsumerGroup] = {}
        self._sent: dict[int, dict[str, _Sent]] = {}
        """Keyed by connection id and group."""
        self._last_left: dict[int, str] = {}
        """The group that a client on a connection left last, by connection id."""
        self.held_bytes = 0
        """Memory estimate."""
        self._notify = ChangeNotices(self._peers).note
        self._memberships: dict[int, set[tuple[str, str]]] = {}
        """Connection -> (group, client id) of its members."""

    def group(self, name: str) -> ConsumerGroup | None:
        """The group, if it has members."""
        return self._groups.get(name)

    def groups(self) -> Iterator[ConsumerGroup]:
        """All groups with members."""
        return iter(list(self._groups.values()))

    def has_member(self, group: str, peer: Peer) -> bool:
        """Whether a member of ``group`` uses the connection of ``peer``."""
        found = self._groups.get(group)
        return found is not None and peer.id in found.member_counts

    def names_group(self, group: str, peer: Peer) -> bool:
        """Whether heartbeats on the connection of ``peer`` name ``group``, or did until the client left
        it: the last commits may follow."""
        return group in self._sent.get(peer.id, _NOTHING) or self._last_left.get(peer.id) == group

    def subscription(self, group: str, topic: str, connection_id: int) -> Subscription | None:
        """The filter of ``topic`` that this connection sent for the group."""
        sent = self._sent.get(connection_id, _NOTHING).get(group)
        return None if sent is None else sent.subscriptions.get(topic)

    def heartbeat(self, request: Request) -> bool:
        """Take the consumer groups that a client names in a heartbeat. Returns whether the members or subscriptions of
        a group changed. Raises BadRequestError for a heartbeat that does not parse, or whose names need more memory
        than there is."""
        try:
            document = request.document()
            client_id = _name(document.get("clientID", ""), "clientID")
            # A client may send its subscriptions once, and then only that it is alive.
            has_subscriptions = not document.get("withoutSub", False)
            data_set = document.get("consumerDataSet") or []
            if len(data_set) > HEARTBEAT_GROUPS_MAX:
                raise BadRequestError(
                    f"the heartbeat is refused: it names {len(data_set)} consumer groups, and at most "
                    f"{HEARTBEAT_GROUPS_MAX} are allowed"
                )
            changes = [
                self._take_group(request, client_id, data, has_subscriptions=has_subscriptions)
                for data in data_set
                if data.get("groupName", "")
            ]
        except (AttributeError, TypeError, ValueError) as error:
            raise BadRequestError(f"the body of the request is not a heartbeat: {error}") from error
        return any(changes)

    def _take_group(
        self, request: Request, client_id: str, data: dict[str, Any], *, has_subscriptions: bool
    ) -> bool:
        """Take one group of a heartbeat: its client becomes a member, or is alive still. ``data``: RocketMQ's
        ConsumerData. Returns whether the members or the subscriptions changed."""
        name = _name(data["groupName"], "groupName")
        before = self._sent.get(request.peer.id, _NOTHING).get(name)
        known = {} if before is None else before.subscriptions
        subscriptions = known
        if has_subscriptions:
            subscriptions = _merged(known, data.get("subscriptionDataSet") or [])
        member = Member(
            client_id,
            request.peer,
            request.command.language[:16],
            request.command.version,
            self._clock.monotonic_s(),
            subscriptions,
        )
        group = self._groups.get(name) or ConsumerGroup(name)
        # All fields are checked before the group changes.
        kinds = (
            _enum_name(data, "consumeType", group.consume_type, CONSUME_TYPES),
            _enum_name(data, "messageModel", group.message_model, MESSAGE_MODELS),
            _enum_name(data, "consumeFromWhere", group.consume_from, CONSUME_FROM),
        )
        nbytes = ENTRY_BYTES + CHAR_BYTES * len(name) + sum(each.nbytes for each in subscriptions.values())
        sent = _Sent(subscriptions, nbytes)
        self._reserve(group, member, before, sent)
        self._sent.setdefault(request.peer.id, {})[name] = sent
        group.consume_type, group.message_model, group.consume_from = kinds
        earlier = group.members.get(client_id)
        if earlier is None or earlier.peer is not member.peer:
            if earlier is not None:  # the client has connected again
                self._end_membership(earlier, name)
            self._memberships.setdefault(member.peer.id, set()).add((name, client_id))
        group.add(member)
        self._groups[name] = group
        if earlier is None:
            self._notify(name)
        return earlier is None or subscriptions is not known

    def _reserve(self, group: ConsumerGroup, member: Member, before: _Sent | None, sent: _Sent) -> None:
        """Count the memory that a member of ``group`` adds with the subscriptions in ``sent``, in place of those in
        ``before``. Raises BadRequestError if all names of heartbeats would then take more than the limit."""
        more_bytes = sent.nbytes - (0 if before is None else before.nbytes)
        known = group.members.get(member.client_id)
        more_bytes += member.nbytes - (0 if known is None else known.nbytes)
        more_bytes += 0 if group.name in self._groups else group.nbytes
        if more_bytes > 0 and self.held_bytes + more_bytes > self._bytes_max:
            raise BadRequestError(
                f"consumer groups, members and subscriptions take {self.held_bytes} bytes, and {self._bytes_max} are"
                " allowed: raise serve.memory_bytes"
            )
        self.held_bytes += more_bytes

    def leave(self, client_id: str, group_name: str, peer: Peer) -> None:
        """Remove a client that leaves a group over the connection ``peer``. A member with the same id on another
        connection stays: the client has connected again."""
        if group_name in self._sent.get(peer.id, _NOTHING):
            self._last_left[peer.id] = group_name
        group = self._groups.get(group_name)
        member = None if group is None else group.members.get(client_id)
        if group is not None and member is not None and member.peer is peer:
            self._remove_member(group, client_id)
            self._announce_departure(group)
        elif not self.has_member(group_name, peer):
            self._unsubscribe(peer.id, group_name)

    def closed(self, peer: Peer) -> None:
        """Remove all members and subscriptions of the connection ``peer``, which has closed."""
        self._last_left.pop(peer.id, None)
        groups = {}
        for name, client_id in list(self._memberships.get(peer.id, ())):
            groups[name] = self._groups[name]
            self._remove_member(groups[name], client_id)
        for group in groups.values():
            self._announce_departure(group)
        for group_name in list(self._sent.get(peer.id, ())):
            self._unsubscribe(peer.id, group_name)

    def expire(self) -> None:
        """Remove the members that have sent no heartbeat for EXPIRY_S."""
        limit_s = self._clock.monotonic_s() - EXPIRY_S
        for group in list(self._groups.values()):
            gone = [client_id for client_id, member in group.members.items() if member.seen_s < limit_s]
            for client_id in gone:
                self._remove_member(group, client_id)
            if gone:
                self._announce_departure(group)

    def _remove_member(self, group: ConsumerGroup, client_id: str) -> None:
        """Remove a member, and the subscriptions of its connection if no other member of the group uses that."""
        member = group.remove(client_id)
        self.held_bytes -= member.nbytes
        if member.peer.id not in group.member_counts:
            self._unsubscribe(member.peer.id, group.name)
        self._end_membership(member, group.name)

    def _unsubscribe(self, connection_id: int, group_name: str) -> None:
        """Drop the subscriptions that a connection sent for a group, with the memory they count for."""
        groups = self._sent.get(connection_id)
        sent = None if groups is None else groups.pop(group_name, None)
        if groups is None or sent is None:
            return
        if not groups:
            del self._sent[connection_id]
        self.held_bytes -= sent.nbytes

    def _end_membership(self, member: Member, group_name: str) -> None:
        memberships = self._memberships[member.peer.id]
        memberships.discard((group_name, member.client_id))
        if not memberships:
            del self._memberships[member.peer.id]

    def _announce_departure(self, group: ConsumerGroup) -> None:
        if group.members:
            self._notify(group.name)
        else:
            del self._groups[group.name]
            self.held_bytes -= group.nbytes

    def _peers(self, group_name: str) -> list[Peer]:
        """Return the connections of a group's members, each once: one connection may have several members."""
        group = self._groups.get(group_name)
        members = () if group is None else group.members.values()
        return list({member.peer.id: member.peer for member in members}.values())


_NOTHING: Mapping[str, _Sent] = {}


def _name(value: Any, field_name: str) -> str:
    """Return the name in a field of a heartbeat as text. Raises BadRequestError for one that is longer than servers,
    which cache names, take."""
    name = str(value)
    if len(name) > NAME_CHARS_MAX:
        raise BadRequestError(
            f"field {field_name} of the heartbeat has {len(name)} characters, and a name may have"
            f" {NAME_CHARS_MAX}"
        )
    return name


def _enum_name(data: dict[str, Any], field_name: str, default: str, names: Sequence[str]) -> str:
    """Return the name of a Java enum's member in a field of a heartbeat. C++ clients send its number, an index of
    ``names``."""
    value = data.get(field_name, default)
    if type(value) is int and 0 <= value < len(names):
        return names[value]
    return _name(value, field_name)


def _merged(known: dict[str, Subscription], documents: list[dict[str, Any]]) -> dict[str, Subscription]:
    """Return the subscriptions of a heartbeat by topic, but for those of which ``known`` has a newer version. If
    nothing has changed, this is ``known`` itself."""
    merged: dict[str, Subscription] = {}
    for document in documents:
        expression_type = _name(document.get("expressionType") or TAG, "expressionType")
        sent = Subscription(
            _name(document.get("topic", ""), "topic"),
            str(document.get("subString") or ("*" if expression_type == TAG else "")),
            expression_type,
            int(document.get("subVersion") or 0),
        )
        before = known.get(sent.topic)
        merged[sent.topic] = before if before is not None and before.version > sent.version else sent
    return known if merged == known else merged


def register_client_handlers(
    table: HandlerTable, clients: ClientTable, changed_group: Callable[[], None] = lambda: None
) -> None:
    """Enter into ``table`` the handlers of heartbeats, of clients that leave, and of questions about a group's members.
    ``changed_group`` is called after a heartbeat that changed a group."""

    @table.register(RequestCode.HEART_BEAT)
    async def heartbeat(request: Request) -> Response:
        changed = clients.heartbeat(request)
        if changed:
            changed_group()
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
            return Response(ResponseCode.SYSTEM_ERROR, remark="the group has no consumers")
        return json_response({"consumerIdList": sorted(group.members)})

    @table.register(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    async def connections(request: Request) -> Response:
        """GET_CONSUMER_CONNECTION_LIST, for ``mqadmin consumerConnection``: a group's members and subscriptions."""
        name = request.text("consumerGroup")
        group = clients.group(name)
        if group is None:
            return Response(ResponseCode.CONSUMER_NOT_ONLINE, remark=f"the consumer group[{name}] not online")
        return json_response(
            {
                "connectionSet": [
                    {
                        "clientAddr": member.peer.address,
                        "clientId": member.client_id,
                        "language": member.language,
                        "version": member.version,
                    }
                    for member in group.members.values()
                ],
                "subscriptionTable": {s.topic: s.document() for s in group.subscriptions.values()},
                "consumeType": group.consume_type,
                "messageModel": group.message_model,
                "consumeFromWhere": group.consume_from,
            }
        )


GROUP_CHARS_MAX: Final = 255
_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


def is_legal_group(name: str) -> bool:
    """Whether a broker creates a group of this name."""
    return len(name) <= GROUP_CHARS_MAX and _LEGAL.fullmatch(name) is not None
