"""Hostile clients and a listening server: half frames, giants, garbage, slowloris, readers that do not read, TLS."""

import asyncio
import logging
import random
import resource
import ssl
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.server.listen.options import kept_tls, server_options, tls_context
from rocketmq_tiered.server.wire import listener as server_module
from rocketmq_tiered.server.wire.connection import LARGE_BYTES_MAX
from rocketmq_tiered.server.wire.connection_limits import BufferedBytes, ConnectionLimits
from rocketmq_tiered.server.wire.listener import ServerOptions
from tests.server.connection_scene import ECHO, LARGE, LARGE_BYTES, LOOPBACK, SLOW, WHO, Client, Scene, scene
from tiered.errors import UsageError
from tiered.remoting.command import FRAME_BYTES_MAX, RemotingCommand, encode
from tiered.settings.sections import ServeSettings

FRAME = encode(RemotingCommand(ECHO, 5, ext_fields={"a": "b"}, body=b"x" * 100))
MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def short_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SWEEP_S", 0.05)


async def is_closed(client: Client) -> bool:
    """Whether the server hangs up within 3 s."""
    try:
        async with asyncio.timeout(3):
            return await client.reader.read(1) == b""
    except ConnectionError:
        return True


async def check_closed(made: Scene, bad: Client) -> None:
    """``bad`` is closed, and another client is answered."""
    good = await made.client()
    assert await is_closed(bad)
    assert (await good.ask(RemotingCommand(ECHO, 1))).code == 0
    assert made.server.accounts.partial.total_bytes == 0


async def test_a_half_frame_is_given_some_time_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with scene(ServerOptions(limits=ConnectionLimits(frame_s=0.3))) as made:
        client = await made.client()
        for byte in FRAME[:30]:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        await check_closed(made, client)
    assert "frame incomplete after 0.3 s" in caplog.text


async def test_a_silent_client_is_idle(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with scene(ServerOptions(limits=ConnectionLimits(idle_s=0.2))) as made:
        assert await is_closed(await made.client())
    assert "idle for 0.2 s" in caplog.text


@pytest.mark.parametrize("claim", [70_000, FRAME_BYTES_MAX, (1 << 31) - 1, -1, 3])
async def test_a_length_beyond_the_limit_closes_at_once(claim: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with scene(ServerOptions(limits=ConnectionLimits(frame_bytes_max=65_536))) as made:
        client = await made.client()
        client.writer.write(claim.to_bytes(4, "big", signed=True))
        await check_closed(made, client)
    assert f"the frame's length, {claim}, is not" in caplog.text


async def test_half_frames_of_many_clients_have_one_budget(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async with scene(ServerOptions(limits=ConnectionLimits(partial_bytes_max=8 * MIB))) as made:
        clients = [await made.client() for _ in range(12)]
        for number, client in enumerate(clients):
            client.writer.write((8 * MIB).to_bytes(4, "big") + bytes(MIB))
            await client.writer.drain()
            await asyncio.sleep(0.05 if number < 8 else 0)
        for client in clients[:4]:
            assert await is_closed(client)
        assert made.server.accounts.partial.total_bytes <= 8 * MIB + 12 * 65_536
        good = await made.client()
        assert (await good.ask(RemotingCommand(ECHO, 1))).code == 0
    assert "partial frames of all clients" in caplog.text


async def test_a_client_that_reads_nothing_of_what_waits_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async with scene(ServerOptions(limits=ConnectionLimits(stall_s=0.3))) as made:
        client = await made.client()
        await client.send(*(RemotingCommand(LARGE, n) for n in range(20)))
        for _ in range(100):
            await asyncio.sleep(0.05)
            if not made.server.connections:
                break
        assert not made.server.connections
        assert made.server.accounts.unread.total_bytes == 0
    assert "for 0.3 s" in caplog.text


async def test_unread_answers_of_many_clients_have_one_budget() -> None:
    async with scene(ServerOptions(limits=ConnectionLimits(unread_bytes_max=8 * MIB))) as made:
        clients = [await made.client() for _ in range(40)]
        for client in clients:
            await client.send(*(RemotingCommand(LARGE, n) for n in range(6)))
        await asyncio.sleep(0.3)
        unread = made.server.accounts.unread
        assert unread.total_bytes <= 8 * MIB
        assert unread.peak_bytes <= 8 * MIB + 6 * LARGE_BYTES
        assert 0 < len(made.server.connections) < 40  # the oldest were closed, for memory
        good = await made.client()
        assert (await good.ask(RemotingCommand(ECHO, 1))).code == 0


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never was so")


def slow_request(number: int, body_bytes: int) -> RemotingCommand:
    return RemotingCommand(SLOW, number, ext_fields={"n": str(number)}, body=bytes(body_bytes))


async def test_large_requests_that_wait_for_their_answers_are_few() -> None:
    """As pulls that wait for messages and bring a body that no handler reads."""
    async with scene() as made:
        client = await made.client()
        sending = asyncio.create_task(client.send(*(slow_request(number, MIB) for number in range(40))))
        await until(lambda: made.server.accounts.large.total_bytes >= LARGE_BYTES_MAX)
        await asyncio.sleep(0.2)
        (connection,) = made.server.connections
        assert len(connection.active_requests) == LARGE_BYTES_MAX // MIB
        assert LARGE_BYTES_MAX <= made.server.accounts.large.total_bytes < LARGE_BYTES_MAX + MIB
        made.gate.set()
        await sending
        assert {(await client.receive()).opaque for _ in range(40)} == set(range(40))
        await asyncio.sleep(0.05)
        assert made.server.accounts.large.total_bytes == 0


async def test_large_requests_of_many_clients_have_one_budget_and_small_ones_are_not_in_it() -> None:
    async with scene(ServerOptions(limits=ConnectionLimits(large_bytes_max=8 * MIB))) as made:
        waiting = await made.client()
        await waiting.send(*(slow_request(number, 100) for number in range(200)))
        await asyncio.sleep(0.1)
        assert made.server.accounts.large.total_bytes == 0
        for _ in range(12):
            await (await made.client()).send(slow_request(1, MIB))
        requests = made.server.accounts.large
        await until(lambda: len(made.server.connections) < 13 and requests.total_bytes >= 7 * MIB)
        assert made.server.accounts.large.total_bytes <= 8 * MIB
        assert 1 < len(made.server.connections) < 13
        made.gate.set()
        assert {(await waiting.receive()).opaque for _ in range(200)} == set(range(200))


async def test_a_thousand_connections_that_hold_something(request: pytest.FixtureRequest) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    async with scene() as made:
        clients = await asyncio.gather(*(made.client() for _ in range(1000)))
        for number, client in enumerate(clients):
            if number % 3 == 0:
                client.writer.write(FRAME[: 1 + number % 40])
            elif number % 3 == 1:
                client.writer.write(random.Random(number).randbytes(50))
            else:
                client.writer.write(FRAME)
        answers = [await client.receive() for client in clients[2::3]]
        assert {answer.code for answer in answers} == {0}
        assert made.server.accounts.partial.total_bytes < MIB


# -- pure parts -----------------------------------------------------------------------------------------------


def test_the_client_that_has_held_bytes_for_longest_is_closed_first() -> None:
    closed: list[str] = []
    held: BufferedBytes[str] = BufferedBytes(100, "things", lambda who, why: closed.append(who))
    held.set("a", 40)
    held.set("b", 40)
    held.set("a", 0)
    held.set("a", 30)  # began again: b's are older now
    held.set("c", 50)
    assert closed == ["b"]
    assert held.total_bytes == 80
    held.forget("a")
    assert held.total_bytes == 50
    held.set("d", 101)
    assert closed == ["b", "c", "d"]
    assert held.total_bytes == 0


# -- TLS ------------------------------------------------------------------------------------------------------


def certificate(directory: Path) -> ServeSettings:
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    words += " -keyout key.pem -out cert.pem"
    subprocess.run(["openssl", *words.split()], cwd=directory, check=True, capture_output=True)
    return replace(
        ServeSettings(), tls_certificate=str(directory / "cert.pem"), tls_key=str(directory / "key.pem")
    )


@pytest.mark.parametrize(
    ("shows_one", "is_required"), [(True, True), (False, True), (False, False), (True, False)]
)
async def test_client_certificates(tmp_path: Path, shows_one: bool, is_required: bool) -> None:
    settings = replace(
        certificate(tmp_path), tls_client_ca=str(tmp_path / "cert.pem"), tls_client_required=is_required
    )

    async with scene(ServerOptions(tls=kept_tls(settings), tls_only=is_required)) as made:
        own = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        own.check_hostname = False
        if shows_one:
            own.load_cert_chain(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
        try:
            client = Client(*await asyncio.open_connection("127.0.0.1", made.port, ssl=own))
            body = b"x" * 300_000
            answer = await client.ask(RemotingCommand(ECHO, 1, body=body))
        except (ssl.SSLError, EOFError, ConnectionError):
            assert is_required and not shows_one
        else:
            assert answer.body == body
            assert shows_one or not is_required
            client.writer.close()
        plain = await made.client()
        plain.writer.write(FRAME)
        assert await is_closed(plain) if is_required else (await plain.receive()).opaque == 5


@pytest.mark.parametrize("tls_only", [False, True])
async def test_tls_may_follow_a_proxy_header(tmp_path: Path, tls_only: bool) -> None:
    """A load balancer that hands TCP on unread puts its header before the handshake."""
    settings = certificate(tmp_path)

    async with scene(ServerOptions(tls=kept_tls(settings), tls_only=tls_only, proxy_from=LOOPBACK)) as made:
        own = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        own.check_hostname = False
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(b"PROXY TCP4 10.1.2.3 10.9.9.9 5555 9876\r\n")
        await writer.start_tls(own)
        answer = await Client(reader, writer).ask(RemotingCommand(WHO, 1))
        assert answer.ext_fields == {"peer": "10.1.2.3:5555"}
        writer.close()
        await writer.wait_closed()
        plain = await made.client()
        plain.writer.write(b"PROXY TCP4 10.1.2.4 10.9.9.9 5555 9876\r\n")
        if tls_only:
            plain.writer.write(FRAME)
            assert await is_closed(plain)
        else:
            assert (await plain.ask(RemotingCommand(WHO, 1))).ext_fields == {"peer": "10.1.2.4:5555"}


UNFINISHED = {
    "nothing": b"",
    "a PROXY header alone": b"PROXY TCP4 10.1.2.3 10.9.9.9 5555 9876\r\n",
    "half a PROXY header": b"PROXY TCP4 10.1",
    "half a handshake": b"\x16\x03\x01\x02\x00\x01",
    "half a handshake after a PROXY header": b"PROXY TCP4 10.1.2.3 10.9.9.9 5555 9876\r\n\x16\x03\x01\x02\x00\x01",
}


@pytest.mark.parametrize("opening", UNFINISHED)
async def test_header_handshake_and_first_byte_have_one_limit_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: str
) -> None:
    """A byte at a time does not prolong it."""
    assert server_module.OPENING_S == 10.0
    monkeypatch.setattr(server_module, "OPENING_S", 0.8)

    options = ServerOptions(tls=kept_tls(certificate(tmp_path)), tls_only=True, proxy_from=LOOPBACK)
    async with scene(options) as made:
        begun_s = asyncio.get_running_loop().time()
        client = await made.client()
        for byte in UNFINISHED[opening]:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
        assert await is_closed(client)
        assert 0.7 < asyncio.get_running_loop().time() - begun_s < 3
        assert not made.server.connections


async def test_tls_only_refuses_plain_clients_and_settings_name_what_is_missing(tmp_path: Path) -> None:
    settings = certificate(tmp_path)

    async with scene(ServerOptions(tls=kept_tls(settings), tls_only=True)) as made:
        plain = await made.client()
        plain.writer.write(FRAME)
        assert await is_closed(plain)
    with pytest.raises(UsageError, match=r"serve\.tls_only.*requires serve\.tls_certificate"):
        server_options(replace(ServeSettings(), tls_only=True))
    with pytest.raises(UsageError, match="cannot be loaded"):
        tls_context(replace(settings, tls_key=str(tmp_path / "none.pem")))


async def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = certificate(tmp_path)

    with caplog.at_level(logging.INFO, "tiered.reloaded_files"):
        async with scene(ServerOptions(tls=kept_tls(settings))) as made:

            async def shown() -> bytes:
                own = ssl.create_default_context(cafile=str(tmp_path / "trusted.pem"))
                own.check_hostname = False
                reader, writer = await asyncio.open_connection("127.0.0.1", made.port, ssl=own)
                client = Client(reader, writer)
                assert (await client.ask(RemotingCommand(ECHO, 1))).opaque == 1
                clients.append(client)
                found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                return found

            clients: list[Client] = []
            trusted = tmp_path / "trusted.pem"
            trusted.write_bytes((tmp_path / "cert.pem").read_bytes())
            first = await shown()
            (tmp_path / "cert.pem").write_text("being written")
            assert await shown() == first
            certificate(tmp_path)
            trusted.write_bytes((tmp_path / "cert.pem").read_bytes())
            assert await shown() != first
            for client in clients:
                assert (await client.ask(RemotingCommand(ECHO, 2))).opaque == 2, "who is connected stays so"
                client.writer.close()
    assert [text.split(": ")[0] for text in caplog.messages if "certificate" in text] == [
        "the changed certificates for clients cannot be loaded, so that the old ones stay in use",
        "certificates for clients reloaded",
    ]
