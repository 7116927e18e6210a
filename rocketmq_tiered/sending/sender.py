"""Sends messages to brokers at a bounded rate, and waits while a broker is away.

Many messages may be in flight, over one connection a broker. A broker stores what is in flight together in any order:
callers that keep an order wait for one message before they send the next. Sources: SendMessageProcessor, ResponseCode.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rocketmq_tiered.sending.outgoing import OutgoingMessage
from rocketmq_tiered.sending.target import TargetBroker, TargetQueue
from tiered.errors import (
    NotFoundError,
    ThrottledError,
    UnansweredError,
    UnavailableError,
    UsageError,
)
from tiered.remoting.client import is_refusal
from tiered.remoting.command import FRAME_BYTES_MAX, HEADER_BYTES_MAX, STORED, RemotingCommand, ResponseCode
from tiered.remoting.credentials import Credentials

if TYPE_CHECKING:
    from tenacity import RetryCallState

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 5.0
FAILED_S = 60.0
"""A broker that fails for so long (SYSTEM_ERROR) with one message does not recover by waiting."""
LOG_EVERY_S = 60.0
BURST_S = 0.05
PROPERTIES_MAX = 32_767
"""Characters; what a record and a request hold."""
_MESSAGE_ILLEGAL = 13


class RefusedMessageError(UsageError):
    """The broker will never take this message."""


class BrokerFailedError(UnavailableError):
    """The broker failed with this message (SYSTEM_ERROR), which it has not stored."""


class SendingConnection(Protocol):
    """One connection to a broker: RemotingUpstream."""

    async def call(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        """The response. Raises UnansweredError, ThrottledError."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class Sender:
    """Sends for a producer ``group``. Belongs to one event loop. ``connect``: a connection to an address;
    ``rate``: messages a second, 0 for any."""

    def __init__(
        self,
        connect: Callable[[str], SendingConnection],
        credentials: Credentials | None = None,
        *,
        group: str,
        rate: float = 0,
    ) -> None:
        """``connect`` opens a connection to an address; ``credentials``: None sends requests unsigned; ``group``: the
        producer group; ``rate``: messages a second, 0 means no limit."""
        self._connect, self._credentials, self._group = connect, credentials, group
        self._interval_s = 1 / rate if rate else 0.0
        self._next_s = 0.0
        self._connections: dict[str, SendingConnection] = {}
        self._problem_s: float | None = None
        """When a broker stopped taking messages; None: it takes them."""
        self._logged_s = -LOG_EVERY_S
        self.unanswered = 0
        """Sends without an answer, which were repeated: these messages may be stored twice."""

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()

    async def send(self, queue: TargetQueue, message: OutgoingMessage) -> None:
        """Send a message, and return once the broker has stored it: the call waits as the rate demands, and while the
        broker is away or busy.

        Raises RefusedMessageError for a message and NotFoundError or UsageError for a topic that the broker does not
        take, and BrokerFailedError when it fails with the message for a minute."""
        request = send_request(queue, message, self._group)
        if self._credentials is not None:
            request = replace(request, ext_fields=self._credentials.signed(request.ext_fields, request.body))
        if self._interval_s:
            await self._wait_for_rate()
        try:
            await self._attempt(queue.broker, request)
        except UnavailableError:
            await self._repeat(queue.broker, request)
        if self._problem_s is not None:
            logger.info(
                "broker %s takes messages again, after %.0f s",
                queue.broker.name,
                time.monotonic() - self._problem_s,
            )
            self._problem_s, self._logged_s = None, -LOG_EVERY_S

    async def _wait_for_rate(self) -> None:
        """Wait until the rate allows the next message; after a pause, those of BURST_S may be sent at once."""
        now_s = time.monotonic()
        self._next_s = max(self._next_s, now_s - BURST_S) + self._interval_s
        if self._next_s > now_s:
            await asyncio.sleep(self._next_s - now_s)

    async def _attempt(self, broker: TargetBroker, request: RemotingCommand) -> None:
        """Send a request once. Raises the error that the broker's answer means. A request without an answer is counted,
        as the broker may have stored its message."""
        connection = self._connections.get(broker.address)
        if connection is None:
            connection = self._connections[broker.address] = self._connect(broker.address)
        try:
            answer = await connection.call(request, TIMEOUT_S)
        except UnansweredError:
            self.unanswered += 1
            raise
        if (failure := send_failure(answer, broker, request.ext_fields["b"])) is not None:
            raise failure

    async def _repeat(self, broker: TargetBroker, request: RemotingCommand) -> None:
        """Send a request again and again until the broker has stored its message, or has failed with it for FAILED_S.
        Only an UnavailableError is followed by another attempt; others are raised at once."""
        from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

        retrying = AsyncRetrying(
            wait=wait_random_exponential(multiplier=BACKOFF_FIRST_S, max=BACKOFF_MAX_S),
            retry=retry_if_exception_type(UnavailableError),
            stop=_FailedTooLong(),
            before_sleep=self._log_problem,
            reraise=True,
        )
        await retrying(self._attempt, broker, request)

    def _log_problem(self, state: RetryCallState) -> None:
        """Log at most once a minute why a message has to be sent again."""
        now_s = time.monotonic()
        self._problem_s = self._problem_s or now_s
        if now_s - self._logged_s >= LOG_EVERY_S and state.outcome is not None:
            self._logged_s = now_s
            logger.warning(
                "a message was not sent and is sent again until the broker takes it: %s",
                state.outcome.exception(),
            )


class _FailedTooLong:
    """Ends the attempts of a message with which the broker fails for FAILED_S."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def __call__(self, state: RetryCallState) -> bool:
        """Return whether tenacity is to stop: since FAILED_S every attempt has ended with the broker's SYSTEM_ERROR. A
        broker that is only away or busy is waited for without end."""
        if state.outcome is None or not isinstance(state.outcome.exception(), BrokerFailedError):
            self._since_s = None
            return False
        self._since_s = self._since_s or time.monotonic()
        return time.monotonic() - self._since_s >= FAILED_S


def send_request(queue: TargetQueue, message: OutgoingMessage, group: str) -> RemotingCommand:
    """Return the request that stores ``message`` in ``queue``, from producer group ``group``. Raises
    RefusedMessageError if the message is larger than the broker or the protocol allows."""
    request, broker = message.request(group, queue.queue_id), queue.broker
    # A frame holds the header of the request as well as the body.
    body_bytes_max = min(broker.max_body_bytes, FRAME_BYTES_MAX - HEADER_BYTES_MAX)
    if len(message.body) > body_bytes_max:
        raise RefusedMessageError(
            f"the message's body has {len(message.body):,} bytes, and broker {broker.name} takes {body_bytes_max:,}",
            hint=f"raise maxMessageSize in the broker.conf of {broker.name}",
        )
    if len(request.ext_fields["i"]) > PROPERTIES_MAX:  # "i" holds the properties
        raise RefusedMessageError(
            f"the message's properties have more than {PROPERTIES_MAX:,} characters, which no request can hold"
        )
    return request


def send_failure(
    answer: RemotingCommand, broker: TargetBroker, topic: str
) -> UnavailableError | NotFoundError | UsageError | None:
    """Return the error that the broker's answer to a send means, or None if it has stored the message. ``topic``: where
    the message was sent to."""
    if answer.code in STORED:
        return None
    reply_text = f"broker {broker.name} ({broker.address}): {answer.remark or f'code {answer.code}'}"
    if answer.code in (ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE):
        return ThrottledError(reply_text)
    if is_refusal(answer):
        return UsageError(
            reply_text, hint=f"give the account in broker.credentials_file PUB on topic {topic}"
        )
    if answer.code == ResponseCode.SYSTEM_ERROR:
        return BrokerFailedError(reply_text)
    if answer.code == ResponseCode.TOPIC_NOT_EXIST:
        return NotFoundError(reply_text, hint=f"create topic {topic} with mqadmin updateTopic")
    return RefusedMessageError(reply_text) if answer.code == _MESSAGE_ILLEGAL else UsageError(reply_text)
