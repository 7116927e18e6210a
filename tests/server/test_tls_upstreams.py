"""Proxy and slave among servers that speak TLS only: what they dial is dialled so, or says why not.

Routes name an address that clients can dial, whatever the port is bound to.
"""

import asyncio
import ipaddress
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fetcher.policy.read_policy import ReadPolicies
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from rocketmq_tiered.server.listen.options import advertised_host, is_wildcard, outgoing_address
from rocketmq_tiered.server.proxy.proxy_service import ProxyConfig, ProxyService
from rocketmq_tiered.server.slave.registration import RegistrationState, SlaveConfig
from rocketmq_tiered.server.slave.slave_service import SlaveOptions, SlaveService
from rocketmq_tiered.server.wire.listener import Listener, ServerOptions
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tests.remoting.tls_peer import Papers, shows, trusting
from tests.server.proxy.proxy_client import ADVERTISED, ROUTE, Client
from tests.server.serving_peer import request
from tests.server.slave.master_double import MasterDouble
from tests.server.slave.name_server_double import BROKER, CLUSTER, NameServerDouble
from tests.server.slave.until import until
from tests.server.small_archive import small_service
from tiered.errors import UsageError
from tiered.remoting.command import RemotingCommand, RequestCode
from tiered.remoting.tls import ClientTls
from tiered.settings.sections import ServeSettings

GET_ROUTE, SEND, QUERY_OFFSET, OWN_ID = 105, 10, 14, 7


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.made(tmp_path_factory.mktemp("papers"))


@asynccontextmanager
async def slave(
    context: ssl.SSLContext, tls: ClientTls | None
) -> AsyncIterator[tuple[SlaveService, NameServerDouble, Client]]:
    """A slave beside a master and a name server that show a certificate, and a plain client of it."""
    master, name_server = MasterDouble(), NameServerDouble()
    master.answers[QUERY_OFFSET] = RemotingCommand(0, 0, ext_fields={"offset": "5"})
    for double in (master, name_server):
        double.tls = context
        await double.start()
    place = SlaveConfig(BROKER, master.address, (name_server.address,), ADVERTISED, OWN_ID, tls)
    service = SlaveService(SlaveOptions(place, CLUSTER, ServeSettings(bind="127.0.0.1:0"), 0.05))
    host, port = await service.start()
    service.open_archive({})
    client = Client(*await asyncio.open_connection(host, port))
    try:
        async with asyncio.timeout(20):
            yield service, name_server, client
    finally:
        client.writer.close()
        await service.close(0.1)
        await name_server.stop()
        await master.stop()
        await asyncio.sleep(0.05)


async def test_a_slave_registers_and_relays_with_tls(papers: Papers) -> None:
    tls = ClientTls(trusting(papers.ca, papers.client))
    async with slave(shows(papers.server, asks=papers.ca), tls) as (service, name_server, client):
        await until(lambda: name_server.addresses.get(OWN_ID) == ADVERTISED)
        answer = await client.ask(QUERY_OFFSET, consumerGroup="g", topic="t", queueId="0")
        assert (answer.code, answer.ext_fields["offset"]) == (0, "5")
        await until(lambda: service.status().name_servers[0][1] == RegistrationState.REGISTERED.value)
        assert service.status().is_master_available


def test_a_slave_without_the_right_ca_says_so_and_stays_out(
    papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(tls: ClientTls | None, words: str) -> None:
        async with slave(shows(papers.server), tls) as (service, name_server, _):
            await until(lambda: any(words in record.__dict__.get("why", "") for record in caplog.records))
            assert OWN_ID not in name_server.addresses and not service.status().is_master_available
            assert words in service.status().master_failure
            caplog.clear()

    with caplog.at_level(logging.INFO):
        asyncio.run(story(ClientTls(trusting(papers.other_ca)), "broker.tls_ca"))
        asyncio.run(story(None, "broker.tls = true"))


class Server:
    """A broker, or a name server, that answers everything over TLS only."""

    def __init__(self, context: ssl.SSLContext, body: bytes = b"") -> None:
        self.seen: list[int] = []
        self._body = body
        table = HandlerTable()
        table.find = lambda code: self._handle  # type: ignore[method-assign]
        self._server = Listener(table, ServerOptions(tls=lambda: context, tls_only=True))

    async def _handle(self, request: Request) -> Response:
        self.seen.append(request.code)
        return Response(body=(self._body,))

    async def start(self) -> str:
        host, port = await self._server.start()
        return f"{host}:{port}"

    async def stop(self) -> None:
        await self._server.close(drain_s=0)


async def answers_of_a_proxy(
    context: ssl.SSLContext, tls: ClientTls | None
) -> tuple[RemotingCommand, RemotingCommand | None, list[int]]:
    """What a plain client hears about a route and about a send (None: it is hung up on), and what the broker saw."""
    names, broker = Server(context, json.dumps(ROUTE).encode()), Server(context)
    place = ProxyConfig("b", await broker.start(), [await names.start()], ADVERTISED, tls)
    service = ProxyService(place, ServeSettings(bind="127.0.0.1:0"), ReadPolicies())
    host, port = await service.start()
    client = Client(*await asyncio.open_connection(host, port))
    try:
        route = await client.ask(GET_ROUTE, topic="t")
        try:
            sent: RemotingCommand | None = await client.ask(SEND, b"body", topic="t")
        except EOFError:
            sent = None
        return route, sent, broker.seen
    finally:
        client.writer.close()
        await service.close(drain_s=0)
        for server in (names, broker):
            await server.stop()
        await asyncio.sleep(0.05)


def test_a_proxy_asks_name_servers_and_broker_with_tls(papers: Papers) -> None:
    tls = ClientTls(trusting(papers.ca, papers.client))
    route, sent, seen = asyncio.run(answers_of_a_proxy(shows(papers.server, asks=papers.ca), tls))
    assert json.loads(route.body)["brokerDatas"][0]["brokerAddrs"] == {
        "0": ADVERTISED,
        "1": "127.0.0.1:10911",
    }
    assert sent is not None and sent.code == 0 and seen == [SEND]


def service_of(**fields: str) -> ArchiveService:
    return small_service(settings=ServeSettings(**fields))  # type: ignore[arg-type]


async def route_address(service: ArchiveService) -> str:
    handler = service.table.find(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    assert handler is not None
    answer = await handler(request(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="t"))
    assert answer is not None
    found: str = json.loads(bytes(answer.body[0]))["brokerDatas"][0]["brokerAddrs"]["0"]
    return found


@pytest.mark.parametrize(
    ("bind", "own", "expected"),
    [
        ("0.0.0.0:0", "10.1.2.3", "10.1.2.3"),
        ("[::]:0", "10.1.2.3", "10.1.2.3"),
        ("127.0.0.1:0", None, "127.0.0.1"),
        ("[::]:0", "fd00::7", "[fd00::7]"),
    ],
)
async def test_routes_never_name_every_address(
    bind: str,
    own: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def known(family: int) -> str | None:
        is_v6 = own is not None and ":" in own
        return own if (family == socket.AF_INET6) is is_v6 else None

    monkeypatch.setattr(advertised_host, "__kwdefaults__", {"setting": "serve.advertise", "own": known})

    with caplog.at_level(logging.WARNING):
        service = service_of(bind=bind)
        address = await service.start()
        assert address == await route_address(service)
        assert address.rpartition(":")[0] == expected
        await service.close(0.0)
    said = [line for line in caplog.records if "serve.advertise is not set" in line.message]
    assert len(said) == (own is not None)


def test_a_port_on_every_address_of_a_machine_without_one_is_refused_before_groups_are_claimed() -> None:
    with pytest.raises(UsageError, match="stands for all addresses") as refused:
        advertised_host("0.0.0.0", own=lambda _: None)
    assert "--advertise" in (refused.value.hint or "")
    assert advertised_host("10.0.0.9", own=lambda _: None) == "10.0.0.9"


@pytest.mark.parametrize("advertise", ["0.0.0.0:9876", "[::]:9876"])
async def test_clients_are_never_sent_the_address_of_every_interface(advertise: str) -> None:
    service = service_of(bind="127.0.0.1:0", advertise=advertise)
    with pytest.raises(UsageError, match="not an address that clients can dial"):
        await service.start()
    assert not service.offsets.is_owner


def test_this_machine_has_an_address_or_none() -> None:
    for family in (socket.AF_INET, socket.AF_INET6):
        found = outgoing_address(family)
        if found is not None:
            address = ipaddress.ip_address(found)
            assert not (address.is_loopback or address.is_unspecified) and not is_wildcard(found)


async def test_port_0_is_advertised_as_the_bound_port() -> None:
    service = service_of(bind="127.0.0.1:0", advertise="127.0.0.1:0")
    address = await service.start()
    assert int(address.rpartition(":")[2]) > 0 and await route_address(service) == address
    await service.close(0.0)
