"""Queries the broker about a queue with the fields of a client's own request, so that its signature holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rocketmq_tiered.server.proxy.proxy_handlers import Upstream
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from tiered.errors import CorruptionError, UnavailableError
from tiered.formats import fastjson
from tiered.remoting.command import RemotingCommand

ASK_TIMEOUT_S = 3.0
UNKNOWN_PHYS = (1 << 63) - 1
GONE_PHYS = -2
"""The record no longer exists, by a broker that returns others."""
SIGNATURE = "Signature"


async def query_log_begin(command: RemotingCommand, upstream: Upstream) -> int:
    """Begin of the broker's log; UNKNOWN_PHYS if it does not return it."""
    try:
        answer = await upstream.call(_ask(command, RequestCode.GET_BROKER_RUNTIME_INFO), ASK_TIMEOUT_S)
    except UnavailableError:
        return UNKNOWN_PHYS
    table = document_of(answer).get("table")
    text = table.get("commitLogMinOffset") if isinstance(table, Mapping) else None
    return int(text) if isinstance(text, str) and text.isdecimal() else UNKNOWN_PHYS


def _ask(command: RemotingCommand, code: RequestCode, **fields: object) -> RemotingCommand:
    """Another request about the queue of ``command``, with its fields: a signature covers the fields only."""
    others = {name: str(value) for name, value in fields.items()}
    return replace(command, code=int(code), ext_fields={**command.ext_fields, **others}, body=b"")


async def query_offset(command: RemotingCommand, upstream: Upstream, code: RequestCode) -> int | None:
    """The offset returned; None if the broker refuses."""
    answer = await upstream.call(_ask(command, code), ASK_TIMEOUT_S)
    text = answer.ext_fields.get("offset", "")
    if answer.code == ResponseCode.SYSTEM_BUSY:
        raise UnavailableError(answer.remark or "the broker is busy")
    return int(text) if answer.code == ResponseCode.SUCCESS and text.lstrip("-").isdecimal() else None


async def query_phys(command: RemotingCommand, upstream: Upstream, offset: int) -> int:
    """Physical offset of the record at ``offset``, GONE_PHYS if there is none, -1 if it is not returned."""
    if SIGNATURE in command.ext_fields:
        return -1  # additional fields would break the signature
    asked = _ask(command, RequestCode.QUERY_CONSUME_QUEUE, index=offset, count=1)
    document = document_of(await upstream.call(asked, ASK_TIMEOUT_S))
    rows = document.get("queueData")
    row = rows[0] if isinstance(rows, list) and rows else None
    if not isinstance(row, Mapping):
        return GONE_PHYS if "maxQueueIndex" in document else -1
    return int(row.get("physicOffset", -1))


async def query_record(command: RemotingCommand, upstream: Upstream, offset_field: str) -> RemotingCommand:
    """The reply with the bytes at the physical offset in a field of ``command``, as for a message's id; without a
    body if it is an error. Fields are renamed in the same order, so that a signature over values and body holds."""
    fields = {offset_field: ""} | dict(command.ext_fields)
    renamed = {
        name if not name[:1].islower() else
        "offset" if name == offset_field else f"{'a' if name < offset_field else 'p'}{name}": value
        for name, value in fields.items()
    }  # fmt: skip
    asked = replace(command, code=int(RequestCode.VIEW_MESSAGE_BY_ID), flag=0, ext_fields=renamed)
    answer = await upstream.call(asked, ASK_TIMEOUT_S)
    if answer.code == ResponseCode.SYSTEM_BUSY:
        raise UnavailableError(answer.remark or "the broker is busy")
    return answer if answer.code == ResponseCode.SUCCESS else replace(answer, body=b"")


def document_of(answer: RemotingCommand) -> Mapping[str, object]:
    """The body of a SUCCESS reply; empty if it is no JSON object."""
    if answer.code != ResponseCode.SUCCESS or not answer.body:
        return {}
    try:
        found = fastjson.loads(answer.body)
    except CorruptionError:
        return {}
    return found if isinstance(found, Mapping) else {}
