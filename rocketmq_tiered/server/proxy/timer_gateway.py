"""Sends timers that the broker does not take to the gateway topic, from which the archive delivers them.

Owns what the broker takes, as it says in its configuration, and that the gateway topic exists. A client gets the
broker's reply to the send to the gateway topic: SEND_OK means that the broker has stored it there.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from rocketmq_tiered.server.proxy.proxy_handlers import Upstream
from rocketmq_tiered.server.proxy.timer_requests import (
    SENDS,
    AskedTimer,
    RefusedTimerError,
    asked_timer,
    cancel_send,
    kept_place,
)
from rocketmq_tiered.server.security.addresses import host_of
from rocketmq_tiered.server.wire.request import Request, Response
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import ThrottledError, UnavailableError
from tiered.model.timer import Handle, encoded_handle, handle_words, own_handle
from tiered.remoting.client import config_of
from tiered.remoting.command import STORED, RemotingCommand, RequestCode, ResponseCode
from tiered.remoting.credentials import Credentials

CODES = SENDS | {RequestCode.RECALL_MESSAGE}
LIMIT_S = 30.0
"""How long a broker's limit stands; operators change it live."""
ASK_TIMEOUT_S = 3.0
QUEUES = 8
BROKERS_WORDS = 5
"""A broker's recall handle has so many words; ours has more."""
_DEFAULT_MAX_S = 3 * 24 * 3600

Send = Callable[[Request], Awaitable[Response | None]]
"""Relays a request to the broker over the client's connection."""


@dataclass(frozen=True)
class GatewayConfig:
    """``credentials``: of an administrator of the broker."""

    topic: str
    max_delay_ms: int
    ahead_ms: int
    credentials: Credentials | None = None


def new_counts() -> dict[str, int]:
    """Timers sent to the gateway topic, recalled there, and refused."""
    return {"sent": 0, "recalled": 0, "refused": 0}


class TimerGateway:
    """The gateway of one broker, for all clients. Belongs to one event loop. ``counts``: see new_counts."""

    def __init__(
        self,
        config: GatewayConfig,
        broker: str,
        counts: dict[str, int],
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """``broker``: its name, for recall handles; ``counts`` are increased here; ``clock``: timers are due by its
        wall time."""
        self._config, self._broker, self._clock = config, broker, clock
        # The longest delay that the broker takes, and when its configuration was read.
        self._limit_ms, self._asked_s = 0, -LIMIT_S
        self._has_topic = False
        self._counts = counts
        self.key = b""
        """The archive's private key, once it is open."""

    async def answer(self, request: Request, upstream: Upstream, send: Send) -> tuple[Response | None] | None:
        """Return the reply to a request that sets or recalls a timer of the archive, in a tuple, as the reply to a
        one-way request is None. None instead of a tuple: the request is not about such a timer, and is relayed as it
        is. Raises UnavailableError."""
        try:
            if request.code == RequestCode.RECALL_MESSAGE:
                return await self._recall(request, upstream, send)
            timer = asked_timer(request, self._clock.wall_ms())
            return None if timer is None else await self._timer(request, timer, upstream, send)
        except RefusedTimerError as error:
            self._counts["refused"] += 1
            return (Response(error.code, remark=str(error)),)

    # -- timers -----------------------------------------------------------------------------------------------

    async def _timer(
        self, request: Request, timer: AskedTimer, upstream: Upstream, send: Send
    ) -> tuple[Response | None] | None:
        """Send the timer of ``request`` to the gateway topic if its delay is longer than the broker takes, and return
        the client's reply in a tuple. None: the broker gets the request itself."""
        limit_ms, delay_ms = await self._broker_limit_ms(upstream), timer.deliver_ms - self._clock.wall_ms()
        is_for_broker = delay_ms <= limit_ms
        # A message that deletes a timer may mean one of the archive's, which is not handed over yet.
        if is_for_broker and not (timer.cancels and delay_ms > self._config.ahead_ms):
            return None
        if delay_ms > self._config.max_delay_ms:
            days = self._config.max_delay_ms / 86_400_000
            raise RefusedTimerError(
                f"the timer's time lies too far ahead: {days:g} days are allowed (timers.max_delay_ms)"
            )
        sender = f"{request.account}@{host_of(request.peer.address)}"
        command, unique_key = timer.for_gateway(self._config.topic, sender, self._key_or_wait())
        await self._prepare(upstream)
        response = await self._send(request, command, send)
        if is_for_broker:
            return None  # both the archive and the broker get the message that deletes a timer
        if response is None or response.code not in STORED:
            return (response,)
        self._counts["sent"] += 1
        place = kept_place(response.ext)
        if place is None or timer.cancels:
            return (response,)
        request.place = f"{self._config.topic}:{place.text}"
        handle = Handle(timer.topic, self._broker, timer.deliver_ms, unique_key, place)
        return (replace(response, ext={**response.ext, "recallHandle": handle.text(self._key_or_wait())}),)

    async def _recall(
        self, request: Request, upstream: Upstream, send: Send
    ) -> tuple[Response | None] | None:
        """Cancel the timer whose recall handle ``request`` has, by a message to the gateway topic, and return the
        client's reply in a tuple. None: the handle is one of the broker, which gets the request itself."""
        words = handle_words(request.text("recallHandle", ""))
        topic = request.text("topic", "")
        if words is None or words[1] != topic or not all(map(str.isprintable, words)):
            raise RefusedTimerError(
                "no timer is recalled: the recall handle is not one of the request's topic"
            )
        if len(words) == BROKERS_WORDS:
            return None
        handle, now_ms = own_handle(self._key_or_wait(), words), self._clock.wall_ms()
        if handle is None:
            raise RefusedTimerError("no timer is recalled: the recall handle was not made by this archive")
        if handle.deliver_ms <= now_ms:
            raise RefusedTimerError("the timer is not recalled, as its time of delivery has passed")
        await self._prepare(upstream)
        response = await self._send(request, cancel_send(handle, request, self._config.topic, now_ms), send)
        if response is None or response.code not in STORED:
            return (response,)
        self._counts["recalled"] += 1
        request.place = f"{self._config.topic}:{handle.place.text}"
        if handle.deliver_ms - now_ms > self._config.ahead_ms or not self._limit_ms:
            return (Response(ext={"msgId": handle.unique_key}, version=response.version),)
        # The broker may have it already, and judges whether it recalls messages.
        fields = {
            "producerGroup": request.text("producerGroup", ""),
            "topic": topic,
            "recallHandle": encoded_handle(handle.brokers_text()),
        }
        return (await self._send(request, replace(request.command, ext_fields=fields), send),)

    async def _send(self, request: Request, command: RemotingCommand, send: Send) -> Response | None:
        response = await send(Request(self._signed(command), request.peer, request.account))
        if response is not None and response.code == ResponseCode.TOPIC_NOT_EXIST:
            self._has_topic = False  # deleted since; the client sends again
        return response

    def _key_or_wait(self) -> bytes:
        if not self.key:
            raise ThrottledError(
                "this process is starting and has not opened its archive yet: repeat the request"
            )
        return self.key

    # -- the broker -------------------------------------------------------------------------------------------

    def _signed(self, command: RemotingCommand) -> RemotingCommand:
        if self._config.credentials is None:
            return command
        return replace(command, ext_fields=self._config.credentials.signed(command.ext_fields, command.body))

    async def _ask(self, upstream: Upstream, code: RequestCode, **fields: str) -> RemotingCommand:
        command = self._signed(RemotingCommand(int(code), 0, ext_fields=fields))
        answer = await upstream.call(command, ASK_TIMEOUT_S)
        if answer.code == ResponseCode.SYSTEM_BUSY:
            raise UnavailableError(answer.remark or "the broker is busy")
        return answer

    async def _broker_limit_ms(self, upstream: Upstream) -> int:
        """Return the longest delay in ms that the broker's own timers take, at most LIMIT_S old; 0 for a broker without
        timers, as 4.9. Raises RefusedTimerError if the broker does not show its configuration."""
        if time.monotonic() - self._asked_s < LIMIT_S:
            return self._limit_ms
        answer = await self._ask(upstream, RequestCode.GET_BROKER_CONFIG)
        if answer.code != ResponseCode.SUCCESS:
            raise RefusedTimerError(
                "the timer is refused, as the broker does not show its configuration, which says what timers it takes:"
                f" {answer.remark or answer.code}; set broker.credentials_file to an administrator's account",
                ResponseCode.NO_PERMISSION,
            )
        config = config_of(answer.body)
        has_timers = config.get("timerWheelEnable", "false") == "true"
        text = config.get("timerMaxDelaySec", "")
        limit_s = int(text) if text.isdecimal() else _DEFAULT_MAX_S
        self._limit_ms, self._asked_s = limit_s * 1000 if has_timers else 0, time.monotonic()
        return self._limit_ms

    async def _prepare(self, upstream: Upstream) -> None:
        """Create the gateway topic at the broker unless it exists. Raises RefusedTimerError if the broker refuses."""
        if self._has_topic:
            return
        topic = self._config.topic
        answer = await self._ask(upstream, RequestCode.GET_TOPIC_STATS_INFO, topic=topic)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            answer = await self._ask(
                upstream,
                RequestCode.UPDATE_AND_CREATE_TOPIC,
                topic=topic,
                defaultTopic=topic,
                readQueueNums=str(QUEUES),
                writeQueueNums=str(QUEUES),
                perm="6",
                topicFilterType="SINGLE_TAG",
                topicSysFlag="0",
                order="false",
            )
        if answer.code != ResponseCode.SUCCESS:
            raise RefusedTimerError(
                f"the timer is refused, as topic {topic}, which takes timers, cannot be created:"
                f" {answer.remark or answer.code}; create it with mqadmin updateTopic",
                ResponseCode.NO_PERMISSION,
            )
        self._has_topic = True
