"""The broker's state of a queue for requests that read no messages: statistics, searches, redirects."""

from __future__ import annotations

from dataclasses import dataclass

from fetcher.policy.read_policy import LocalView, Residency
from rocketmq_tiered.server.proxy.broker_view import BrokerViews
from rocketmq_tiered.server.proxy.proxy_handlers import Upstream
from tiered.remoting.command import RemotingCommand


@dataclass(frozen=True)
class QueueState:
    """The broker's side of the queue that ``command`` names; see read_router.BrokerSource."""

    views: BrokerViews
    command: RemotingCommand
    upstream: Upstream
    offset: int

    async def local_view(self) -> LocalView:
        """See BrokerSource."""
        return await self.views.local_view(self.command, self.upstream, self.offset)

    async def residency(self) -> Residency:
        return Residency.NOT_CHECKED
