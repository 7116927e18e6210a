"""Which request goes where, how long its answer may take, and what a client is told when there is none. Pure.

Sources: org.apache.rocketmq.remoting.protocol.RequestCode; DefaultMQProducer.retryResponseCodes;
RemoteBrokerOffsetStore.readOffset.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from server.wire.codes import RequestCode, ResponseCode

SERVICE_NOT_AVAILABLE = 14
"""Response code; producers of every version send again on it."""


class Way(Enum):
    """Who answers a request."""

    NAME_SERVER = "any name server"
    NAME_SERVERS = "every name server"
    BROKER = "the broker"
    REFUSED = "nobody"


_READS_OF_NAME_SERVERS = frozenset({101, 105, 106, 206, 219, 224, 304, 311, 312, 313, 319, 901})
_WRITES_OF_NAME_SERVERS = frozenset({100, 102, 205, 212, 216, 217, 318, 327})
_AMONG_SERVERS = frozenset({103, 104, 322, 902, 903, 904, 905, 906, 908, 1008})
"""Of brokers, name servers and controllers among themselves: relayed they would speak for the wrong process."""
_SENDS = frozenset({
    RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2, RequestCode.CONSUMER_SEND_MSG_BACK,
    RequestCode.END_TRANSACTION,
})  # fmt: skip
_PATIENCE_S = 60.0
"""Longer than any client waits: ours must never be the limit that decides."""
_MARGIN_S = 10.0
_WAIT_FIELDS = ("suspendTimeoutMillis", "pollTime")


class Failure(Enum):
    """What a client is told instead of an answer."""

    BUSY = ResponseCode.SYSTEM_BUSY
    NOT_AVAILABLE = SERVICE_NOT_AVAILABLE
    SILENCE = -1
    HANG_UP = -2


def destination_of(code: int) -> Way:
    """Who answers request ``code``."""
    if code in _READS_OF_NAME_SERVERS:
        return Way.NAME_SERVER
    if code in _WRITES_OF_NAME_SERVERS:
        return Way.NAME_SERVERS
    return Way.REFUSED if code in _AMONG_SERVERS else Way.BROKER


def relay_timeout_s(fields: Mapping[str, str]) -> float:
    """How long the broker may take; long polls as long as the client says, and some more."""
    waits = [int(value) for name in _WAIT_FIELDS if (value := fields.get(name, "")).isdecimal()]
    return max(_PATIENCE_S, max(waits, default=0) / 1000 + _MARGIN_S)


def failure_of(code: int, *, was_sent: bool, timed_out: bool = False) -> Failure:
    """What to tell who asked ``code`` and gets no answer from the broker. ``was_sent``: it may have taken effect."""
    if timed_out:
        return Failure.SILENCE  # the client's own time limit has ended its wait long before
    if code == RequestCode.QUERY_CONSUMER_OFFSET:
        # A 4.9 client takes any code as "no offset yet" and begins anew; a closed connection it does not.
        return Failure.HANG_UP
    if code in _SENDS:
        return Failure.HANG_UP if was_sent else Failure.NOT_AVAILABLE
    return Failure.BUSY
