"""The façade as a port of `tiered run`: wired, not started. Owns what it is given; serving_thread.py runs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fetcher.access import ArchiveAccess
from server.proxy.proxy_service import FacadePlace, FacadeService
from sidecar.serving_thread import Answers, Port
from tiered.settings.sections import Settings


@dataclass(frozen=True)
class FacadeOrder:
    """What to serve. ``answers``: made on the event loop when the archive is open."""

    place: FacadePlace
    answers: Callable[[ArchiveAccess, FacadeService], Awaitable[Answers]]


def facade_port(order: FacadeOrder, settings: Settings) -> tuple[FacadeService, Port]:
    """The façade and its port."""
    service = FacadeService(order.place, settings.serve, settings.read)

    async def answers(access: ArchiveAccess) -> Answers:
        return await order.answers(access, service)

    return service, Port(service, settings.serve.bind, "serve.bind", answers)
