"""Messages by id and by key from broker and archive, each once, newest first.

While one side is unavailable, the other's messages are returned; "not found" needs both sides. Sources:
QueryMessageProcessor, MQAdminImpl.queryMessage.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from fetcher.policy.read_policy import ReadPolicy
from fetcher.policy.read_router import ReadRouter
from fetcher.queries.found import count_within
from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.backend.lookup_handlers import key_count, records_by_key
from rocketmq_tiered.server.proxy.accepted_accounts import AcceptedAccounts, is_refusal
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers, Upstream, relayed
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from rocketmq_tiered.server.wire.request import Buffer, Request, Response
from tiered.errors import TieredError, UnavailableError
from tiered.formats.record import SYS_BORN_HOST_V6, decode_record
from tiered.remoting.command import RemotingCommand

logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 15 * 1024 * 1024
"""The merged messages of both sides must fit into a frame."""
_SIZE = struct.Struct(">i")
_PHYS = struct.Struct(">q")
_PHYS_AT, _FLAG_AT, _BORN_AT = 28, 36, 48
RECORD_BYTES_MIN: Final = 91


class MergedLookups:
    """Handlers. Belongs to one event loop."""

    def __init__(
        self, router: ReadRouter, archive: Backend, *, accepted: AcceptedAccounts | None = None
    ) -> None:
        """``accepted``: the broker has access control, so nothing is returned while it is unavailable."""
        self._router, self._archive = router, archive
        self._accepted = accepted

    def handlers(self) -> ProxyHandlers:
        return {RequestCode.VIEW_MESSAGE_BY_ID: self.view, RequestCode.QUERY_MESSAGE: self.by_key}

    async def view(self, request: Request, upstream: Upstream) -> Response:
        """VIEW_MESSAGE_BY_ID: from the broker, else from the archive."""
        answer, away = await _call(request.command, upstream)
        if away is not None and self._accepted is not None:
            raise away
        if answer is not None and answer.code == ResponseCode.SUCCESS:
            return await self._refusal(request, upstream, answer.body) or relayed(answer)
        if answer is not None and (is_refusal(answer) or answer.code != ResponseCode.SYSTEM_ERROR):
            return relayed(answer)
        record = await self._archived_at(request)
        if record is not None:
            return await self._refusal(request, upstream, bytes(record)) or Response(body=(record,))
        if answer is None:
            assert away is not None
            raise away
        return relayed(answer)

    async def _refusal(self, request: Request, upstream: Upstream, record: bytes) -> Response | None:
        """The reply to an account that the broker has not accepted for the message's own topic. Brokers judge the topic
        that the request names, or none."""
        if self._accepted is None or not record:
            return None
        topic, command = decode_record(record).topic, request.command
        if topic == request.text("topic", ""):
            refusal = await self._accepted.refusal_to_read(command, upstream)
            return None if refusal is None else relayed(refusal)
        if self._accepted.accepts(command.ext_fields, upstream, "", topic):
            return None
        remark = "the message is of another topic than the request names"
        return Response(ResponseCode.NO_PERMISSION, remark=remark)

    async def _archived_at(self, request: Request) -> Buffer | None:
        """The message from the archive, unless its own topic has DISABLE: a client may name another topic, and 4.9
        names none."""
        if request.text("topic", "") and not self._may_search(request):
            return None
        record = await self._archive.message_at_phys(request.number("offset"))
        if record is None or self._is_disabled(decode_record(record).topic):
            return None
        return record

    async def by_key(self, request: Request, upstream: Upstream) -> Response:
        if not self._may_search(request):
            return relayed(_of_topic(request, await upstream.call(request.command, ANSWER_S)))
        (answer, away), (archived, failure) = await asyncio.gather(
            _call(request.command, upstream), self._archived(request)
        )
        if away is not None and self._accepted is not None:
            raise away
        if answer is not None and answer.code not in (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND):
            return relayed(answer)  # perhaps a refusal by access control
        answer = None if answer is None else _of_topic(request, answer)
        is_found = answer is not None and answer.code == ResponseCode.SUCCESS
        ours = list(records_in(answer.body)) if answer is not None and is_found else []
        records = merged(ours, archived, key_count(request))
        if not records:
            for missing in (away, failure):
                if missing is not None:
                    raise missing
            assert answer is not None
            return relayed(answer)
        ext = {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
        return Response(ext=ext | dict(answer.ext_fields) if answer is not None else ext, body=records)

    async def _archived(self, request: Request) -> tuple[Sequence[Buffer], TieredError | None]:
        try:
            return await records_by_key(self._archive, request), None
        except TieredError as error:
            logger.warning("key query failed in the archive: %s", error)
            return (), error

    def _may_search(self, request: Request) -> bool:
        return not self._is_disabled(request.text("topic", ""))

    def _is_disabled(self, topic: str) -> bool:
        return self._router.policy_of(topic) is ReadPolicy.DISABLE


async def _call(
    command: RemotingCommand, upstream: Upstream
) -> tuple[RemotingCommand | None, UnavailableError | None]:
    try:
        return await upstream.call(command, ANSWER_S), None
    except UnavailableError as error:
        return None, error


def _of_topic(request: Request, answer: RemotingCommand) -> RemotingCommand:
    """Without messages of other topics: a broker finds them by a hash of topic and key, which a client may choose."""
    topic = request.text("topic", "")
    found = [record for record in records_in(answer.body) if decode_record(record).topic == topic]
    if found or answer.code != ResponseCode.SUCCESS:
        return replace(answer, body=b"".join(found))
    return replace(answer, code=int(ResponseCode.QUERY_NOT_FOUND), remark="no message has this key", body=b"")


def records_in(body: bytes) -> Iterator[memoryview]:
    """The records of a reply's body, up to the first invalid one."""
    view, at = memoryview(body), 0
    while at + RECORD_BYTES_MIN <= len(view):
        (size,) = _SIZE.unpack_from(view, at)
        if size < RECORD_BYTES_MIN or at + size > len(view):
            return
        yield view[at : at + size]
        at += size


def merged(ours: Sequence[Buffer], archived: Sequence[Buffer], count: int) -> list[Buffer]:
    """Records of both sides, once per physical offset, newest first, at most ``count``."""
    found: dict[int, tuple[int, Buffer]] = {}
    for record in (*archived, *ours):
        (phys,) = _PHYS.unpack_from(record, _PHYS_AT)
        (flags,) = _SIZE.unpack_from(record, _FLAG_AT)
        host_bytes = 20 if flags & SYS_BORN_HOST_V6 else 8
        (stored_ms,) = _PHYS.unpack_from(record, _BORN_AT + host_bytes)
        found[phys] = stored_ms, record
    newest_first = sorted(found.items(), key=lambda item: (item[1][0], item[0]), reverse=True)
    records = [record for _, (_, record) in newest_first[:count]]
    return records[: count_within(map(len, records), ANSWER_BYTES_MAX)]
