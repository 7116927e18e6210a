"""What a broker that is retired still holds, of which pops take a part."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rocketmq_tiered.process.broker_control import (
    BrokerControl,
    Leftover,
)
from tiered.remoting.codes import RequestCode
from tiered.remoting.command import RemotingCommand

REVIVE = "rmq_sys_REVIVE_LOG_c"
TOPICS = {
    "t": 2,
    "c": 16,
    "rmq_sys_wheel_timer": 1,
    REVIVE: 8,
    "%RETRY%g": 1,
    "%RETRY%g_t": 1,
    "%RETRY%g+u": 1,
}


@dataclass
class ClientDouble:
    """``ends``: of queue 0 of each topic; ``offsets``: as the broker's table; ``timers``: pending, by topic."""

    ends: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, dict[int, int]] = field(default_factory=dict)
    timers: dict[str, int] = field(default_factory=dict)

    def topics(self) -> dict[str, Any]:
        return {name: {"writeQueueNums": count} for name, count in TOPICS.items()}

    def runtime_info(self) -> dict[str, str]:
        return {"timerCongestNum": str(sum(self.timers.values()))}

    def call(self, code: int, fields: dict[str, str], body: bytes = b"") -> RemotingCommand:
        if code == RequestCode.GET_MAX_OFFSET:
            end = self.ends.get(fields["topic"], 0) if fields["queueId"] == "0" else 0
            return RemotingCommand(0, 0, ext_fields={"offset": str(end)})
        table: dict[str, Any] = {"offsetTable": {}}
        if code == RequestCode.GET_ALL_CONSUMER_OFFSET:
            table = {"offsetTable": self.offsets}
        if code == RequestCode.GET_TIMER_METRICS:
            table = {"timingCount": {name: {"count": count} for name, count in self.timers.items()}}
        return RemotingCommand(0, 0, body=json.dumps(table).encode())


def control(**state: Any) -> BrokerControl:
    return BrokerControl(ClientDouble(**state), "c")  # type: ignore[arg-type]


def test_producers_queues_are_those_of_users() -> None:
    ends = {"t": 7, REVIVE: 9, "%RETRY%g_t": 3, "rmq_sys_wheel_timer": 4}
    assert control(ends=ends).produced() == {("t", 0): 7, ("t", 1): 0}


def test_notes_of_pops_are_no_timers() -> None:
    assert control(timers={REVIVE: 5, "t": 2}).leftovers() == [Leftover("timers", 2)]
    assert control(timers={REVIVE: 5}).leftovers() == []


def test_popped_are_those_whose_time_has_not_passed() -> None:
    assert control(ends={REVIVE: 9}, timers={REVIVE: 2}).popped() == [Leftover("popped messages", 2)]
    assert control(ends={REVIVE: 9}, timers={REVIVE: -1}).popped() == []


def test_what_only_pops_read_is_left_until_it_is_consumed() -> None:
    """A retry topic of a group alone is served by a mount."""
    ends = {"%RETRY%g": 8, "%RETRY%g_t": 3, "%RETRY%g+u": 1}
    found = control(ends=ends, offsets={"t@g": {0: 1}, "%RETRY%g_t@g": {0: 2}}).leftovers()
    assert found == [Leftover("messages to be popped again", 2)]
    assert control(ends=ends, offsets={"%RETRY%g_t@g": {0: 3}, "%RETRY%g+u@g": {0: 1}}).leftovers() == []
