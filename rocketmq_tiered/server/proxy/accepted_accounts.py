"""What a broker with access control accepted lately: accounts by connection, group and topic.

The broker judges, over the client's own connection to it; this process has no secrets. Requests that the access control
of some version does not judge are sent to it first with the code of one that it does, without effect because fields are
missing: a signature covers the values of fields and the body, not the code. Found by trying every code with 4.9.7 (ACL
1.0) and 5.3.3 (ACL 5.x).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

from rocketmq_tiered.server.proxy.proxy_handlers import Upstream
from rocketmq_tiered.server.security.permissions import NEEDS, Kind
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from rocketmq_tiered.server.wire.request import NAME_CHARS_MAX, BadRequestError, Request
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand
from tiered.remoting.credentials import ACCESS_KEY

ACCEPTED_S: Final = 60.0
ACCEPTED_MAX: Final = 1_000
"""Limit for one connection; a client that reads more queues is checked more often."""
JUDGE_S: Final = 3.0
READS: Final = frozenset(
    {
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        RequestCode.GET_MAX_OFFSET,
        RequestCode.GET_MIN_OFFSET,
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.GET_CONSUME_STATS,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO,
        RequestCode.QUERY_CONSUME_QUEUE,
        RequestCode.GET_CONSUMER_CONNECTION_LIST,
        RequestCode.QUERY_CONSUMER_OFFSET,
    }
)
"""Codes with a topic or group in their fields that ACL 1.0 does not check."""
SENDS: Final = frozenset({RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2})
"""Not judged by either."""
ADMINISTRATION: Final = frozenset(
    {
        RequestCode.GET_ALL_TOPIC_CONFIG,
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.GET_BROKER_CONFIG,
        RequestCode.GET_BROKER_RUNTIME_INFO,
        RequestCode.GET_ALL_CONSUMER_OFFSET,
        RequestCode.GET_ALL_DELAY_OFFSET,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
        RequestCode.SET_MESSAGE_REQUEST_MODE,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_KV_CONFIG,
        RequestCode.GET_BROKER_CONSUME_STATS,
    }
)
"""Not judged by one of them or both, or sent to name servers; without a topic or group in their fields."""
BY_BODY: Final = frozenset(
    {
        RequestCode.LOCK_BATCH_MQ,
        RequestCode.UNLOCK_BATCH_MQ,
        RequestCode.BATCH_ACK_MESSAGE,
    }
)
"""Their groups are in the body: accepted with an earlier request, or sent by an administrator."""
JUDGED: Final = READS | SENDS | ADMINISTRATION | BY_BODY
_ADMIN: Final = None, None

_Key = tuple[str, str | None, str | None]
"""Access key, group, topic; None, None: an administrator. A connection that sent a valid signature once belongs to that
client."""


class AcceptedAccounts:
    """Belongs to one event loop. ``now_s``: a monotonic clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._given: WeakKeyDictionary[Upstream, dict[_Key, float]] = WeakKeyDictionary()
        """When it was accepted, by connection, in order."""

    def accept(
        self, fields: Mapping[str, str], upstream: Upstream, group: str | None, topic: str | None
    ) -> None:
        """The broker accepted the account in ``fields`` for ``group`` and ``topic``; either may be empty. Not kept for
        names that are too long."""
        key = fields.get(ACCESS_KEY, ""), group, topic
        if any(len(name) > NAME_CHARS_MAX for name in key if name is not None):
            return
        given, now_s = self._given.setdefault(upstream, {}), self._now_s()
        given.pop(key, None)
        given[key] = now_s
        while len(given) > ACCEPTED_MAX or now_s - next(iter(given.values())) >= ACCEPTED_S:
            del given[next(iter(given))]

    def accepts(
        self, fields: Mapping[str, str], upstream: Upstream, group: str | None, topic: str | None
    ) -> bool:
        """Whether the broker did so within ACCEPTED_S."""
        given_s = self._given.get(upstream, {}).get((fields.get(ACCESS_KEY, ""), group, topic))
        return given_s is not None and self._now_s() - given_s < ACCEPTED_S

    def accepts_group(self, fields: Mapping[str, str], upstream: Upstream, group: str) -> bool:
        """Whether the broker did so with any topic, or without one."""
        given, account = self._given.get(upstream, {}), fields.get(ACCESS_KEY, "")
        return any(self.accepts(fields, upstream, *key[1:]) for key in given if key[:2] == (account, group))

    def count(self, upstream: Upstream) -> int:
        """Entries of a connection."""
        return len(self._given.get(upstream, {}))

    def clear(self) -> None:
        """Everything is judged again."""
        self._given.clear()

    async def refusal(self, request: Request, upstream: Upstream) -> RemotingCommand | None:
        """The broker's refusal of one of JUDGED; None: accepted. Raises UnavailableError."""
        command = request.command
        if request.code in READS:
            return await self.refusal_to_read(command, upstream)
        if request.code in SENDS:
            return await self.refusal_to_send(command, upstream)
        if request.code in BY_BODY:
            with suppress(BadRequestError):  # the broker may read other groups in it
                named = NEEDS[request.code].resources(request)
                groups = {name for kind, name in named if kind is Kind.GROUP}
                if all(self.accepts_group(command.ext_fields, upstream, name) for name in groups):
                    return None
        return await self._refusal_to_administrate(command, upstream)

    async def refusal_to_read(self, command: RemotingCommand, upstream: Upstream) -> RemotingCommand | None:
        """The broker's refusal of reading the topic and the group that ``command`` names; None: it is accepted. Raises
        UnavailableError."""
        fields = command.ext_fields
        group_field = (
            "group" if command.code == RequestCode.INVOKE_BROKER_TO_RESET_OFFSET else "consumerGroup"
        )
        topic, group = fields.get("topic", ""), fields.get(group_field, "")
        if topic and not self.accepts(fields, upstream, "", topic):
            asked = replace(command, code=int(RequestCode.QUERY_MESSAGE))
            if (refusal := await _refusal(asked, upstream)) is not None:
                return refusal
            self.accept(fields, upstream, "", topic)
        if (group or not topic) and not self.accepts(fields, upstream, group, ""):
            # Renamed; the order of the fields of a reset stays the same.
            named = {name: value for name, value in fields.items() if name != group_field}
            named["consumerGroup"] = group
            asked = replace(command, code=int(RequestCode.GET_CONSUMER_LIST_BY_GROUP), ext_fields=named)
            if (refusal := await _refusal(asked, upstream)) is not None:
                return refusal
            self.accept(fields, upstream, group, "")
        return None

    async def note(self, request: Request, upstream: Upstream, code: int) -> None:
        """The broker answered with ``code``, not a refusal by access control. What the answer does not prove is
        judged."""
        command = request.command
        fields = command.ext_fields
        group, topic = fields.get("consumerGroup", ""), fields.get("topic", "")
        if request.code == RequestCode.GET_CONSUMER_LIST_BY_GROUP:
            self.accept(fields, upstream, group, "")  # a topic is not judged
        elif request.code == RequestCode.POP_MESSAGE and not self.accepts(fields, upstream, group, topic):
            # Brokers before 5.0 do not know the code, and ACL 1.0 does not judge it.
            if code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED or not topic or not group:
                return
            with suppress(UnavailableError):  # judged again at the next request
                if await self.refusal_to_read(command, upstream) is None:
                    self.accept(fields, upstream, group, topic)

    async def refusal_to_send(self, command: RemotingCommand, upstream: Upstream) -> RemotingCommand | None:
        """The broker's refusal of sending to the topic that a send, or a recall, names; None: accepted. Raises
        UnavailableError."""
        is_v1 = "topic" in command.ext_fields
        code = RequestCode.SEND_MESSAGE if is_v1 else RequestCode.SEND_MESSAGE_V2
        before, number = ("defaultTopic", "defaultTopicQueueNums") if is_v1 else ("c", "d")
        # Renamed, so that nothing is sent: a name in place of a number, as 4.9 sends without one. The order of the
        # fields is the same, and their names are not signed.
        names = {before: number, number: f"{number}_"}
        fields = {names.get(name, name): value for name, value in command.ext_fields.items()}
        return await _refusal(replace(command, code=int(code), ext_fields=fields), upstream)

    async def _refusal_to_administrate(
        self, command: RemotingCommand, upstream: Upstream
    ) -> RemotingCommand | None:
        fields = command.ext_fields
        if self.accepts(fields, upstream, *_ADMIN):
            return None
        if "topic" in fields:  # it would be created
            remark = "the request has a field topic"
            return replace(
                command, code=int(ResponseCode.NO_PERMISSION), remark=remark, ext_fields={}, body=b""
            )
        asked = replace(command, code=int(RequestCode.UPDATE_AND_CREATE_TOPIC))
        refusal = await _refusal(asked, upstream)
        if refusal is None:
            self.accept(fields, upstream, *_ADMIN)
        return refusal


async def _refusal(command: RemotingCommand, upstream: Upstream) -> RemotingCommand | None:
    answer = await upstream.call(replace(command, flag=0), JUDGE_S)
    if answer.code == ResponseCode.SYSTEM_BUSY:
        raise UnavailableError(answer.remark or "the broker is busy")
    return replace(answer, body=b"") if is_refusal(answer) else None


def is_refusal(answer: RemotingCommand) -> bool:
    """Whether it comes from access control. Of ACL 1.0 it is a SYSTEM_ERROR, as for missing fields."""
    if answer.code == ResponseCode.SYSTEM_ERROR:
        return "AclException" in (answer.remark or "")
    return answer.code == ResponseCode.NO_PERMISSION
