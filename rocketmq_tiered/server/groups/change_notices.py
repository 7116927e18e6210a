"""Notices to consumers that their group has changed, at a bounded rate, however many clients join and leave.

Each member of a group is notified of its last change; of several changes in between once. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from rocketmq_tiered.server.wire.codes import RequestCode
from rocketmq_tiered.server.wire.request import Peer

NOTICES_MAX = 256
"""Sent at once, and every PERIOD_S while more wait."""
PERIOD_S = 0.05


class ChangeNotices:
    """``peers_of``: the connections of a group's members now."""

    def __init__(self, peers_of: Callable[[str], Sequence[Peer]]) -> None:
        self._peers_of = peers_of
        self._left, self._period = NOTICES_MAX, float("-inf")
        self._changed: dict[str, None] = {}
        self._group, self._peers = "", list[Peer]()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, group: str) -> None:
        """``group`` has changed."""
        self._changed[group] = None
        if self._timer is None:
            self._send()

    def _send(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        if now_s - self._period >= PERIOD_S:
            self._left, self._period = NOTICES_MAX, now_s
        while self._left and (self._peers or self._changed):
            if not self._peers:
                self._group = next(iter(self._changed))
                del self._changed[self._group]
                self._peers = list(self._peers_of(self._group))
            count = min(self._left, len(self._peers))
            self._left -= max(1, count)
            for peer in self._peers[:count]:
                peer.push(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": self._group})
            del self._peers[:count]
        if self._peers or self._changed:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._send)
