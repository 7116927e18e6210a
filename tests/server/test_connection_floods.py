"""Clients that open many connections, or never finish opening one: others are served, and the log stays short."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from rocketmq_tiered.server.wire import counted_log
from rocketmq_tiered.server.wire import listener as server_module
from rocketmq_tiered.server.wire.counted_log import CountedLog
from rocketmq_tiered.server.wire.listener import Listener, ServerOptions
from tests.server.connection_scene import ECHO, LOOPBACK, Client, handlers
from tests.servers.certificates import Authority
from tiered.remoting.command import RemotingCommand, encode


async def is_closed(client: Client, within_s: float) -> bool:
    with suppress(ConnectionError):
        try:
            async with asyncio.timeout(within_s):
                return await client.reader.read(1) == b""
        except TimeoutError:
            return False
    return True


async def connected(port: int, source: str) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0)))


def test_one_address_does_not_take_the_connections_of_all(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        server = Listener(handlers(asyncio.Event()), ServerOptions(connections_max=40, address_max=10))
        _, port = await server.start()
        flood = [await connected(port, "127.0.0.2") for _ in range(60)]
        await asyncio.sleep(0.2)
        owner = await connected(port, "127.0.0.3")
        assert (await owner.ask(RemotingCommand(ECHO, 1))).code == 0
        for client in flood:
            client.writer.close()
        await asyncio.sleep(0.2)
        again = await connected(port, "127.0.0.2")
        assert (await again.ask(RemotingCommand(ECHO, 1))).code == 0, "what is closed is not counted"
        for client in (owner, again):
            client.writer.close()
        await server.close(drain_s=0)
        await asyncio.sleep(0.05)
        assert not server._by_address

    with caplog.at_level(logging.INFO):
        asyncio.run(story())
    refusals = [record for record in caplog.records if "serve.connections_per_address_max" in record.message]
    assert [getattr(record, "count", 1) for record in refusals] == [1, 49], "one line, then their number"
    assert len(caplog.messages) < 10


def test_clients_behind_a_load_balancer_are_counted_by_their_own_address() -> None:
    async def story() -> None:
        server = Listener(
            handlers(asyncio.Event()), ServerOptions(proxy_from=LOOPBACK, connections_max=100, address_max=2)
        )
        _, port = await server.start()
        answered, clients = 0, [await connected(port, "127.0.0.1") for _ in range(20)]
        for number, client in enumerate(clients):
            source = "10.0.0.1" if number < 15 else f"10.0.0.{number}"
            client.writer.write(f"PROXY TCP4 {source} 10.9.9.9 5 6\r\n".encode())
            with suppress(EOFError, ConnectionError):
                answered += (await client.ask(RemotingCommand(ECHO, 1))).code == 0
        assert answered == 2 + 5
        for client in clients:
            client.writer.close()
        await server.close(drain_s=0)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("is_tls", "sent"),
    [(False, b""), (True, b""), (True, b"\x16"), (True, b"\x16\x03\x01\x02\x00")],
)
def test_a_connection_that_does_not_open_is_closed_in_one_time_with_and_without_tls(
    tmp_path: Path, is_tls: bool, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TLS greeting that stops counts as one that never came."""
    monkeypatch.setattr(server_module, "OPENING_S", 0.3)
    context = None
    if is_tls:
        files = Authority(tmp_path).signed("server")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)

    async def story() -> None:
        options = ServerOptions(tls=None if context is None else lambda: context)
        server = Listener(handlers(asyncio.Event()), options)
        _, port = await server.start()
        slow = await connected(port, "127.0.0.1")
        slow.writer.write(sent)
        assert not await is_closed(slow, 0.1)
        assert await is_closed(slow, 2.0)
        await asyncio.sleep(0.05)
        assert not server._by_address and not server._opening
        slow.writer.close()
        await server.close(drain_s=0)

    asyncio.run(story())


def test_what_clients_break_is_logged_once_an_interval_with_its_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        server = Listener(handlers(asyncio.Event()), ServerOptions())
        _, port = await server.start()
        for number in range(200):
            client = await connected(port, "127.0.0.1")
            client.writer.write(encode(RemotingCommand(ECHO, 1))[:-1] + b"x" if number % 2 else b"\x7f" * 8)
            client.writer.close()
        await asyncio.sleep(0.3)
        await server.close(drain_s=0)

    with caplog.at_level(logging.INFO):
        asyncio.run(story())
    assert 0 < len(caplog.messages) <= 8


def test_counts_are_written_at_the_end_of_each_interval(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = CountedLog(logging.getLogger("test"), lambda: now_s)
    with caplog.at_level(logging.INFO):
        for number in range(5):
            log.note(logging.INFO, f"idle for {number} s", f"10.0.0.{number}:1")
        log.tick()
        assert caplog.messages == ["idle for 0 s"]
        now_s = counted_log.INTERVAL_S
        log.tick()
        assert caplog.messages == ["idle for 0 s", "idle for 4 s"]
        assert (caplog.records[-1].count, caplog.records[-1].client) == (4, "10.0.0.4:1")  # type: ignore[attr-defined]
        now_s *= 2
        log.tick()
        log.close()
        assert len(caplog.messages) == 2 and not log._kinds
        for number in range(1_000):
            log.note(logging.INFO, "text " + "abcdefghij"[number % 10] * (number % 60 + 1), "c")
        assert len(caplog.messages) == 2 + counted_log.KINDS_MAX + 1
        log.close()
        assert sum(getattr(record, "count", 1) for record in caplog.records[2:]) == 1_000
