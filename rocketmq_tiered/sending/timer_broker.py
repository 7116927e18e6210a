"""The broker that timers are handed over to: what it can do, what it has, and sending to it.

Sources: HookUtils.handleScheduleMessage, TimerMessageStore, QueryMessageProcessor.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rocketmq_tiered.sending.sender import BACKOFF_FIRST_S, BACKOFF_MAX_S, send_failure, send_request
from rocketmq_tiered.sending.target import Connect, TargetBroker, TargetQueue, find_target
from rocketmq_tiered.sending.timer_send import TimerSend
from tiered.archive.task import StoppedError
from tiered.errors import NotFoundError, ThrottledError, UnavailableError, UsageError
from tiered.formats.record import decode_record, records_in
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
BATCH_MESSAGES, BATCH_S = 512, 0.05
"""At most so many messages are sent at once; with a low rate, those that it allows in BATCH_S."""
ANSWERS_MAX = 32
SEARCH_SLACK_MS = 120_000
"""A timer may be handed over so much earlier than timers.ahead_ms before its time, by the broker's clock."""
_PULL = {
    "consumerGroup": "TOOLS_CONSUMER",  # brokers have it
    "maxMsgNums": str(BATCH_MESSAGES),
    "sysFlag": "4",  # with a subscription
    "commitOffset": "0",
    "suspendTimeoutMillis": "0",
    "subscription": "*",
    "subVersion": "0",
}


class RemoteTimerBroker:
    """The broker that timers are handed over to. Methods raise UnavailableError while it is away."""

    answers_few = 10
    """If a key query returns so many messages, there may be more."""

    def __init__(
        self,
        address: Callable[[], str],
        connect: Connect,
        is_stopped: Callable[[], bool],
        settings: TimerSettings,
    ) -> None:
        """``address`` returns the broker's address, which may change, or an empty text while it is unknown; ``connect``
        opens a connection to an address; ``is_stopped`` says that this process stops: then nothing more is sent."""
        self._address, self._connect, self._is_stopped = address, connect, is_stopped
        self._rate, self._ahead_ms = settings.rate_per_s, settings.ahead_ms
        self._turns = TokenBucket(self._rate, 0)
        self._places: dict[tuple[str, str], set[str]] = {}
        """Searches since the last call of ``is_settled``: topic and unique key -> places of the timers found. An empty
        key stands for all messages of the topic."""
        self._client: BrokerClient | None = None
        self._known: tuple[float, TargetBroker, int] | None = None
        """When the broker was queried, itself with its topics, and the longest delay in ms that it takes."""

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()

    def longest_ms(self) -> int:
        """The longest timer that it takes; 0: none, as 4.9, or they are off."""
        return self._capabilities()[1]

    def is_settled(self) -> bool:
        """Whether all that it has stored can be found."""
        self._places.clear()
        return self._connected().runtime_info().get("dispatchBehindBytes") == "0"

    def has(self, send: TimerSend) -> bool:
        """Return whether the broker has the message of ``send``, as a pending timer or delivered to its topic. The
        place identifies it: queue id and queue offset of the message that set the timer, which the message carries."""
        # A broker without timers of its own has no topic with pending ones.
        topics = (WHEEL_TOPIC, send.message.topic)[not self.longest_ms() :]
        return any(send.place in self._places_found(topic, send) for topic in topics)

    def _places_found(self, topic: str, send: TimerSend) -> set[str]:
        """Return the places of timers that the broker has in ``topic``, among them that of ``send`` if the broker has
        it. They are searched by the unique key of ``send``; if so many messages have this key that the broker may not
        return all, by reading the topic from the time on at which ``send`` may have been sent first."""
        places = self._places.get((topic, send.key))
        if places is None:
            found = list(self._places_with_key(topic, send.key))
            places = self._places[topic, send.key] = set(found)
            if len(found) >= self.answers_few:
                if (topic, "") not in self._places:
                    since_ms = send.deliver_ms - self._ahead_ms - SEARCH_SLACK_MS
                    self._places[topic, ""] = set(self._places_since(topic, since_ms))
                places |= self._places[topic, ""]
        return places

    def _places_with_key(self, topic: str, unique_key: str) -> Iterator[str]:
        """Return the places of the timers among the broker's messages that have this unique key. A place is the text
        that says which message set the timer; it is empty for a message that is no timer of the archive."""
        fields = {
            "topic": topic,
            "key": unique_key,
            "maxNum": str(ANSWERS_MAX),
            "beginTimestamp": "0",
            # A day ahead, as the broker's clock may differ.
            "endTimestamp": str(wall_ms() + 86_400_000),
            "_UNIQUE_KEY_QUERY": "true",
        }
        answer = self._connected().call(RequestCode.QUERY_MESSAGE, fields)
        return _places(answer.body) if answer.code == ResponseCode.SUCCESS else iter(())

    def _places_since(self, topic: str, since_ms: int) -> Iterator[str]:
        """Read all messages that arrived in ``topic`` since ``since_ms``, and yield their places: the text that says
        which message set a timer, empty for other messages. Raises StoppedError when this process stops."""
        broker = self._capabilities()[0]
        for queue_id in range(1 if topic == WHEEL_TOPIC else broker.queue_count(topic)):
            fields = {"topic": topic, "queueId": str(queue_id), "timestamp": str(since_ms)}
            offset = self._offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, fields)
            end = self._offset(RequestCode.GET_MAX_OFFSET, fields)
            while offset < end:
                if self._is_stopped():
                    raise StoppedError
                pull = {**fields, **_PULL, "queueOffset": str(offset)}
                answer = self._connected().call(RequestCode.PULL_MESSAGE, pull)
                next_offset = int(answer.ext_fields.get("nextBeginOffset", offset))
                if next_offset <= offset:  # the same pull would be repeated without end
                    raise _unreadable(topic, answer)
                yield from _places(answer.body)
                offset = next_offset

    def _offset(self, code: RequestCode, fields: Mapping[str, str]) -> int:
        answer = self._connected().call(code, fields)
        if answer.code != ResponseCode.SUCCESS:
            raise _unreadable(fields["topic"], answer)
        return int(answer.ext_fields["offset"])

    def _connected(self) -> BrokerClient:
        if self._client is None:
            self._client = self._connect(self._where())
        return self._client

    def _where(self) -> str:
        address = self._address()
        if not address:
            raise UnavailableError(
                "timers are not delivered, as the broker's address is unknown", hint="set broker.address"
            )
        return address

    def _capabilities(self) -> tuple[TargetBroker, int]:
        """Return the broker with its topics, and the longest delay in ms that its own timers take, 0 if it has none.
        Both are read again every FACTS_S on a new connection. Raises UnavailableError if the broker is away or a
        slave."""
        now_s = time.monotonic()
        if self._known is None or now_s - self._known[0] > FACTS_S:
            self._known = None
            if self._client is not None:
                self._client.close()
                self._client = None
            target = find_target(self._where(), self._connect).brokers[0]
            config = self._connected().broker_config() or {}
            if config.get("brokerRole") == "SLAVE":
                raise UnavailableError(
                    f"broker {target.address} is a slave, which takes no messages",
                    hint="set broker.address to the master's address, or let the tiered run on the master's host "
                    "deliver timers",
                )
            has_wheel = config.get("timerWheelEnable") == "true"
            longest_ms = int(config.get("timerMaxDelaySec") or 259_200) * 1000 if has_wheel else 0
            self._known = now_s, target, longest_ms
        return self._known[1:]

    # -- sending ----------------------------------------------------------------------------------------------

    def send(
        self, sends: Sequence[TimerSend], sent: Callable[[TimerSend], None], until_s: float
    ) -> Mapping[int, str]:
        """Send the messages of ``sends``, in order as far as possible, and call ``sent`` for each that the broker has
        stored. Returns index in ``sends`` -> reason for those that the broker refuses. Raises UnavailableError if a
        message got no answer, so that the broker may have stored it, and when the monotonic clock reaches
        ``until_s``."""
        refused: dict[int, str] = {}
        left, pause_s = list(enumerate(sends)), BACKOFF_FIRST_S
        size = min(BATCH_MESSAGES, int(self._rate * BATCH_S) + 1) if self._rate else BATCH_MESSAGES
        while left:
            if self._is_stopped():
                raise StoppedError
            batch, left = left[:size], left[size:]
            if self._rate:
                time.sleep(self._turns.take(len(batch)))
            if busy := self._send_batch(batch, sent, refused, until_s):
                left = sorted(busy) + left
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, BACKOFF_MAX_S)
        return refused

    def _send_batch(
        self,
        batch: Sequence[tuple[int, TimerSend]],
        sent: Callable[[TimerSend], None],
        refused: dict[int, str],
        until_s: float,
    ) -> list[tuple[int, TimerSend]]:
        """Send the numbered messages of ``batch`` at once, and return those that the broker was too busy for. ``sent``
        is called for each that the broker has stored; the reasons of refused ones are added to ``refused`` by
        number."""
        requests: list[RemotingCommand] = []
        numbered: list[tuple[int, TimerSend]] = []
        busy: list[tuple[int, TimerSend]] = []
        broker = self._capabilities()[0]
        for number, send in batch:
            try:
                requests.append(send_request(_queue_of(broker, send), send.message, GROUP))
                numbered.append((number, send))
            except UsageError as error:
                refused[number] = error.message

        def on_answer(index: int, answer: RemotingCommand) -> None:
            """Note what the broker answered to ``requests[index]``: stored, too busy, or refused."""
            number, send = numbered[index]
            failure = send_failure(answer, broker, send.message.topic)
            if failure is None:
                sent(send)
            elif isinstance(failure, ThrottledError):
                busy.append((number, send))
            else:
                refused[number] = failure.message
                if isinstance(failure, NotFoundError):
                    # The topic was deleted: read the broker's topics again.
                    self._known = None

        self._connected().call_many(requests, on_answer, until_s)
        return busy


def _queue_of(broker: TargetBroker, send: TimerSend) -> TargetQueue:
    """Return the queue of ``broker`` that a timer's message goes to. Raises UsageError if its sender may not send to
    that topic, or if the topic has no queue that takes messages."""
    topic = send.message.topic
    if send.refusal:
        raise UsageError(send.refusal)
    count = broker.queue_count(topic)
    if not count:
        raise UsageError(f"topic {topic} does not exist at broker {broker.name}, or is not writable")
    return TargetQueue(broker, send.queue % count)


def _unreadable(topic: str, answer: RemotingCommand) -> UnavailableError:
    return UnavailableError(
        f"the broker does not return messages of topic {topic}: {answer.remark or answer.code}",
        hint="allow the account in broker.credentials_file to pull them: only they show whether a timer was"
        " delivered already",
    )


def _places(body: bytes) -> Iterator[str]:
    """Yield for each record in ``body``, the broker's reply, the property that says which message set the timer; empty
    for a record that is no timer of the archive. Raises CorruptionError for a record that does not decode."""
    for record in records_in(body):
        yield decode_record(record).properties.get(PLACE, "")
