"""The broker's side of a queue for questions that read no messages: statistics, searches, hand-overs.

Owns that view of it. Does not own what the broker says (broker_view.py) nor what follows (read_router.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from fetcher.policy.read_policy import LocalView, Residency
from server.proxy.broker_view import BrokerViews
from server.proxy.proxy_handlers import Upstream
from tiered.remoting.command import RemotingCommand


@dataclass(frozen=True)
class QueueLook:
    """The broker's side of the queue that ``command`` names; see policy_line.BrokerLook."""

    views: BrokerViews
    command: RemotingCommand
    upstream: Upstream
    offset: int
    has_broker: bool = True

    async def look(self) -> LocalView:
        """See BrokerLook."""
        return await self.views.look(self.command, self.upstream, self.offset)

    async def residency(self) -> Residency:
        """See BrokerLook; nobody reads."""
        return Residency.NOT_ASKED
