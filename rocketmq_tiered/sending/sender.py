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
from tiered.remoting.command import FRAME_BYTES_MAX, HEADER_BYTES_MAX, RemotingCommand, ResponseCode
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
_STORED = {ResponseCode.SUCCESS, 10, 11, 12}
"""FLUSH_DISK_TIMEOUT, SLAVE_NOT_AVAILABLE, FLUSH_SLAVE_TIMEOUT: stored, not yet on disk or at a slave."""
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
        """``credentials``: None sends requests unsigned."""
        self._connect, self._credentials, self._group = connect, credentials, group
        self._interval_s = 1 / rate if rate else 0.0
        self._next_s = 0.0
        self._connections: dict[str, SendingConnection] = {}
        self._problem_s: float | None = None
        self._logged_s = -LOG_EVERY_S
        self.unanswered = 0
        """Sends without an answer, which were repeated: these messages may be stored twice."""

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()

    async def send(self, queue: TargetQueue, message: OutgoingMessage) -> None:
        """Returns once the broker has stored it: waits for its turn, and for a broker that is away or busy.

        Raises RefusedMessageError for a message, NotFoundError and UsageError for a topic, that the broker does not
        take, and BrokerFailedError."""
        request = send_request(queue, message, self._group)
        if self._credentials is not None:
            request = replace(request, ext_fields=self._credentials.signed(request.ext_fields, request.body))
        if self._interval_s:
            await self._turn()
        try:
            await self._attempt(queue.broker, request)
        except UnavailableError:
            await self._again(queue.broker, request)
        if self._problem_s is not None:
            logger.info("the broker takes messages again, after %.0f s", time.monotonic() - self._problem_s)
            self._problem_s, self._logged_s = None, -LOG_EVERY_S

    async def _turn(self) -> None:
        now_s = time.monotonic()
        self._next_s = max(self._next_s, now_s - BURST_S) + self._interval_s
        if self._next_s > now_s:
            await asyncio.sleep(self._next_s - now_s)

    async def _attempt(self, broker: TargetBroker, request: RemotingCommand) -> None:
        """Send once. Raises what the broker's answer means; a send without an answer is counted, as it may be
        stored."""
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

    async def _again(self, broker: TargetBroker, request: RemotingCommand) -> None:
        """Send until the broker takes the message, or has failed for too long; only what may succeed later is
        repeated."""
        from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

        retrying = AsyncRetrying(
            wait=wait_random_exponential(multiplier=BACKOFF_FIRST_S, max=BACKOFF_MAX_S),
            retry=retry_if_exception_type(UnavailableError),
            stop=_FailedTooLong(),
            before_sleep=self._waiting,
            reraise=True,
        )
        await retrying(self._attempt, broker, request)

    def _waiting(self, state: RetryCallState) -> None:
        now_s = time.monotonic()
        self._problem_s = self._problem_s or now_s
        if now_s - self._logged_s >= LOG_EVERY_S and state.outcome is not None:
            self._logged_s = now_s
            logger.warning("%s: sending waits, and tries again", state.outcome.exception())


class _FailedTooLong:
    """Ends the attempts of a message with which the broker fails for FAILED_S."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def __call__(self, state: RetryCallState) -> bool:
        if state.outcome is None or not isinstance(state.outcome.exception(), BrokerFailedError):
            self._since_s = None
            return False
        self._since_s = self._since_s or time.monotonic()
        return time.monotonic() - self._since_s >= FAILED_S


def send_request(queue: TargetQueue, message: OutgoingMessage, group: str) -> RemotingCommand:
    """The request that stores ``message``. Raises RefusedMessageError: no request holds it."""
    request, broker = message.request(group, queue.queue_id), queue.broker
    body_bytes_max = min(broker.max_body_bytes, FRAME_BYTES_MAX - HEADER_BYTES_MAX)
    if len(message.body) > body_bytes_max:
        raise RefusedMessageError(
            f"its body has {len(message.body):,} bytes, and broker {broker.name} takes {body_bytes_max:,}",
            hint="raise maxMessageSize in its broker.conf",
        )
    if len(request.ext_fields["i"]) > PROPERTIES_MAX:
        raise RefusedMessageError(f"its properties have more than {PROPERTIES_MAX:,} characters")
    return request


def send_failure(
    answer: RemotingCommand, broker: TargetBroker, topic: str
) -> UnavailableError | NotFoundError | UsageError | None:
    """Why a message was not stored; None: it was."""
    if answer.code in _STORED:
        return None
    said = f"broker {broker.name} ({broker.address}): {answer.remark or f'code {answer.code}'}"
    if answer.code in (ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE):
        return ThrottledError(said)
    if is_refusal(answer):
        return UsageError(said, hint=f"the account in broker.credentials_file needs PUB on {topic}")
    if answer.code == ResponseCode.SYSTEM_ERROR:
        return BrokerFailedError(said)
    if answer.code == ResponseCode.TOPIC_NOT_EXIST:
        return NotFoundError(said, hint=f"create {topic} with mqadmin updateTopic")
    return RefusedMessageError(said) if answer.code == _MESSAGE_ILLEGAL else UsageError(said)
