"""What a broker with access control accepted lately: accounts by connection, group and topic.

The broker judges, over the client's own connection to it; this process has no secrets. It is given the fields of the
client's own request, perhaps with the code of a request that brokers of every version judge: a signature covers fields
and body, not the code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

from server.proxy.proxy_handlers import Upstream
from server.wire.codes import RequestCode, ResponseCode
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand
from tiered.remoting.credentials import ACCESS_KEY

ACCEPTED_S: Final = 60.0
ACCEPTED_MAX: Final = 1_000
"""Of one connection; a client that reads more queues is judged more often."""
JUDGE_S: Final = 3.0
JUDGED_FIRST: Final = frozenset({
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET,
    RequestCode.GET_EARLIEST_MSG_STORETIME, RequestCode.GET_TOPIC_STATS_INFO, RequestCode.GET_CONSUME_STATS,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, RequestCode.QUERY_CONSUME_QUEUE,
    RequestCode.GET_CONSUMER_CONNECTION_LIST,
})  # fmt: skip
"""Not judged by ACL 1.0: the broker is asked first whether the account may read the topic or group they name."""

_Key = tuple[str, str, str]
"""Access key, group, topic. A connection that sent a valid signature once belongs to that client."""


class AcceptedAccounts:
    """Belongs to one event loop. ``now_s``: a monotonic clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._given: WeakKeyDictionary[Upstream, dict[_Key, float]] = WeakKeyDictionary()
        """When it was accepted, by connection, in order."""

    def accept(self, fields: Mapping[str, str], upstream: Upstream, group: str, topic: str) -> None:
        """The broker accepted the account in ``fields`` for ``group`` and ``topic``; either may be empty."""
        key = fields.get(ACCESS_KEY, ""), group, topic
        given, now_s = self._given.setdefault(upstream, {}), self._now_s()
        given.pop(key, None)
        given[key] = now_s
        while len(given) > ACCEPTED_MAX or now_s - next(iter(given.values())) >= ACCEPTED_S:
            del given[next(iter(given))]

    def accepts(self, fields: Mapping[str, str], upstream: Upstream, group: str, topic: str) -> bool:
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

    async def refusal(self, command: RemotingCommand, upstream: Upstream) -> RemotingCommand | None:
        """The broker's refusal of reading the topic that ``command`` names, or the group if it names no topic; None: it
        is accepted. Raises UnavailableError."""
        fields = command.ext_fields
        topic = fields.get("topic", "")
        group = "" if topic else fields.get("consumerGroup", "")
        if self.accepts(fields, upstream, group, topic):
            return None
        # Fields of the other code are missing, so the broker returns no message: its access control comes first.
        code = RequestCode.QUERY_MESSAGE if topic else RequestCode.GET_CONSUMER_LIST_BY_GROUP
        answer = await upstream.call(replace(command, code=int(code), body=b""), JUDGE_S)
        if answer.code == ResponseCode.SYSTEM_BUSY:
            raise UnavailableError(answer.remark or "the broker is busy")
        if is_refusal(answer):
            return replace(answer, body=b"")
        self.accept(fields, upstream, group, topic)
        return None


def is_refusal(answer: RemotingCommand) -> bool:
    """Whether it comes from access control. SYSTEM_ERROR means missing fields or no such message, or a refusal by ACL
    1.0."""
    if answer.code == ResponseCode.SYSTEM_ERROR:
        return "AclException" in (answer.remark or "")
    return answer.code not in (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)
