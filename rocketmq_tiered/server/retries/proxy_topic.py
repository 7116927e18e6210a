"""The only writable topic: RocketMQ 5 proxies share their clients through it, and do not start without it.

Only the last messages, in memory: proxies repeat theirs every ten seconds.
Source: org.apache.rocketmq.proxy.service.sysmessage.HeartbeatSyncer, SendMessageRequestHeaderV2.
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Final

from rocketmq_tiered.server.backend.backend import TopicConfig
from rocketmq_tiered.server.backend.route_handlers import PROXY_TOPIC, READ_ONLY
from rocketmq_tiered.server.retries.retry_log import RetryMessage, RetryObject, assign_offsets
from rocketmq_tiered.server.retries.retry_record import encode_record
from rocketmq_tiered.server.retries.retry_topics import DeliveredQueues
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tiered.formats.record import decode_record

NUMBER_BASE: Final = 1 << 60
"""Above the number of every retry message."""
MESSAGES_KEPT: Final = 1_000
HELD_BYTES_MAX: Final = 16 * 1024 * 1024
"""Limit of these messages; a proxy's message has some hundred bytes."""
BODY_BYTES_MAX: Final = 256 * 1024
_SHORT_NAMES = {
    "topic": "b",
    "queueId": "e",
    "sysFlag": "f",
    "bornTimestamp": "g",
    "flag": "h",
    "properties": "i",
}


class ProxyTopic(DeliveredQueues):
    """The topic's messages, and the send handler."""

    def __init__(self, made: Mapping[str, TopicConfig], clock_ms: Callable[[], int]) -> None:
        """``made``: topics created here."""
        super().__init__()
        self._made, self._clock_ms = made, clock_ms
        self.state.next_number = NUMBER_BASE

    def register(self, table: HandlerTable) -> None:
        table.register(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2)(self.send)

    async def send(self, request: Request) -> Response:
        """SEND_MESSAGE: refused except for the proxies' topic, once a proxy created it."""
        names = (
            _SHORT_NAMES
            if request.code == RequestCode.SEND_MESSAGE_V2
            else {name: name for name in _SHORT_NAMES}
        )
        if request.text(names["topic"]) != PROXY_TOPIC or PROXY_TOPIC not in self._made:
            return Response(ResponseCode.NO_PERMISSION, remark=READ_ONLY)
        body, properties = request.command.body, request.text(names["properties"], "").encode()
        if len(body) > BODY_BYTES_MAX or len(properties) >= 1 << 15:
            return Response(ResponseCode.SYSTEM_ERROR, remark="message too large")
        flag, sys_flag = request.number(names["flag"], 0), request.number(names["sysFlag"], 0)
        data = encode_record(
            PROXY_TOPIC, properties, body, (_host(request.peer.address), _host("")), flag=flag & 0x7FFF_FFFF,
            sys_flag=sys_flag & 0x7FFF_FFCF, born_ms=request.number(names["bornTimestamp"], 0),
            body_crc=zlib.crc32(body) & 0x7FFF_FFFF,
        )  # fmt: skip
        message = self._keep(data)
        ext = {
            "msgId": decode_record(message.data).offset_msg_id, "queueId": "0",
            "queueOffset": str(message.queue_offset),
        }  # fmt: skip
        return Response(ext=ext)

    def _keep(self, data: bytes) -> RetryMessage:
        state, now_ms = self.state, self._clock_ms()
        message = RetryMessage(state.next_number, PROXY_TOPIC, now_ms, data)
        queue = state.queues.get(PROXY_TOPIC)
        nexts = {PROXY_TOPIC: 0 if queue is None else queue.next_offset}
        deliveries = tuple(assign_offsets([message], nexts, now_ms))
        state.apply(RetryObject(0, "", "", state.next_number + 1, (message,), deliveries))
        state.release(PROXY_TOPIC, nexts[PROXY_TOPIC] - MESSAGES_KEPT)
        while state.held_bytes > HELD_BYTES_MAX:
            state.release(PROXY_TOPIC, state.queues[PROXY_TOPIC].offsets[0] + 1)
        self.announce()
        return message


def _host(address: str) -> bytes:
    """As stored in a record; 127.0.0.1 for a name or an IPv6 address."""
    host, _, port = address.rpartition(":")
    try:
        return ipaddress.IPv4Address(host).packed + struct.pack(">i", int(port))
    except ValueError:
        return bytes([127, 0, 0, 1]) + struct.pack(">i", 0)
