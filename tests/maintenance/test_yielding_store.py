"""A store whose user yields: its share of requests and bytes, pauses, and the stop."""

from __future__ import annotations

import pytest

from rocketmq_tiered.maintenance.throttle import YieldingStore
from tiered.archive.task import StoppedError
from tiered.object_store.memory import MemoryStore

MIB = 1 << 20


class Clock:
    """Time passes only in sleeps; ``share`` and ``stop`` change at times of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.shares: dict[float, float] = {0: 1.0}
        self.stop_s = float("inf")
        self.memory = MemoryStore()
        self.memory.put_if_absent("a", [bytes(MIB)])
        self.store = YieldingStore(
            self.memory,
            bytes_per_s=MIB,
            requests_per_s=10,
            share=self.share,
            is_stopped=lambda: self.now_s >= self.stop_s,
            clock_s=lambda: self.now_s,
            sleep=self.sleep,
        )

    def share(self) -> float:
        return self.shares[max(at for at in self.shares if at <= self.now_s)]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_bytes_and_requests_take_their_time() -> None:
    clock = Clock()
    for _ in range(4):
        clock.store.get_range("a", 0, MIB)
    assert clock.now_s == pytest.approx(3, abs=0.02), "a request waits for those before it"
    clock.now_s += 100
    began_s = clock.now_s
    for _ in range(31):
        clock.store.get_range("a", 0, 1)
    assert clock.now_s - began_s == pytest.approx(2, abs=0.1), "a second is saved up at most"
    clock.store.compose_if_absent("b", [bytes(MIB // 2)])
    clock.store.put_if_absent("c", [bytes(1)])
    assert clock.now_s - began_s == pytest.approx(2.6, abs=0.1)


def test_a_share_slows_down_and_none_waits() -> None:
    clock = Clock()
    clock.shares = {0: 0.25, 10: 0.0, 20: 1.0}
    for _ in range(3):
        clock.store.get_range("a", 0, MIB)
    assert clock.now_s == pytest.approx(8, abs=0.3)
    clock.store.get_range("a", 0, MIB)
    assert clock.now_s == pytest.approx(20.5, abs=0.3), "it owes what was not paid before the pause"


def test_a_stop_ends_a_pause() -> None:
    clock = Clock()
    clock.shares, clock.stop_s = {0: 0.0}, 7.0
    with pytest.raises(StoppedError):
        clock.store.get_range("a", 0, 1)
    assert clock.now_s == pytest.approx(7, abs=0.3)
