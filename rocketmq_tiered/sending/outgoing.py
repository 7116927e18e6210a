"""A message to send, and what an archived message becomes: everything that consumers see, without what brokers act on.

Sources: SendMessageRequestHeaderV2, MessageDecoder.encodeMessage, HookUtils.handleScheduleMessage, MessageConst.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fetcher.rows.message import Message
from tiered.formats.record import (
    SYS_COMPRESSED,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    encode_properties,
    inner_messages,
)
from tiered.model.queue import RETRY_PREFIX
from tiered.model.timer import PLACE
from tiered.remoting.command import RemotingCommand, RequestCode

_MULTI_TAGS = 0x2
_COMPRESSION_TYPE = 0x700
KEPT_FLAGS = SYS_COMPRESSED | _MULTI_TAGS | _COMPRESSION_TYPE
"""The bits of sysFlag that are sent. The others say how a broker stored the message: as half of a transaction, with
IPv6 hosts, as a batch."""
DROPPED_PROPERTIES = frozenset(
    {
        # With these the message would be delayed again, or be a timer again.
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
        # With these it would be half a transaction.
        "TRAN_MSG",
        "PGROUP",
        "TRANSACTION_CHECK_TIMES",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
        "__transactionId__",
        # With these it would go to LMQs, to the queue of its priority, or be a batch.
        "INNER_MULTI_DISPATCH",
        "INNER_MULTI_QUEUE_OFFSET",
        "__LITE_TOPIC",
        "_SYS_MSG_PRIORITY_",
        "INNER_NUM",
        "INNER_BASE",
        # The target broker sets its own; with WAIT = false it would confirm a message before it is stored.
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
        """Return the send request that stores this message in queue ``queue_id``, for producer group ``group``. A
        message without a body is sent as a batch of one message: 5.x brokers fail on it otherwise."""
        properties = encode_properties(self.properties)
        body, is_batch = self.body, not self.body
        if is_batch:
            encoded = properties.encode()
            size = _ITEM.size + _SHORT.size + len(encoded)
            body = _ITEM.pack(size, 0, 0, self.flag, 0) + _SHORT.pack(len(encoded)) + encoded
        fields = {
            # SendMessageRequestHeaderV2 has one letter for each name. "c" is the topic whose settings the broker copies
            # when it creates a missing topic "b": naming "b" itself prevents that it creates one.
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
    """Yield each message to send to ``topic`` for one archived message, with its queue offset: one, or for a record
    that holds a batch each message inside. Raises CorruptionError for a damaged record."""
    record = message.record
    if record.sys_flag & (SYS_INNER_BATCH | SYS_NEED_UNWRAP):
        for number, inner in enumerate(inner_messages(record)):
            properties = kept_properties(inner.properties, topic)
            yield (
                message.queue_offset + number,
                OutgoingMessage(topic, inner.body, properties, 0, inner.flag, record.born_timestamp),
            )
        return
    properties = kept_properties(record.properties, topic)
    sys_flag = record.sys_flag & KEPT_FLAGS
    yield (
        message.queue_offset,
        OutgoingMessage(topic, record.stored_body, properties, sys_flag, record.flag, record.born_timestamp),
    )


def kept_properties(properties: Mapping[str, str], topic: str) -> dict[str, str]:
    """``properties`` without those that a broker, or a retry in ``topic``, would act on again."""
    kept = {name: value for name, value in properties.items() if name not in DROPPED_PROPERTIES}
    if not topic.startswith(RETRY_PREFIX):
        kept.pop("RETRY_TOPIC", None)  # else its retries would come under that name
    return kept
