"""A message to send, and what an archived message becomes: everything that consumers see, without what brokers act on.

Sources: SendMessageRequestHeaderV2, MessageDecoder.encodeMessage, HookUtils.handleScheduleMessage, MessageConst.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fetcher.rows.message import Message
from tiered.formats.record import (
    SYS_COMPRESSED,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    Record,
    encode_properties,
    inner_messages,
)
from tiered.model.timer import PLACE
from tiered.remoting.command import RemotingCommand, RequestCode

RETRY_PREFIX = "%RETRY%"
_MULTI_TAGS = 0x2
_COMPRESSION_TYPE = 0x700
KEPT_FLAGS = SYS_COMPRESSED | _MULTI_TAGS | _COMPRESSION_TYPE
"""Of sysFlag. Others say how a broker stored it: half or committed, IPv6 hosts, inner batch."""
DROPPED_PROPERTIES = frozenset(
    {
        # It would be delayed again, or be a timer again.
        "DELAY",
        "TIMER_DELAY_LEVEL",
        "TIMER_DELAY_SEC",
        "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS",
        "TIMER_OUT_MS",
        "TIMER_ENQUEUE_MS",
        "TIMER_DEQUEUE_MS",
        "TIMER_ROLL_TIMES",
        "TIMER_ROLL_LABEL",
        "TIMER_DEL_UNIQKEY",
        "REAL_TOPIC",
        "REAL_QID",
        # It would be half a transaction.
        "TRAN_MSG",
        "PGROUP",
        "TRANSACTION_CHECK_TIMES",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
        "__transactionId__",
        # It would go to LMQs, to the queue of its priority, or be a batch.
        "INNER_MULTI_DISPATCH",
        "INNER_MULTI_QUEUE_OFFSET",
        "__LITE_TOPIC",
        "_SYS_MSG_PRIORITY_",
        "INNER_NUM",
        "INNER_BASE",
        # The target's own; WAIT = false would confirm what is not stored yet.
        "CLUSTER",
        "MSG_REGION",
        "TRACE_ON",
        "WAIT",
        "__CRC32#",
        "POP_CK",
        "POP_CK_OFFSET",
        "1ST_POP_TIME",
        # It says which timer was handed over.
        PLACE,
    }
)
_ITEM = struct.Struct(">iIIii")
_SHORT = struct.Struct(">h")


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """``body`` may be compressed, as ``sys_flag`` says. ``born_timestamp``: ms since the epoch; brokers keep it."""

    topic: str
    body: bytes = field(repr=False)
    properties: dict[str, str] = field(default_factory=dict)
    sys_flag: int = 0
    flag: int = 0
    born_timestamp: int = 0

    def request(self, group: str, queue_id: int) -> RemotingCommand:
        """The request that stores it in a queue, from a producer ``group``. A message without a body goes as a batch of
        one: 5.x brokers fail on it otherwise."""
        properties = encode_properties(self.properties)
        body, is_batch = self.body, not self.body
        if is_batch:
            encoded = properties.encode()
            size = _ITEM.size + _SHORT.size + len(encoded)
            body = _ITEM.pack(size, 0, 0, self.flag, 0) + _SHORT.pack(len(encoded)) + encoded
        fields = {
            # c, the topic that a missing one is made like: itself, so none is made.
            "a": group,
            "b": self.topic,
            "c": self.topic,
            "d": "4",
            "e": str(queue_id),
            "f": str(self.sys_flag),
            "g": str(self.born_timestamp),
            "h": str(self.flag),
            "i": "" if is_batch else properties,
            "j": "0",
            "k": "false",
            "m": "true" if is_batch else "false",
        }
        code = RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2
        return RemotingCommand(int(code), 0, ext_fields=fields, body=body)


def outgoing_messages(message: Message, topic: str) -> Iterator[tuple[int, OutgoingMessage]]:
    """An archived message for ``topic``, with its queue offset; several of an inner batch. Raises CorruptionError."""
    record = message.record
    if record.sys_flag & (SYS_INNER_BATCH | SYS_NEED_UNWRAP):
        for number, inner in enumerate(inner_messages(record)):
            properties = kept_properties(inner.properties, topic)
            yield (
                message.queue_offset + number,
                OutgoingMessage(topic, inner.body, properties, 0, inner.flag, record.born_timestamp),
            )
        return
    yield message.queue_offset, _outgoing(record, topic)


def _outgoing(record: Record, topic: str) -> OutgoingMessage:
    """What an archived record becomes when it is sent to ``topic``."""
    return OutgoingMessage(
        topic,
        record.stored_body,
        kept_properties(record.properties, topic),
        record.sys_flag & KEPT_FLAGS,
        record.flag,
        record.born_timestamp,
    )


def kept_properties(properties: Mapping[str, str], topic: str) -> dict[str, str]:
    """``properties`` without those that a broker, or a retry in ``topic``, would act on again."""
    kept = {name: value for name, value in properties.items() if name not in DROPPED_PROPERTIES}
    if not topic.startswith(RETRY_PREFIX):
        kept.pop("RETRY_TOPIC", None)  # else its retries would come under that name
    return kept
