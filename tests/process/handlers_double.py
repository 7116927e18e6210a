"""Test double of serving.MergedHandlers."""

from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers
from tiered.settings.sections import (
    Settings,
)


class FakeHandlers:
    """See serving.MergedHandlers."""

    def __init__(self) -> None:
        self.handlers: ProxyHandlers = {}
        self.key = b""
        self.applied: list[Settings] = []
        self.commits = 0
        self.is_closed = False

    def apply(self, settings: Settings) -> None:
        self.applied.append(settings)

    def committed(self) -> None:
        self.commits += 1

    def close(self) -> None:
        self.is_closed = True
