"""Routes name an address that clients can dial, whatever the port is bound to."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import socket

import pytest

from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from rocketmq_tiered.server.listen.options import advertised_host, is_wildcard, outgoing_address
from tests.server.serving_peer import request
from tests.server.small_archive import small_service
from tiered.errors import UsageError
from tiered.remoting.codes import RequestCode
from tiered.settings.sections import ServeSettings


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
def test_routes_never_name_every_address(
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

    async def run() -> None:
        service = service_of(bind=bind)
        address = await service.start()
        assert address == await route_address(service)
        assert address.rpartition(":")[0] == expected
        await service.close(0.0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    said = [line for line in caplog.records if "serve.advertise is not set" in line.message]
    assert len(said) == (own is not None)


def test_a_port_on_every_address_of_a_machine_without_one_is_refused_before_groups_are_claimed() -> None:
    with pytest.raises(UsageError, match="is a wildcard") as refused:
        advertised_host("0.0.0.0", own=lambda _: None)
    assert "--advertise" in (refused.value.hint or "")
    assert advertised_host("10.0.0.9", own=lambda _: None) == "10.0.0.9"


@pytest.mark.parametrize("advertise", ["0.0.0.0:9876", "[::]:9876"])
def test_clients_are_never_sent_the_address_of_every_interface(advertise: str) -> None:
    async def run() -> None:
        service = service_of(bind="127.0.0.1:0", advertise=advertise)
        with pytest.raises(UsageError, match="not an address that clients can dial"):
            await service.start()
        assert not service.offsets.is_owner

    asyncio.run(run())


def test_this_machine_has_an_address_or_none() -> None:
    for family in (socket.AF_INET, socket.AF_INET6):
        found = outgoing_address(family)
        if found is not None:
            address = ipaddress.ip_address(found)
            assert not (address.is_loopback or address.is_unspecified) and not is_wildcard(found)


def test_port_0_is_advertised_as_the_bound_port() -> None:
    async def scene() -> None:
        service = service_of(bind="127.0.0.1:0", advertise="127.0.0.1:0")
        address = await service.start()
        assert int(address.rpartition(":")[2]) > 0 and await route_address(service) == address
        await service.close(0.0)

    asyncio.run(scene())
