"""Proxy mode between clients and a scripted broker with name servers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fetcher.policy.read_policy import ReadPolicies
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers
from rocketmq_tiered.server.proxy.proxy_service import ProxyConfig, ProxyService
from rocketmq_tiered.server.proxy.timer_gateway import GatewayConfig
from rocketmq_tiered.server.wire.connection import Connection
from rocketmq_tiered.server.wire.listener import Listener, ServerOptions
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tests.server.proxy.proxy_client import ADVERTISED, ROUTE, Client
from tiered.remoting.command import RemotingCommand
from tiered.settings.sections import ServeSettings

BROKER_VERSION = 479


@dataclass
class Peer:
    """A broker or name server: answers by ``answers``, records what came and by which connection."""

    answers: dict[int, Response] = field(default_factory=dict)
    seen: list[RemotingCommand] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    waits: frozenset[int] = frozenset()
    server: Listener | None = None
    port: int = 0

    def find(self, code: int) -> Callable[[Request], Awaitable[Response | None]]:
        return self.handle

    async def handle(self, request: Request) -> Response | None:
        self.seen.append(request.command)
        assert isinstance(request.peer, Connection)
        if request.peer not in self.connections:
            self.connections.append(request.peer)
        if request.code in self.waits:
            await self.gate.wait()
        known = self.answers.get(request.code)
        return known or Response(0, {"code": str(request.code)}, (request.command.body,), "said so")

    def codes(self) -> list[int]:
        """Without the proxy's own watch of its name servers."""
        return [command.code for command in self.seen if command.code != 106]

    async def start(self) -> str:
        table = HandlerTable()
        table.find = self.find  # type: ignore[method-assign]
        self.server = Listener(table, ServerOptions(port=self.port, version=BROKER_VERSION))
        _, self.port = await self.server.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.close(drain_s=0)
        await asyncio.sleep(0.02)


@dataclass
class Scene:
    broker: Peer
    names: list[Peer]
    service: ProxyService
    port: int
    clients: list[Client] = field(default_factory=list)

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client


@asynccontextmanager
async def scene(
    advertise: str = ADVERTISED,
    waits: frozenset[int] = frozenset(),
    name_servers: int = 1,
    handlers: ProxyHandlers | None = None,
    checks_clients: bool = False,
    acl_file: str = "",
    timers: GatewayConfig | None = None,
) -> AsyncIterator[Scene]:
    broker = Peer(waits=waits)
    route = Response(body=(json.dumps(ROUTE).encode(),))
    names = [Peer({105: route}) for _ in range(name_servers)]
    place = ProxyConfig(
        "b",
        await broker.start(),
        [await name.start() for name in names],
        advertise,
        checks_clients=checks_clients,
        timers=timers,
    )
    service = ProxyService(place, ServeSettings(bind="127.0.0.1:0", acl_file=acl_file), ReadPolicies())
    _, port = await service.start()
    if handlers is not None:
        service.open_archive(handlers)
    made = Scene(broker, names, service, port)
    try:
        yield made
    finally:
        for client in made.clients:
            client.writer.close()
        await service.close(drain_s=0)
        for peer in [broker, *names]:
            await peer.stop()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not come true")
