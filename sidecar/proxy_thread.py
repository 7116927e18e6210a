"""The proxy as a port of `tiered run`: wired, not started. Owns what it is given; serving_thread.py runs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fetcher.access import ArchiveAccess
from server.proxy.proxy_service import ProxyConfig, ProxyService
from sidecar.serving_thread import Answers, Port
from tiered.settings.sections import Settings


@dataclass(frozen=True)
class ProxyOrder:
    """What to serve. ``answers``: made on the event loop when the archive is open."""

    place: ProxyConfig
    answers: Callable[[ArchiveAccess, ProxyService], Awaitable[Answers]]


def proxy_port(order: ProxyOrder, settings: Settings) -> tuple[ProxyService, Port]:
    """The proxy and its port."""
    service = ProxyService(order.place, settings.serve, settings.read)

    async def answers(access: ArchiveAccess) -> Answers:
        return await order.answers(access, service)

    return service, Port(service, settings.serve.bind, "serve.bind", answers)
