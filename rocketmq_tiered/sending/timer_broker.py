"""The broker that timers are handed over to: what it can do, what it has, and sending to it.

Sources: HookUtils.handleScheduleMessage, TimerMessageStore, QueryMessageProcessor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from rocketmq_tiered.sending.sender import BrokerFailedError, Sender
from rocketmq_tiered.sending.target import Connect, TargetBroker, TargetQueue, find_target
from rocketmq_tiered.sending.timer_plan import BrokerTimers
from rocketmq_tiered.sending.timer_send import TimerSend
from tiered.archive.index.key_hash import xxh64
from tiered.archive.task import StoppedError
from tiered.errors import NotFoundError, UnavailableError, UsageError
from tiered.formats.record import decode_record
from tiered.remoting.client import BrokerClient

WHEEL_TOPIC = "rmq_sys_wheel_timer"
QUERY_MESSAGE = 12
FACTS_S = 30.0
"""What the broker can do, and its topics, are requested again after this."""
IN_FLIGHT = 64
ANSWERS_MAX = 32


class RemoteTimerBroker:
    """The broker at ``address()``, empty: unknown. ``connect``: a client; ``make_sender``: called on the loop."""

    def __init__(
        self,
        address: Callable[[], str],
        connect: Connect,
        make_sender: Callable[[], Sender],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._address, self._connect, self._make_sender = address, connect, make_sender
        self._is_stopped = is_stopped
        self._runner = asyncio.Runner()
        self._sender: Sender | None = None
        self._client: BrokerClient | None = None
        self._known: tuple[float, TargetBroker, BrokerTimers] | None = None

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()
        if self._sender is not None:
            self._sender.close()
        self._runner.close()

    def timers(self) -> BrokerTimers:
        """See TimerBroker."""
        return self._facts()[1]

    def is_settled(self) -> bool:
        """See TimerBroker."""
        return self._asked().runtime_info().get("dispatchBehindBytes") == "0"

    def has(self, topic: str, unique_key: str) -> bool:
        """See TimerBroker."""
        topics = (WHEEL_TOPIC, topic) if self.timers().max_delay_ms else (topic,)
        return any(self._has(one, unique_key) for one in topics)

    def _has(self, topic: str, unique_key: str) -> bool:
        fields = {
            "topic": topic, "key": unique_key, "maxNum": str(ANSWERS_MAX), "beginTimestamp": "0",
            "endTimestamp": str(time.time_ns() // 1_000_000 + 86_400_000), "_UNIQUE_KEY_QUERY": "true",
        }  # fmt: skip
        answer = self._asked().call(QUERY_MESSAGE, fields)
        return answer.code == 0 and any(found == unique_key for found in _unique_keys(answer.body))

    def _asked(self) -> BrokerClient:
        if self._client is None:
            self._client = self._connect(self._where())
        return self._client

    def _where(self) -> str:
        address = self._address()
        if not address:
            raise UnavailableError("the broker's address is unknown", hint="set broker.address")
        return address

    def _facts(self) -> tuple[TargetBroker, BrokerTimers]:
        now_s = time.monotonic()
        if self._known is None or now_s - self._known[0] > FACTS_S:
            self._known = None
            if self._client is not None:
                self._client.close()
                self._client = None
            target = find_target(self._where(), self._connect).brokers[0]
            config = self._asked().broker_config() or {}
            if config.get("brokerRole") == "SLAVE":
                raise UnavailableError(
                    f"broker {target.address} is a slave, which takes no messages",
                    hint="timers are delivered beside the master, or with broker.address set to it",
                )
            has_wheel = config.get("timerWheelEnable") == "true"
            max_delay_ms = int(config.get("timerMaxDelaySec") or 259_200) * 1000 if has_wheel else 0
            self._known = now_s, target, BrokerTimers(max_delay_ms)
        return self._known[1:]

    # -- sending ----------------------------------------------------------------------------------------------

    def send(
        self, sends: Sequence[TimerSend], sent: Callable[[TimerSend], None], until_s: float
    ) -> Mapping[int, str]:
        """See TimerBroker."""
        if not sends:
            return {}
        return self._runner.run(self._send_all(sends, sent, until_s))

    async def _send_all(
        self, sends: Sequence[TimerSend], sent: Callable[[TimerSend], None], until_s: float
    ) -> dict[int, str]:
        if self._sender is None:
            self._sender = self._make_sender()
        refused: dict[int, str] = {}
        queue = iter(enumerate(sends))
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())), asyncio.TaskGroup() as group:
                for _ in range(min(IN_FLIGHT, len(sends))):
                    group.create_task(self._work(queue, sent, refused))
        except TimeoutError:
            raise UnavailableError("the broker has not taken all timers in time") from None
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return refused

    async def _work(
        self,
        queue: Iterator[tuple[int, TimerSend]],
        sent: Callable[[TimerSend], None],
        refused: dict[int, str],
    ) -> None:
        assert self._sender is not None
        for number, send in queue:
            if self._is_stopped():
                raise StoppedError
            try:
                await self._sender.send(self._queue_of(send), send.message)
            except (NotFoundError, UsageError, BrokerFailedError) as error:
                refused[number] = error.message
                self._known = None if isinstance(error, NotFoundError) else self._known
            else:
                sent(send)

    def _queue_of(self, send: TimerSend) -> TargetQueue:
        broker, topic = self._facts()[0], send.message.topic
        count = broker.queue_count(topic)
        if not count:
            raise UsageError(f"topic {topic} does not exist at {broker.name}, or is not writable")
        wanted = send.queue if send.queue >= 0 else xxh64(send.key.encode())
        return TargetQueue(broker, wanted % count)


def _unique_keys(body: bytes) -> Iterator[str]:
    """Of the records that the broker answers with."""
    view, at = memoryview(body), 0
    with suppress(ValueError):
        while at + 4 <= len(view):
            size = int.from_bytes(view[at : at + 4], "big")
            if size < 4:
                return
            yield decode_record(view[at : at + size]).properties.get("UNIQ_KEY", "")
            at += size
