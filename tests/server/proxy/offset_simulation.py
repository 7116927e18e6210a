"""A broker, its uploader, an archive and one consumer between them, in one thread: everything else happens while
the consumer waits.

Real are the proxy's pulls, the read policy and the cached state of the broker. Played are the broker, its files, the
catalog, which is known late, and time. Owns the consumer and what it checks; tests say which schedules it lives
through.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fetcher.policy.read_policy import ReadPolicies, ReadPolicy
from fetcher.policy.read_router import ReadRouter
from rocketmq_tiered.server.backend.pull_handlers import SUSPEND, PullLimits
from rocketmq_tiered.server.groups.client_table import Subscription
from rocketmq_tiered.server.proxy.broker_view import BrokerViews
from rocketmq_tiered.server.proxy.proxy_pull import ProxyPulls, PullContext
from tests.end_to_end.offloading import FILTER
from tests.server.proxy.simulated_broker import World
from tests.server.proxy.simulated_sides import Inline, PlayedArchive, PlayedBroker, PlayedFiles
from tests.server.serving_peer import request
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.remoting.command import RequestCode as R

COUNT = 6


class SkippedError(AssertionError):
    """The consumer was moved past a message that archive or broker has, or will have."""


@dataclass
class Simulation:
    """One consumer, from ``start`` on."""

    world: World
    policy: str
    with_files: bool
    is_filtered: bool
    start: int = 0
    got: list[int] = field(default_factory=list)
    pulls: int = 0

    def __post_init__(self) -> None:
        world = self.world
        expression = "a" if self.is_filtered else "*"
        self._line = ReadRouter(world, ReadPolicies(ReadPolicy(self.policy)), FILTER)  # type: ignore[arg-type]
        views = BrokerViews(
            PlayedFiles(world) if self.with_files else None,  # type: ignore[arg-type]
            executor=Inline(),
            clock=Clock(monotonic_s=lambda: world.time_s),
        )
        archive = PlayedArchive(world, is_filtered=self.is_filtered)
        context = PullContext(
            archive,  # type: ignore[arg-type]
            views,
            Known(Subscription("t", expression)),
            clock=Clock(monotonic_s=lambda: world.time_s),
        )
        self._broker = PlayedBroker(world, is_filtered=self.is_filtered)
        self._pulls = ProxyPulls(self._line, context, PullLimits(hold_s_max=3.0))
        self.offset = self.start

    async def pull(self) -> None:
        """One pull of the consumer, checked."""
        world, offset = self.world, self.offset
        ext = {
            "topic": "t",
            "queueId": 0,
            "queueOffset": offset,
            "consumerGroup": "g",
            "maxMsgNums": COUNT,
            "sysFlag": SUSPEND,
            "suspendTimeoutMillis": 2000,
            "commitOffset": 0,
            "subVersion": 0,
        }
        self.pulls += 1
        try:
            response = await self._pulls.pull(request(R.PULL_MESSAGE, **ext), self._broker)  # type: ignore[arg-type]
        except UnavailableError:
            return
        if response.code not in (0, 19, 20, 21):
            return
        next_offset = int(response.ext["nextBeginOffset"])
        found = _offsets(response.body)
        if found and response.code == 0:
            assert found[0] >= offset and found == sorted(set(found)), (offset, found)
        if next_offset < offset:
            raise SkippedError(f"moved back from {offset} to {next_offset} ({response.code})")
        for number in range(offset, min(next_offset, len(world.rows))):
            wanted = not self.is_filtered or world.rows[number].is_tagged
            if wanted and number not in found and world.is_to_come(number):
                raise SkippedError(
                    f"{number} of [{offset}, {next_offset}): {response.code} {response.remark}"
                )
        if next_offset > len(world.rows):
            raise SkippedError(f"{next_offset} is behind the end")
        self.got += found
        self.offset = next_offset

    async def run(self, pulls: int) -> None:
        """Some pulls while things happen; then nothing happens any more, and the consumer comes to the end."""
        for _ in range(pulls):
            self.world.tick()
            await self.pull()
        world = self.world
        world.is_broker_away = world.is_store_away = False
        world.is_quiet = True
        world.queue_low = world.true_low()
        world.offload(is_all=True)
        world.known = len(world.versions) - 1
        for _ in range(40 + len(world.rows)):
            world.time_s += 1.1
            await self.pull()
            if self.offset == len(world.rows):
                return
        raise SkippedError(f"stands at {self.offset} of {len(world.rows)}")


@dataclass
class Known:
    """See pull.Subscriptions."""

    known: Subscription

    def subscription(self, group: str, topic: str, connection_id: int) -> Subscription:
        return self.known


def _offsets(body: Sequence[Any]) -> list[int]:
    data, found = b"".join(bytes(piece) for piece in body), []
    while data:
        size = int.from_bytes(data[:4], "big")
        found.append(int.from_bytes(data[20:28], "big"))
        data = data[size:]
    return found
