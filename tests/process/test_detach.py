"""Retiring a broker step by step: what it waits for, what it refuses, and that it continues where it stopped."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rocketmq_tiered.process.broker_control import GroupOffsets, Leftover
from rocketmq_tiered.process.detach import Detachment, LeftError, Step, Waits
from tiered.errors import UnavailableError


@dataclass
class BrokerDouble:
    """``log_growth``: bytes for each look at its end."""

    perm: int = 6
    left: list[list[Leftover]] = field(default_factory=list)
    log_growth: int = 0
    end: int = 1000
    set_to: list[int] = field(default_factory=list)

    def permission(self) -> int:
        return self.perm

    def set_permission(self, permission: int) -> None:
        self.perm = permission
        self.set_to.append(permission)

    def log_end(self) -> int:
        self.end += self.log_growth
        return self.end

    def group_offsets(self) -> GroupOffsets:
        return {"t@g": {0: 5}}

    def leftovers(self) -> list[Leftover]:
        return self.left.pop(0) if len(self.left) > 1 else (self.left[0] if self.left else [])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def detachment(broker: BrokerDouble, wait_s: float = 600) -> tuple[Detachment, list[Step], Clock]:
    said: list[Step] = []
    clock = Clock()
    found = Detachment(broker, Waits(wait_s), said.append, lambda: clock.now_s, clock.sleep)  # type: ignore[arg-type]
    return found, said, clock


def test_it_closes_a_quiet_broker_in_order() -> None:
    broker = BrokerDouble()
    found, said, clock = detachment(broker)
    found.close(force=False)
    assert broker.set_to == [4, 0]
    assert [step.name for step in said] == ["read-only", "routes", "log", "left", "closed", "commits"]
    assert clock.now_s >= 30 + 10 + 10


def test_it_continues_after_each_permission() -> None:
    broker = BrokerDouble(perm=4)
    detachment(broker)[0].close(force=False)
    assert broker.set_to == [0]
    again, said, clock = detachment(broker)
    again.close(force=False)
    assert broker.set_to == [0] and said[0] == Step("read-only", "done before") and clock.now_s < 15


def test_it_waits_for_what_is_left_and_names_it() -> None:
    left = [Leftover("delayed messages", 2)]
    broker = BrokerDouble(left=[left, left, []])
    found, said, _ = detachment(broker)
    found.close(force=False)
    assert Step("left", "waits for 2 delayed messages") in said and broker.perm == 0
    broker = BrokerDouble(left=[[Leftover("timers", 3)]])
    with pytest.raises(LeftError, match="still holds 3 timers"):
        detachment(broker, wait_s=5)[0].close(force=False)
    assert broker.perm == 4
    detachment(broker, wait_s=5)[0].close(force=True)
    assert broker.perm == 0


def test_a_log_that_grows_is_not_closed() -> None:
    broker = BrokerDouble(log_growth=10)
    with pytest.raises(UnavailableError, match="log still grows"):
        detachment(broker, wait_s=20)[0].close(force=False)
    assert broker.perm == 4
    found, _, _ = detachment(broker)
    found.undo()
    assert broker.perm == 6
