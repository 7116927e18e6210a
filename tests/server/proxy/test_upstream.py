"""Bounds of what is under way to and from the broker."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_tiered.server.proxy.name_servers import NameServers
from rocketmq_tiered.server.proxy.relay import (
    Failure,
    failure_of,
)
from rocketmq_tiered.server.proxy.upstream import (
    UNTAKEN_BYTES_MAX,
    InflightLimit,
    RemotingUpstream,
    TimedOutError,
)
from rocketmq_tiered.server.wire.listener import Listener, ServerOptions
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tests.remoting.tls_peer import Papers, shows, trusting
from tiered.errors import ThrottledError, UnansweredError
from tiered.remoting.command import RemotingCommand
from tiered.remoting.tls import ClientTls

ANSWER_BYTES = 1 << 20


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=30), st.integers(1, 50))
async def test_the_gate_is_never_overfull_and_every_caller_gets_through(
    requests: list[tuple[int, bool]], limit: int
) -> None:
    """First come, first served; a caller that is cancelled while inside leaves it too."""
    gate = InflightLimit(limit)
    order: list[int] = []

    async def one(number: int, size: int) -> None:
        await gate.enter(size)
        try:
            order.append(number)
            assert gate.used_bytes <= max(limit, size)
            await asyncio.sleep(0)
        finally:
            gate.leave(size)

    tasks = [asyncio.create_task(one(n, size)) for n, (size, _) in enumerate(requests)]
    for task, (_, is_cancelled) in zip(tasks, requests, strict=True):
        await asyncio.sleep(0)
        if is_cancelled:
            task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in done)
    survivors = [n for n, (_, is_cancelled) in enumerate(requests) if not is_cancelled]
    assert [n for n in order if n in survivors] == survivors
    assert gate.used_bytes == 0


async def test_what_has_no_body_passes_a_gate_that_is_full() -> None:
    """Requests for routes and the like pass while large sends wait for a broker that hangs."""

    gate = InflightLimit(100)
    await gate.enter(90)
    waiting = asyncio.create_task(gate.enter(20))
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        await gate.enter(0)
    gate.leave(0)
    assert not waiting.done() and gate.used_bytes == 90
    gate.leave(90)
    await waiting
    assert gate.used_bytes == 20


async def _broker(
    delay_s: float = 0.0, tls: ssl.SSLContext | None = None
) -> tuple[Listener, str, list[RemotingCommand]]:
    seen: list[RemotingCommand] = []

    async def answer(request: Request) -> Response:
        seen.append(request.command)
        await asyncio.sleep(delay_s)
        return Response(body=(bytes(ANSWER_BYTES),))

    table = HandlerTable()
    table.register(11)(answer)
    server = Listener(table, ServerOptions(tls=None if tls is None else lambda: tls))
    _, port = await server.start()
    return server, f"127.0.0.1:{port}", seen


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.made(tmp_path_factory.mktemp("papers"))


@pytest.mark.parametrize("with_tls", [False, True])
async def test_answers_that_no_client_reads_stay_at_the_broker(with_tls: bool, papers: Papers) -> None:
    server, address, _ = await _broker(tls=shows(papers.server) if with_tls else None)
    tls = ClientTls(trusting(papers.ca)) if with_tls else None
    upstream = RemotingUpstream(address, InflightLimit(), tls=tls)
    takes = asyncio.Event()
    arrived: list[int] = []

    async def can_take() -> None:
        arrived.append(1)
        await takes.wait()

    calls = [asyncio.create_task(upstream.relay(RemotingCommand(11, n), 20, can_take)) for n in range(40)]
    await asyncio.sleep(1)
    held = len(arrived) * ANSWER_BYTES
    assert UNTAKEN_BYTES_MAX < held <= UNTAKEN_BYTES_MAX + 2 * ANSWER_BYTES
    takes.set()
    answers = await asyncio.gather(*calls)
    assert [(answer.opaque, len(answer.body)) for answer in answers] == [(n, ANSWER_BYTES) for n in range(40)]
    upstream.close()
    await server.close(drain_s=0)


async def test_a_late_answer_is_dropped_and_the_connection_continues() -> None:
    server, address, seen = await _broker(delay_s=0.3)
    upstream = RemotingUpstream(address, InflightLimit())
    with pytest.raises(TimedOutError):
        await upstream.call(RemotingCommand(11, 1), 0.05)
    answer = await upstream.call(RemotingCommand(11, 1), 5)
    assert answer.opaque == 1 and len(seen) == 2 and seen[0].opaque != seen[1].opaque
    upstream.close()
    await server.close(drain_s=0)


async def test_a_broker_that_reads_nothing_costs_no_more_than_the_time_limit() -> None:
    """A process that was stopped, with a large message on its way to it: requests behind that are not sent."""

    with socket.create_server(("127.0.0.1", 0)) as frozen:
        gate = InflightLimit()
        upstream = RemotingUpstream(f"127.0.0.1:{frozen.getsockname()[1]}", gate)
        with pytest.raises(TimedOutError):
            await upstream.call(RemotingCommand(11, 1, body=bytes(12 << 20)), 0.2)
        for body in (b"", bytes(1000)):
            async with asyncio.timeout(5):
                with pytest.raises(ThrottledError, match="does not read"):
                    await upstream.call(RemotingCommand(11, 2, body=body), 0.2)
        assert gate.used_bytes == 0
        upstream.close()


@contextmanager
def _unreachable() -> Iterator[str]:
    """An address whose host accepts no connection and refuses none, as one that has lost power."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as held:
        for _ in range(8):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


async def test_name_servers_whose_hosts_are_gone_cost_less_than_clients_wait() -> None:
    """Clients hang up after 3 s, and with them what they asked ends: the one that lives would never be asked."""

    server, address, _ = await _broker()
    with _unreachable() as gone, _unreachable() as other:
        servers = NameServers((gone, other, address), InflightLimit())
        async with asyncio.timeout(2.8):
            answer = await servers.ask(RemotingCommand(11, 1))
        assert len(answer.body) == ANSWER_BYTES
        begun_s = time.monotonic()
        await servers.ask(RemotingCommand(11, 2))
        assert time.monotonic() - begun_s < 0.7, "the one that answered comes first"
        servers.close()
    await server.close(drain_s=0)


async def test_a_dns_that_does_not_answer_delays_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives on file:// are read by the event loop's threads."""
    ended = threading.Event()
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        if host != "broker.example":
            return real(host, *rest, **named)
        ended.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    gate = InflightLimit()
    clients = [RemotingUpstream("broker.example:10911", gate) for _ in range(40)]
    asking = [asyncio.create_task(client.call(RemotingCommand(11, 1), 0.5)) for client in clients]
    await asyncio.sleep(0.1)
    async with asyncio.timeout(5):
        await asyncio.to_thread(lambda: None)
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {ThrottledError}
    for client in clients:
        client.close()
    ended.set()


async def test_what_was_not_sent_and_what_was_not_answered_are_told_apart() -> None:
    server, address, _ = await _broker(delay_s=60)
    upstream = RemotingUpstream(address, InflightLimit())
    call = asyncio.create_task(upstream.call(RemotingCommand(11, 1), 20))
    await asyncio.sleep(0.1)
    await server.close(drain_s=0)
    with pytest.raises(UnansweredError):
        await call
    with pytest.raises(ThrottledError, match="cannot be reached: Connection refused"):
        await upstream.call(RemotingCommand(11, 2), 20)
    upstream.close()
    with pytest.raises(ThrottledError):
        await upstream.call(RemotingCommand(11, 3), 20)


@given(st.integers(0, 400_000), st.booleans(), st.booleans())
def test_no_failure_looks_like_an_answer(code: int, was_sent: bool, timed_out: bool) -> None:
    """Of the codes that move an offset (0, 19, 20, 21, 22) none is ever returned, and a send in doubt gets no code."""
    failure = failure_of(code, was_sent=was_sent, timed_out=timed_out)
    assert failure.value not in (0, 19, 20, 21, 22)
    if code == 14:
        assert failure in (Failure.CLOSE, Failure.SILENCE)
    if was_sent and code in (10, 310, 320, 36):
        assert failure in (Failure.CLOSE, Failure.SILENCE)


async def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("127.0.0.2", "127.0.0.1")]
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *a, **k: found if host == "broker.example" else real(host, *a, **k),
    )

    server, address, _ = await _broker()
    upstream = RemotingUpstream(f"broker.example:{address.rpartition(':')[2]}", InflightLimit())
    assert (await upstream.call(RemotingCommand(11, 1), 5)).opaque == 1
    upstream.close()
    await server.close(drain_s=0)
