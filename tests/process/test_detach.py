"""Retiring a broker step by step: what it waits for, what it refuses, and that it continues where it stopped."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rocketmq_tiered.process.broker_control import GroupOffsets, Leftover
from rocketmq_tiered.process.detach import Detachment, LeftError, Step, Waits
from tiered.errors import UnavailableError


@dataclass
class BrokerDouble:
    """``growth``: messages for each look at the end of a queue."""

    perm: int = 6
    left: list[list[Leftover]] = field(default_factory=list)
    growth: int = 0
    end: int = 1000
    unacknowledged: list[int] = field(default_factory=list)
    set_to: list[int] = field(default_factory=list)

    def permission(self) -> int:
        return self.perm

    def set_permission(self, permission: int) -> None:
        self.perm = permission
        self.set_to.append(permission)

    def produced(self) -> dict[tuple[str, int], int]:
        self.end += self.growth
        return {("t", 0): self.end}

    def popped(self) -> list[Leftover]:
        assert self.perm == 0, "while consumers pop it never ends"
        return [Leftover("popped messages", self.unacknowledged.pop())] if self.unacknowledged else []

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


def test_what_is_popped_is_waited_for_once_consumers_do_not_pop() -> None:
    broker = BrokerDouble(unacknowledged=[1, 2, 2])
    found, said, _ = detachment(broker)
    found.close(force=False)
    assert broker.set_to == [4, 0] and Step("popped", "waits for 2 popped messages") in said


def test_what_consumers_gave_back_is_popped_again_before_the_broker_is_closed() -> None:
    again = [Leftover("messages to be popped again", 1)]
    broker = BrokerDouble(left=[[], again, again, []])
    found, _, _ = detachment(broker)
    found.close(force=False)
    assert broker.set_to == [4, 0, 4, 0]


def test_a_broker_that_takes_messages_is_not_closed() -> None:
    broker = BrokerDouble(growth=10)
    with pytest.raises(UnavailableError, match="producers still send to it"):
        detachment(broker, wait_s=20)[0].close(force=False)
    assert broker.perm == 4
    found, _, _ = detachment(broker)
    found.undo()
    assert broker.perm == 6
