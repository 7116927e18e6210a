"""Real connections on 127.0.0.1: both header types, hostile bytes, PROXY headers, slow readers, many requests.

Clients that open many connections, or never finish opening one: others are served, and the log stays short.
"""

import asyncio
import ipaddress
import logging
import socket
import ssl
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocketmq_tiered.server.security.addresses import host_of
from rocketmq_tiered.server.wire import counted_log
from rocketmq_tiered.server.wire import listener as server_module
from rocketmq_tiered.server.wire.connection import TURN_REQUESTS, FrameReader
from rocketmq_tiered.server.wire.connection_limits import ConnectionLimits
from rocketmq_tiered.server.wire.connection_preamble import PROXY_V2
from rocketmq_tiered.server.wire.counted_log import CountedLog
from rocketmq_tiered.server.wire.listener import Listener, ServerOptions
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tests.server.connection_scene import (
    BROKEN,
    BUSY,
    ECHO,
    INSTANT,
    LARGE,
    LARGE_BYTES,
    LOOPBACK,
    SILENT,
    SLOW,
    WHO,
    Client,
    Scene,
    handlers,
    scene,
)
from tests.servers.certificates import Authority
from tests.sweeps import examples
from tiered.clock import Clock
from tiered.remoting.command import RemotingCommand, RequestCode, SerializeType, encode
from tiered.settings.sections import ServeSettings


@pytest.mark.parametrize("kind", list(SerializeType))
async def test_answers_come_in_the_header_type_of_the_request(kind: SerializeType) -> None:
    async with scene() as made:
        client = await made.client()
        asked = RemotingCommand(ECHO, 77, ext_fields={"ä": "1"}, body=b"hello world", serialize_type=kind)
        answer = await client.ask(asked)
        assert (answer.code, answer.opaque, answer.flag & 1, answer.serialize_type) == (0, 77, 1, kind)
        assert (answer.ext_fields, answer.body, answer.version) == ({"ä": "1"}, b"hello world", 409)


async def test_a_client_with_many_requests_leaves_others_their_turn() -> None:
    order: list[int] = []
    table = HandlerTable()

    def at_once(request: Request) -> Response:
        order.append(request.peer.id)
        return Response()

    @table.register(ECHO, at_once=at_once)
    async def never(request: Request) -> Response:
        raise AssertionError

    server = Listener(table, ServerOptions())
    _, port = await server.start()
    made = Scene(server, port, asyncio.Event())
    eager, other = await made.client(), await made.client()
    for client in (eager, other):
        await client.ask(RemotingCommand(ECHO, 1))
    order.clear()
    await eager.send(*(RemotingCommand(ECHO, opaque) for opaque in range(100)))
    await other.send(RemotingCommand(ECHO, 1))
    assert [(await eager.receive()).opaque for _ in range(100)] == list(range(100))
    await other.receive()
    (others_id,) = (peer for peer in set(order) if order.count(peer) == 1)
    assert len(order) == 101
    assert order.index(others_id) <= TURN_REQUESTS
    await made.close()


async def test_unknown_codes_and_failures_are_answered_and_the_connection_stays() -> None:
    async with scene() as made:
        client = await made.client()
        assert (await client.ask(RemotingCommand(4711, 1))).code == 3
        damaged = await client.ask(RemotingCommand(BROKEN, 2))
        assert (damaged.code, damaged.remark) == (1, "data/x.so: block 3 fails its CRC32C")
        assert (await client.ask(RemotingCommand(BUSY, 3))).code == 2
        made.gate.set()
        lacking = await client.ask(RemotingCommand(SLOW, 4))
        assert (lacking.code, lacking.remark) == (1, "the request lacks the field n")
        assert (await client.ask(RemotingCommand(ECHO, 5))).opaque == 5


async def test_one_way_requests_get_no_answer() -> None:
    async with scene() as made:
        client = await made.client()
        await client.send(
            RemotingCommand(ECHO, 1, flag=2), RemotingCommand(4711, 2, flag=2), RemotingCommand(SILENT, 3)
        )
        assert (await client.ask(RemotingCommand(ECHO, 9))).opaque == 9


async def test_a_waiting_request_does_not_hold_up_the_next() -> None:
    async with scene() as made:
        client = await made.client()
        await client.send(RemotingCommand(SLOW, 1, ext_fields={"n": "1"}))
        assert (await client.ask(RemotingCommand(ECHO, 2))).opaque == 2
        made.gate.set()
        assert (await client.receive()).opaque == 1


@pytest.mark.parametrize(("bursts", "size"), [(1, 20), (12, 1)])
async def test_requests_above_the_limit_are_not_even_read_whether_they_come_together_or_one_by_one(
    bursts: int, size: int
) -> None:
    async with scene(ServerOptions(limits=ConnectionLimits(requests_max=4))) as made:
        client = await made.client()
        requests = [RemotingCommand(SLOW, n, ext_fields={"n": str(n)}) for n in range(bursts * size)]
        for at in range(0, len(requests), size):
            await client.send(*requests[at : at + size])
            await asyncio.sleep(0.1 / bursts)
        (connection,) = made.server.connections
        assert len(connection.active_requests) == 4
        made.gate.set()
        assert sorted([(await client.receive()).opaque for _ in requests]) == list(range(len(requests)))


async def test_a_client_that_does_not_read_costs_bounded_memory() -> None:
    async with scene(ServerOptions(limits=ConnectionLimits(requests_max=8))) as made:
        client = await made.client()
        await client.send(*(RemotingCommand(LARGE, n) for n in range(200)))
        await asyncio.sleep(0.3)
        (connection,) = made.server.connections
        # Answers wait; the other requests are in the socket.
        assert 1 <= len(connection.active_requests) <= 8
        assert made.server.accounts.unread.total_bytes <= 8 * LARGE_BYTES
        got = [await client.receive() for _ in range(200)]
        assert {len(answer.body) for answer in got} == {LARGE_BYTES}


async def test_a_client_that_does_not_read_gets_no_hints_and_what_is_said_once_behind_its_answers() -> None:
    async with scene() as made:
        client = await made.client()
        await client.send(*(RemotingCommand(LARGE, n) for n in range(16)))
        await asyncio.sleep(0.2)
        (connection,) = made.server.connections
        held_bytes = made.server.accounts.unread.total_bytes
        assert held_bytes
        fields = {"topic": "t", "group": "g"}
        connection.push(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
        assert made.server.accounts.unread.total_bytes == held_bytes
        connection.push(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, fields, b"where")
        assert made.server.accounts.unread.total_bytes > held_bytes
        got = [await client.receive() for _ in range(17)]
        assert sorted(command.opaque for command in got if command.is_response) == list(range(16))
        (reset,) = (command for command in got if not command.is_response)
        assert (reset.code, reset.is_oneway) == (RequestCode.RESET_CONSUMER_CLIENT_OFFSET, True)
        assert (reset.ext_fields, reset.body) == (fields, b"where")
        client.writer.close()
        await asyncio.sleep(0.05)
        # No client is there: nothing happens.
        connection.push(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, fields)


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x7f\xff\xff\xff\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02\x00\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x08\x00\x00\x00\x04{{{{",
        b"\x00\x00\x00\x08\x07\x00\x00\x04abcd",
        b"\x00\x00\x00\x05\x00\xff\xff\xffa",
    ],
)
async def test_what_is_no_protocol_closes_the_connection_and_nothing_else(hostile: bytes) -> None:
    async with scene() as made:
        good, bad = await made.client(), await made.client()
        bad.writer.write(hostile)
        with pytest.raises((EOFError, ConnectionResetError)):
            await bad.receive()
        assert (await good.ask(RemotingCommand(ECHO, 1))).code == 0


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200), st.integers(1, 7))
async def test_any_bytes_end_in_an_answer_or_a_close(noise: bytes, cut: int) -> None:
    frame = encode(RemotingCommand(ECHO, 5, ext_fields={"a": "b"}))
    async with scene() as made:
        bad = await made.client()
        for at in range(0, len(noise), cut * 20):
            bad.writer.write(noise[at : at + cut * 20])
        good = await made.client()
        good.writer.write(frame[:cut])
        await good.writer.drain()
        good.writer.write(frame[cut:])
        assert (await good.receive()).opaque == 5


async def test_a_proxy_header_names_the_real_client() -> None:
    async with scene(ServerOptions(proxy_from=LOOPBACK)) as made:
        one = await made.client()
        one.writer.write(b"PROXY TCP4 10.1.2.3 10.9.9.9 5555 9876\r\n")
        assert (await one.ask(RemotingCommand(WHO, 1))).ext_fields == {"peer": "10.1.2.3:5555"}
        two = await made.client()
        address = bytes([10, 0, 0, 7, 10, 0, 0, 8]) + (6000).to_bytes(2, "big") + (9876).to_bytes(2, "big")
        header = PROXY_V2 + b"\x21\x11" + len(address).to_bytes(2, "big") + address
        for piece in (header[:3], header[3:14], header[14:]):
            two.writer.write(piece)
            await two.writer.drain()
            await asyncio.sleep(0.01)
        assert (await two.ask(RemotingCommand(WHO, 1))).ext_fields == {"peer": "10.0.0.7:6000"}
        mapped = await made.client()
        mapped.writer.write(b"PROXY TCP6 ::ffff:10.1.2.3 ::1 5555 9876\r\n")
        assert (await mapped.ask(RemotingCommand(WHO, 1))).ext_fields == {"peer": "10.1.2.3:5555"}
        # A health check of the load balancer itself, which names addresses all the same.
        own = await made.client()
        own.writer.write(header.replace(b"\x21\x11", b"\x20\x11"))
        assert (await own.ask(RemotingCommand(WHO, 1))).ext_fields["peer"].startswith("127.0.0.1:")
        plain = await made.client()
        assert (await plain.ask(RemotingCommand(WHO, 1))).ext_fields["peer"].startswith("127.0.0.1:")


HEADER_OF_A_LOAD_BALANCER = b"PROXY TCP4 10.1.2.3 10.9.9.9 5555 9876\r\n"


@pytest.mark.parametrize("head", [HEADER_OF_A_LOAD_BALANCER, PROXY_V2 + b"\x20\x00\x00\x00"])
@pytest.mark.parametrize("believed", [(), ("10.0.0.0/8", "::1"), ("127.0.0.2",)])
async def test_a_proxy_header_from_elsewhere_closes_the_connection_and_is_counted(
    head: bytes, believed: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(ServerOptions(proxy_from=ServeSettings(proxy_from=believed).proxy_networks())) as made:
        client = await made.client()
        for _ in range(5):
            forger = await made.client()
            forger.writer.write(head + encode(RemotingCommand(WHO, 1)))
            with suppress(ConnectionError):
                assert await forger.reader.read(1) == b""
        assert made.server.refused_proxy_headers == 5
        assert (await client.ask(RemotingCommand(WHO, 1))).ext_fields["peer"].startswith("127.0.0.1:")
    text = "PROXY header from 127.0.0.1, which is not in serve.proxy_from: connection closed"
    counts = [getattr(record, "count", 1) for record in caplog.records if record.message == text]
    assert counts == [1, 4], "a flood does not fill the disk"


@pytest.mark.parametrize(
    "head", [b"PROXY", PROXY_V2 + b"\x21", b"PROXY TCP4 10.1.2.3 10.9", b"PROXY \r\n" + bytes(99)]
)
async def test_a_proxy_header_that_does_not_end_keeps_no_connection(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "OPENING_S", 0.3)

    async with scene(ServerOptions(proxy_from=LOOPBACK)) as made:
        slow = await made.client()
        slow.writer.write(head)
        with suppress(ConnectionError):
            for _ in range(20):  # a byte from time to time does not make it better
                await asyncio.sleep(0.05)
                slow.writer.write(b"0")
            async with asyncio.timeout(2):
                assert await slow.reader.read(1) == b""


def test_a_client_that_sends_without_a_pause_is_not_late() -> None:
    """Producers beside a live broker: what was received never ends where a frame does."""
    frame = encode(RemotingCommand(ECHO, 5, ext_fields={"a": "b"}, body=bytes(500)))
    incoming = FrameReader(1 << 20)
    for now_s in range(100):
        incoming.push(frame[-10:] + frame[:-10] if now_s else frame[:-10])
        has_popped = incoming.pop() is not None
        assert incoming.pop() is None
        incoming.partial_bytes(float(now_s), is_paused=False, has_popped=has_popped)
        assert not incoming.is_late(now_s + 1.0, 30.0)
    assert incoming.is_late(99.0 + 31.0, 30.0)


async def test_connections_above_the_limit_are_refused() -> None:
    async with scene(replace(ServerOptions(), connections_max=2)) as made:
        clients = [await made.client() for _ in range(2)]
        for client in clients:
            assert (await client.ask(RemotingCommand(ECHO, 1))).code == 0
        third = await made.client()
        with pytest.raises((EOFError, ConnectionResetError)):
            await third.ask(RemotingCommand(ECHO, 1))


@pytest.mark.parametrize(
    ("bind", "dialled", "host"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("::1", "::1", "::1"),
        ("::", "127.0.0.1", "127.0.0.1"),
        ("::", "::1", "::1"),
    ],
)
async def test_a_client_has_the_address_that_rules_know_it_by(bind: str, dialled: str, host: str) -> None:
    """A port of both families sees clients of IPv4 as ::ffff:127.0.0.1."""

    server = Listener(handlers(asyncio.Event()), ServerOptions(host=bind))
    try:
        _, port = await server.start()
    except OSError:
        pytest.skip("no IPv6 here")
    client = Client(*await asyncio.open_connection(dialled, port))
    seen = (await client.ask(RemotingCommand(WHO, 1))).ext_fields["peer"]
    assert host_of(seen) == host and seen.rpartition(":")[2].isdecimal()
    assert ipaddress.ip_address(host_of(seen)) == ipaddress.ip_address(dialled)
    client.writer.close()
    await server.close(drain_s=0)


async def test_a_client_that_is_gone_when_its_answers_are_read_is_ended_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        async with scene() as made:
            with socket.create_connection(("127.0.0.1", made.port)) as client:
                client.sendall(b"".join(encode(RemotingCommand(INSTANT, n)) for n in range(200)))
                await asyncio.sleep(0.2)
                assert made.server.accounts.unread.total_bytes
                # All the kernel has: then what waits can be sent, and what comes behind it meets a closed socket.
                client.setblocking(False)
                with suppress(BlockingIOError):
                    while client.recv(1 << 20):
                        pass
            await asyncio.sleep(0.2)
            assert not made.server.connections
    assert caplog.messages == []


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


async def test_one_address_does_not_take_the_connections_of_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
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
    refusals = [record for record in caplog.records if "serve.connections_per_address_max" in record.message]
    assert [getattr(record, "count", 1) for record in refusals] == [1, 49], "one line, then their number"
    assert len(caplog.messages) < 10


async def test_clients_behind_a_load_balancer_are_counted_by_their_own_address() -> None:
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


@pytest.mark.parametrize(
    ("is_tls", "sent"),
    [(False, b""), (True, b""), (True, b"\x16"), (True, b"\x16\x03\x01\x02\x00")],
)
async def test_a_connection_that_does_not_open_is_closed_in_one_time_with_and_without_tls(
    tmp_path: Path, is_tls: bool, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TLS greeting that stops counts as one that never came."""
    monkeypatch.setattr(server_module, "OPENING_S", 0.3)
    context = None
    if is_tls:
        files = Authority(tmp_path).signed("server")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)

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


async def test_what_clients_break_is_logged_once_an_interval_with_its_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        server = Listener(handlers(asyncio.Event()), ServerOptions())
        _, port = await server.start()
        for number in range(200):
            client = await connected(port, "127.0.0.1")
            client.writer.write(encode(RemotingCommand(ECHO, 1))[:-1] + b"x" if number % 2 else b"\x7f" * 8)
            client.writer.close()
        await asyncio.sleep(0.3)
        await server.close(drain_s=0)
    assert 0 < len(caplog.messages) <= 8


def test_counts_are_written_at_the_end_of_each_interval(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = CountedLog(logging.getLogger("test"), Clock(monotonic_s=lambda: now_s))
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
