"""Timers of a Java producer through the gateway topic of a live broker, and what its target topic has of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.integration.live import Sidecar
from tests.servers.rocketmq import RocketMq
from tiered.remoting.client import BrokerClient

GATEWAY = "TIERED_TIMERS"
TARGET = "live0"
QUEUES = 4
OFFSET_MAX = 30


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
