"""Timers of a Java producer through the gateway topic of a live broker, what its target topic has of them, and the
broker's own timers of the same times."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.live import Sidecar
from tests.servers.rocketmq import RocketMq
from tiered.remoting.client import BrokerClient

GATEWAY = "TIERED_TIMERS"
TARGET = "live0"
OWN_TARGET = "live1"
QUEUES = 4
OWN_BEFORE_S = 10
"""The broker's own timers are sent so long before: within its limit."""
SEND_V2, OFFSET_MAX = 310, 30


@dataclass(frozen=True)
class Wave:
    """``count`` timers, delivered evenly within ``spread_ms``, from ``in_ms`` on."""

    count: int
    in_ms: int
    spread_ms: int


def started(sidecar: Sidecar, directory: Path, wave: Wave) -> dict[str, str]:
    """`tiered run` follows, and the timers are sent: see ``sent_timers``."""
    sidecar.broker.create_topic(GATEWAY, QUEUES)
    sidecar.start()
    sidecar.wait_until_following(60)
    return sent_timers(sidecar.broker, directory / "sent", wave)


def sent_timers(broker: RocketMq, output: Path, wave: Wave) -> dict[str, str]:
    """Unique key -> time of delivery."""
    first_ms = int(time.time() * 1000) + wave.in_ms
    arguments = GATEWAY, TARGET, str(wave.count), str(first_ms), str(wave.spread_ms), str(output)
    broker.run_java("Timers", broker.name_server_address, *arguments)
    sent = dict(line.split() for line in output.read_text().splitlines())
    assert len(sent) == wave.count
    return sent


def delivered(broker: RocketMq, output: Path, count: int, topic: str = TARGET) -> list[list[str]]:
    """What a consumer of the target topic gets, once ``count`` came, or for three minutes."""
    deadline_s = time.monotonic() + 180
    while _stored(broker.broker_address, topic) < count and time.monotonic() < deadline_s:
        time.sleep(1)
    time.sleep(2)
    broker.run_java("Consume", broker.name_server_address, "pull", "G", topic, "*", "0", "2", str(output))
    return [line.split() for line in output.read_text().splitlines()]


def _stored(address: str, topic: str) -> int:
    client = BrokerClient(address, 10)
    try:
        found = [client.call(OFFSET_MAX, {"topic": topic, "queueId": str(queue)}) for queue in range(QUEUES)]
        return sum(int(answer.ext_fields.get("offset", 0)) for answer in found)
    finally:
        client.close()


def late_ms(rows: list[list[str]], sent: Mapping[str, str]) -> list[int]:
    """How late the broker stored each in its topic, in order."""
    return sorted(int(row[6]) - int(sent[row[4]]) for row in rows)


def quantiles(late: list[int]) -> str:
    """For people."""
    found = [late[int(share * (len(late) - 1))] for share in (0, 0.5, 0.99, 1)] if late else []
    return f"{len(late)}: min, p50, p99, max {found}"


@dataclass
class OwnTimers:
    """Sends a timer of the broker for each of ``sent``, of the same time. ``taken``: key -> that time, of those that
    the broker has taken in time."""

    broker: RocketMq
    sent: Mapping[str, str]
    taken: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client = BrokerClient(self.broker.broker_address, 10)
        for number, (key, at) in enumerate(sorted(self.sent.items(), key=lambda one: int(one[1]))):
            time.sleep(max(0.0, int(at) / 1000 - OWN_BEFORE_S - time.time()))
            properties = {"UNIQ_KEY": f"OWN{key}", "TIMER_DELIVER_MS": at}
            fields = {
                "a": "P_own",
                "b": OWN_TARGET,
                "c": OWN_TARGET,
                "d": "4",
                "e": str(number % QUEUES),
                "f": "0",
                "g": str(int(time.time() * 1000)),
                "h": "0",
                "j": "0",
                "k": "false",
                "m": "false",
                "i": "".join(f"{name}\x01{value}\x02" for name, value in properties.items()),
            }
            if client.call(SEND_V2, fields, b"own timer").code == 0 and time.time() * 1000 < int(at) - 1000:
                self.taken[f"OWN{key}"] = at
        client.close()

    def late_ms(self, output: Path) -> list[int]:
        """How late the broker delivered them."""
        self._thread.join(600)
        rows = delivered(self.broker, output, len(self.taken), OWN_TARGET)
        return late_ms([row for row in rows if row[4] in self.taken], self.taken)
