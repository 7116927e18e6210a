"""The broker that timers are handed over to: what it can do, what it has, and sending to it.

Sources: HookUtils.handleScheduleMessage, TimerMessageStore, QueryMessageProcessor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from rocketmq_tiered.sending.sender import BACKOFF_FIRST_S, BACKOFF_MAX_S, send_failure, send_request
from rocketmq_tiered.sending.target import Connect, TargetBroker, TargetQueue, find_target
from rocketmq_tiered.sending.timer_send import TimerSend
from tiered.archive.task import StoppedError
from tiered.errors import NotFoundError, ThrottledError, UnavailableError, UsageError
from tiered.formats.record import decode_record
from tiered.model.timer import PLACE
from tiered.object_store.throttle import TokenBucket
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode
from tiered.settings.sections import TimerSettings
from tiered.timestamps import wall_ms

WHEEL_TOPIC = "rmq_sys_wheel_timer"
FACTS_S = 30.0
"""What the broker can do, and its topics, are requested again after this."""
GROUP = "tiered_timers"
PART, PART_S = 512, 0.05
"""Messages that are sent before the next look at the rate, and their time at a low rate."""
ANSWERS_MAX = 32
SEARCH_SLACK_MS = 120_000
"""A timer may be handed over so much earlier than timers.ahead_ms before its time, by the broker's clock."""
_PULL = {
    "consumerGroup": "TOOLS_CONSUMER",  # brokers have it
    "maxMsgNums": str(PART),
    "sysFlag": "4",  # with a subscription
    "commitOffset": "0",
    "suspendTimeoutMillis": "0",
    "subscription": "*",
    "subVersion": "0",
}


class RemoteTimerBroker:
    """The broker at ``address()``, empty: unknown. Methods raise UnavailableError while it is away."""

    answers_few = 10
    """If a key query returns so many messages, there may be more."""

    def __init__(
        self,
        address: Callable[[], str],
        connect: Connect,
        is_stopped: Callable[[], bool],
        settings: TimerSettings,
    ) -> None:
        """``is_stopped`` ends the waits between sends."""
        self._address, self._connect, self._is_stopped = address, connect, is_stopped
        self._rate, self._ahead_ms = settings.rate_per_s, settings.ahead_ms
        self._turns = TokenBucket(self._rate, 0)
        self._places: dict[tuple[str, str], set[str]] = {}
        """What was found since ``is_settled``: topic and key, empty for all of the topic -> places of timers."""
        self._client: BrokerClient | None = None
        self._known: tuple[float, TargetBroker, int] | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()

    def longest_ms(self) -> int:
        """The longest timer that it takes; 0: none, as 4.9, or they are off."""
        return self._facts()[1]

    def is_settled(self) -> bool:
        """Whether all that it has stored can be found."""
        self._places.clear()
        return self._asked().runtime_info().get("dispatchBehindBytes") == "0"

    def has(self, send: TimerSend) -> bool:
        """Whether it has a message of this topic and place, pending or delivered."""
        topics = (WHEEL_TOPIC, send.message.topic)[not self.longest_ms() :]
        return any(send.place in self._found(topic, send) for topic in topics)

    def _found(self, topic: str, send: TimerSend) -> set[str]:
        """Places of timers in ``topic``, among them that of ``send`` if it is there. The key narrows the search, unless
        so many messages have it that the broker does not return all."""
        known = self._places.get((topic, send.key))
        if known is None:
            found = list(self._with_key(topic, send.key))
            known = self._places[topic, send.key] = set(found)
            if len(found) >= self.answers_few:
                if (topic, "") not in self._places:
                    since_ms = send.deliver_ms - self._ahead_ms - SEARCH_SLACK_MS
                    self._places[topic, ""] = set(self._since(topic, since_ms))
                known |= self._places[topic, ""]
        return known

    def _with_key(self, topic: str, unique_key: str) -> Iterator[str]:
        """The places of the timers among the broker's messages with this unique key."""
        fields = {
            "topic": topic,
            "key": unique_key,
            "maxNum": str(ANSWERS_MAX),
            "beginTimestamp": "0",
            "endTimestamp": str(wall_ms() + 86_400_000),
            "_UNIQUE_KEY_QUERY": "true",
        }
        answer = self._asked().call(RequestCode.QUERY_MESSAGE, fields)
        return _places(answer.body) if answer.code == ResponseCode.SUCCESS else iter(())

    def _since(self, topic: str, since_ms: int) -> Iterator[str]:
        """The places of all messages that arrived in ``topic`` since a time."""
        broker = self._facts()[0]
        for queue_id in range(1 if topic == WHEEL_TOPIC else broker.queue_count(topic)):
            fields = {"topic": topic, "queueId": str(queue_id), "timestamp": str(since_ms)}
            offset = self._offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, fields)
            end = self._offset(RequestCode.GET_MAX_OFFSET, fields)
            while offset < end:
                if self._is_stopped():
                    raise StoppedError
                pull = {**fields, **_PULL, "queueOffset": str(offset)}
                answer = self._asked().call(RequestCode.PULL_MESSAGE, pull)
                following = int(answer.ext_fields.get("nextBeginOffset", offset))
                if following <= offset:
                    raise _unreadable(topic, answer)
                yield from _places(answer.body)
                offset = following

    def _offset(self, code: RequestCode, fields: Mapping[str, str]) -> int:
        answer = self._asked().call(code, fields)
        if answer.code != ResponseCode.SUCCESS:
            raise _unreadable(fields["topic"], answer)
        return int(answer.ext_fields["offset"])

    def _asked(self) -> BrokerClient:
        if self._client is None:
            self._client = self._connect(self._where())
        return self._client

    def _where(self) -> str:
        address = self._address()
        if not address:
            raise UnavailableError("the broker's address is unknown", hint="set broker.address")
        return address

    def _facts(self) -> tuple[TargetBroker, int]:
        """The broker, and the longest delay that it takes itself; read again now and then, on a new connection."""
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
            longest_ms = int(config.get("timerMaxDelaySec") or 259_200) * 1000 if has_wheel else 0
            self._known = now_s, target, longest_ms
        return self._known[1:]

    # -- sending ----------------------------------------------------------------------------------------------

    def send(
        self, sends: Sequence[TimerSend], sent: Callable[[TimerSend], None], until_s: float
    ) -> Mapping[int, str]:
        """Send all, in order as far as possible, and call ``sent`` for each; position -> why the broker refuses it.
        Raises UnavailableError if any is in doubt, and after ``until_s`` (monotonic)."""
        refused: dict[int, str] = {}
        left, pause_s = list(enumerate(sends)), BACKOFF_FIRST_S
        size = min(PART, int(self._rate * PART_S) + 1) if self._rate else PART
        while left:
            if self._is_stopped():
                raise StoppedError
            part, left = left[:size], left[size:]
            self._wait_for_turn(len(part))
            if busy := self._send_part(part, sent, refused, until_s):
                left = sorted(busy) + left
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, BACKOFF_MAX_S)
        return refused

    def _wait_for_turn(self, count: int) -> None:
        if self._rate:
            time.sleep(self._turns.take(count))

    def _send_part(
        self,
        part: Sequence[tuple[int, TimerSend]],
        sent: Callable[[TimerSend], None],
        refused: dict[int, str],
        until_s: float,
    ) -> list[tuple[int, TimerSend]]:
        """What the broker was too busy for."""
        requests: list[RemotingCommand] = []
        numbered: list[tuple[int, TimerSend]] = []
        busy: list[tuple[int, TimerSend]] = []
        broker = self._facts()[0]
        for number, send in part:
            try:
                requests.append(send_request(_queue_of(broker, send), send.message, GROUP))
                numbered.append((number, send))
            except UsageError as error:
                refused[number] = error.message

        def answered(place: int, answer: RemotingCommand) -> None:
            """Sort an answer: sent, to be repeated, or refused; a topic that is not there makes the broker's table
            be read again."""
            number, send = numbered[place]
            failure = send_failure(answer, broker, send.message.topic)
            if failure is None:
                sent(send)
            elif isinstance(failure, ThrottledError):
                busy.append((number, send))
            else:
                refused[number] = failure.message
                self._known = None if isinstance(failure, NotFoundError) else self._known

        self._asked().call_many(requests, answered, until_s)
        return busy


def _queue_of(broker: TargetBroker, send: TimerSend) -> TargetQueue:
    """The queue that a timer goes to. UsageError: it can never be sent there as it is."""
    topic = send.message.topic
    if send.refusal:
        raise UsageError(send.refusal)
    count = broker.queue_count(topic)
    if not count:
        raise UsageError(f"topic {topic} does not exist at {broker.name}, or is not writable")
    return TargetQueue(broker, send.queue % count)


def _unreadable(topic: str, answer: RemotingCommand) -> UnavailableError:
    return UnavailableError(
        f"the broker does not return messages of {topic}: {answer.remark or answer.code}",
        hint="allow this account to pull them: a timer whose delivery is in doubt is looked up in its topic",
    )


def _places(body: bytes) -> Iterator[str]:
    """The place of each timer in the records of the broker's reply; empty for a record that is no timer of the
    archive."""
    view, at = memoryview(body), 0
    with suppress(ValueError):
        while at + 4 <= len(view):
            size = int.from_bytes(view[at : at + 4], "big")
            if size < 4:
                return
            yield decode_record(view[at : at + size]).properties.get(PLACE, "")
            at += size
