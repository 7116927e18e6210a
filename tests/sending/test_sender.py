"""The sender: what it waits for, what ends it, and how many messages are in flight."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from rocketmq_tiered.sending import sender as module
from rocketmq_tiered.sending.outgoing import OutgoingMessage
from rocketmq_tiered.sending.sender import BrokerFailedError, RefusedMessageError, Sender
from rocketmq_tiered.sending.target import TargetBroker, TargetQueue
from tiered.errors import NotFoundError, ThrottledError, UnansweredError, UsageError
from tiered.remoting.command import RemotingCommand
from tiered.remoting.credentials import Credentials, signature_of

QUEUE = TargetQueue(TargetBroker("c", "b", "127.0.0.1:1", max_body_bytes=100), 3)
MESSAGE = OutgoingMessage("t", b"body", {"KEYS": "k"})
Outcome = int | Exception


class Scripted:
    """A connection whose n-th call ends as ``outcome`` says."""

    def __init__(self, outcome: Callable[[int], Outcome], delay_s: float = 0) -> None:
        self.outcome, self.delay_s = outcome, delay_s
        self.requests: list[RemotingCommand] = []
        self.in_flight = self.in_flight_max = 0

    async def call(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        self.requests.append(command)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight, self.in_flight_max)
        await asyncio.sleep(self.delay_s)
        self.in_flight -= 1
        found = self.outcome(len(self.requests))
        if isinstance(found, Exception):
            raise found
        return RemotingCommand(found, 0, flag=1, remark="why")

    def close(self) -> None:
        pass


def send(scripted: Scripted, count: int = 1, **options: object) -> Sender:
    """Send ``count`` messages together."""

    async def run() -> Sender:
        sender = Sender(lambda _: scripted, group="g", **options)  # type: ignore[arg-type]
        await asyncio.gather(*(sender.send(QUEUE, MESSAGE) for _ in range(count)))
        return sender

    return asyncio.run(run())


def test_a_broker_that_is_away_is_waited_for_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scripted = Scripted(lambda number: ThrottledError("b cannot be reached") if number < 5 else 0)
    assert send(scripted).unanswered == 0
    assert len(scripted.requests) == 5
    away, back = (record.message for record in caplog.records)
    assert away.endswith("b cannot be reached") and "again" in back


def test_a_send_without_an_answer_is_repeated_and_counted() -> None:
    scripted = Scripted(lambda number: UnansweredError("lost") if number == 1 else 0)
    assert send(scripted).unanswered == 1
    assert [request.body for request in scripted.requests] == [b"body", b"body"]


def test_a_broker_that_keeps_failing_with_a_message_ends_the_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAILED_S", 0.2)
    with pytest.raises(BrokerFailedError, match="why"):
        send(Scripted(lambda _: 1))


@pytest.mark.parametrize(
    ("code", "error"), [(13, RefusedMessageError), (16, UsageError), (17, NotFoundError)]
)
def test_what_a_broker_does_not_take_is_not_repeated(code: int, error: type[Exception]) -> None:
    scripted = Scripted(lambda _: code)
    with pytest.raises(error, match="why"):
        send(scripted)
    assert len(scripted.requests) == 1


def test_messages_are_in_flight_together_at_the_rate() -> None:
    scripted = Scripted(lambda _: 0, delay_s=0.05)
    send(scripted, 20)
    assert scripted.in_flight_max == 20
    scripted = Scripted(lambda _: 0)
    assert asyncio.run(timed(scripted)) > (60 - 1) / 200 - module.BURST_S


async def timed(scripted: Scripted) -> float:
    """Seconds for 60 messages at 200 a second."""
    sender, begun_s = Sender(lambda _: scripted, group="g", rate=200), asyncio.get_running_loop().time()
    for _ in range(60):
        await sender.send(QUEUE, MESSAGE)
    return asyncio.get_running_loop().time() - begun_s


def test_requests_are_signed() -> None:
    scripted = Scripted(lambda _: 0)
    send(scripted, credentials=Credentials("key", "secret"))
    (request,) = scripted.requests
    assert request.ext_fields["AccessKey"] == "key"
    assert request.ext_fields["Signature"] == signature_of(request.ext_fields, request.body, "secret")


def test_a_message_that_no_request_holds_is_refused() -> None:
    for message in (OutgoingMessage("t", bytes(101)), OutgoingMessage("t", b"x", {"a": "v" * 40_000})):
        with pytest.raises(RefusedMessageError):
            asyncio.run(Sender(lambda _: Scripted(lambda _: 0), group="g").send(QUEUE, message))
