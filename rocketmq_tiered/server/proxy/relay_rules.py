"""Where a request goes, how long its reply may take, and the reply when there is none. Pure.

Sources: org.apache.rocketmq.remoting.protocol.RequestCode; DefaultMQProducer.retryResponseCodes;
RemoteBrokerOffsetStore.readOffset.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode

SERVICE_NOT_AVAILABLE = 14
"""Response code; producers of every version send again on it."""


class Destination(Enum):
    """Who answers a request."""

    ANY_NAME_SERVER = "any name server"
    ALL_NAME_SERVERS = "all name servers"
    BROKER = "broker"
    NONE = "none"


READS_OF_NAME_SERVERS = frozenset({101, 105, 106, 206, 219, 224, 304, 311, 312, 313, 319, 901})
WRITES_OF_NAME_SERVERS = frozenset({100, 102, 205, 212, 216, 217, 318, 327})
AMONG_SERVERS = frozenset({103, 104, 322, 902, 903, 904, 905, 906, 908, 1008})
"""Codes between brokers, name servers and controllers: relayed they would act for the wrong process."""
_SENDS = frozenset({
    RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2, RequestCode.CONSUMER_SEND_MSG_BACK,
    RequestCode.END_TRANSACTION,
})  # fmt: skip
_TIMEOUT_S = 60.0
"""Longer than any client's own limit, which decides."""
_MARGIN_S = 10.0
_WAIT_FIELDS = ("suspendTimeoutMillis", "pollTime")


class Failure(Enum):
    """The outcome for a client whose request gets no reply from the broker."""

    BUSY = ResponseCode.SYSTEM_BUSY
    NOT_AVAILABLE = SERVICE_NOT_AVAILABLE
    SILENCE = -1
    CLOSE = -2


def destination_of(code: int) -> Destination:
    """Who answers request ``code``."""
    if code in READS_OF_NAME_SERVERS:
        return Destination.ANY_NAME_SERVER
    if code in WRITES_OF_NAME_SERVERS:
        return Destination.ALL_NAME_SERVERS
    return Destination.NONE if code in AMONG_SERVERS else Destination.BROKER


def relay_timeout_s(fields: Mapping[str, str]) -> float:
    """How long the broker may take: longer than the client's own long poll."""
    waits = [int(value) for name in _WAIT_FIELDS if (value := fields.get(name, "")).isdecimal()]
    return max(_TIMEOUT_S, max(waits, default=0) / 1000 + _MARGIN_S)


def failure_of(code: int, *, was_sent: bool, timed_out: bool = False) -> Failure:
    """The outcome of a request ``code`` without a reply. ``was_sent``: it may have taken effect."""
    if timed_out:
        return Failure.SILENCE  # the client's own limit has passed
    if code == RequestCode.QUERY_CONSUMER_OFFSET:
        # A 4.9 client reads any code as "no offset yet" and starts over; it retries after a closed connection.
        return Failure.CLOSE
    if code in _SENDS:
        return Failure.CLOSE if was_sent else Failure.NOT_AVAILABLE
    return Failure.BUSY
