"""Handing over to a broker at the level of the protocol: what is in flight together, refused, sent again, in doubt."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rocketmq_tiered.sending import timer_broker as module
from rocketmq_tiered.sending.outgoing import OutgoingMessage
from rocketmq_tiered.sending.timer_broker import RemoteTimerBroker
from rocketmq_tiered.sending.timer_send import TimerSend
from tests.sending.target_broker import STORED_UNANSWERED, TargetScene
from tiered.archive.task import StoppedError
from tiered.errors import UnavailableError
from tiered.model.timer import PLACE
from tiered.remoting.client import IN_FLIGHT, BrokerClient
from tiered.settings.sections import TimerSettings

COUNT = 3 * IN_FLIGHT + 7
BUSY, ILLEGAL = 2, 13


def timer(number: int, topic: str = "orders", body: bytes = b"body") -> TimerSend:
    key = f"K{number}"
    return TimerSend(
        OutgoingMessage(topic, body, {"UNIQ_KEY": key, PLACE: f"0:{number}:9"}), f"0:{number}:9", 1, number
    )


@contextmanager
def beside(
    scene: TargetScene, *, rate: int = 0, is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[RemoteTimerBroker]:
    with scene.running():
        broker = RemoteTimerBroker(
            lambda: scene.address,
            lambda address: BrokerClient(address, 10.0),
            is_stopped,
            TimerSettings(rate_per_s=rate),
        )
        yield broker
        broker.close()


def soon() -> float:
    return time.monotonic() + 20


def keys_in(scene: TargetScene) -> list[str]:
    return [one.properties["UNIQ_KEY"] for one in scene.stored.get(("orders", 1), [])]


def test_many_are_sent_in_order_each_once_and_what_a_busy_broker_turns_away_again() -> None:
    scene = TargetScene({"orders": (4, 6)}, fault=lambda number: BUSY if number in (5, 300, 301) else 0)
    sent: list[str] = []
    with beside(scene) as broker:
        refused = broker.send(
            [timer(number) for number in range(COUNT)], lambda send: sent.append(send.key), soon()
        )
    wanted = [f"K{number}" for number in range(COUNT)]
    assert not refused
    assert sorted(sent) == sorted(wanted) == sorted(keys_in(scene))
    turned_away = {"K4", "K299", "K300"}
    assert [key for key in keys_in(scene) if key not in turned_away] == [
        key for key in wanted if key not in turned_away
    ]


def test_what_the_broker_refuses_is_said_by_place() -> None:
    scene = TargetScene(
        {"orders": (4, 6)}, fault=lambda number: ILLEGAL if number == 2 else 0, max_message_bytes=99
    )
    sends = [timer(0), timer(1, "missing"), timer(2), timer(3, body=bytes(100)), timer(4)]
    with beside(scene) as broker:
        refused = broker.send(sends, lambda _: None, soon())
    assert {place: why.split(",")[0] for place, why in refused.items()} == {
        1: "topic missing does not exist at broker target-a",
        2: f"broker target-a ({scene.address}): code 13",
        3: "the message's body has 100 bytes",
    }
    assert keys_in(scene) == ["K0", "K4"]


def test_without_an_answer_it_is_in_doubt_and_the_next_hand_over_connects_again() -> None:
    scene = TargetScene({"orders": (4, 6)}, fault=lambda number: STORED_UNANSWERED if number == 3 else 0)
    sent: list[str] = []
    with beside(scene) as broker:
        with pytest.raises(UnavailableError):
            broker.send([timer(number) for number in range(9)], lambda send: sent.append(send.key), soon())
        assert set(sent) <= {"K0", "K1"}
        assert keys_in(scene) == ["K0", "K1", "K2"]
        assert not broker.send([timer(9)], lambda send: sent.append(send.key), soon())
    assert sent[-1] == "K9"


def test_nothing_is_sent_once_the_time_is_over_or_the_process_stops() -> None:
    scene = TargetScene({"orders": (4, 6)})
    stopped: list[bool] = []
    with beside(scene, is_stopped=lambda: bool(stopped)) as broker:
        with pytest.raises(UnavailableError, match="timed out"):
            broker.send([timer(0)], lambda _: None, time.monotonic() - 1)
        stopped.append(True)
        with pytest.raises(StoppedError):
            broker.send([timer(0)], lambda _: None, soon())
    assert not scene.stored


def test_the_rate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    with beside(TargetScene({"orders": (4, 6)}), rate=200) as broker:
        broker.send([timer(number) for number in range(110)], lambda _: None, soon())
    assert len(slept) == 10  # parts of a twentieth of a second
    assert sum(slept) > 0
