"""What we dial with TLS: what is trusted, what each refusal of either side says, and files that change."""

import asyncio
import logging
import shutil
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_tiered.server.proxy.upstream import InflightLimit, RemotingUpstream
from tests.remoting.tls_peer import Papers, Serve, answering, hanging_up_on, http, listening, shows, trusting
from tests.servers.certificates import Authority
from tiered.errors import ThrottledError, TieredError, UnansweredError, UnavailableError, UsageError
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand
from tiered.remoting.tls import ClientTls, TlsOptions

HANDSHAKE = 0x16
FRAME = 0x00


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.made(tmp_path_factory.mktemp("papers"))


def asked(address: str, options: TlsOptions | None) -> dict[str, str]:
    """What the blocking client gets."""
    client = BrokerClient(address, 5, tls=None if options is None else ClientTls(options))
    try:
        return client.runtime_info()
    finally:
        client.close()


def called(address: str, options: TlsOptions | None) -> RemotingCommand:
    """What the asynchronous client gets."""

    async def story() -> RemotingCommand:
        tls = None if options is None else ClientTls(options)
        upstream = RemotingUpstream(address, InflightLimit(), tls=tls)
        try:
            return await upstream.call(RemotingCommand(28, 5), 5)
        finally:
            upstream.close()
            await asyncio.sleep(0.05)  # an aborted transport says so once

    return asyncio.run(story())


GOOD: dict[str, Callable[[Papers], tuple[Serve, TlsOptions]]] = {
    "its CA": lambda p: (answering(shows(p.server)), trusting(p.ca)),
    "its CA, TLS 1.2": lambda p: (answering(shows(p.server, newest=False)), trusting(p.ca)),
    "itself": lambda p: (answering(shows(p.own)), trusting(p.own.certificate)),
    "itself, signed": lambda p: (answering(shows(p.server)), trusting(p.server.certificate)),
    "another host": lambda p: (answering(shows(p.elsewhere)), trusting(p.ca, verify="ca")),
    "any certificate": lambda p: (answering(shows(p.own)), trusting(None, verify="none")),
    "our certificate": lambda p: (answering(shows(p.server, asks=p.ca)), trusting(p.ca, p.client)),
    "ours, TLS 1.2": lambda p: (
        answering(shows(p.server, asks=p.ca, newest=False)),
        trusting(p.ca, p.client),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_trusted_server_gets_the_request(name: str, papers: Papers) -> None:
    serve, options = GOOD[name](papers)
    with listening(serve) as address:
        assert asked(address, options) == {"a": "1"}
        answer = called(address, options)
        assert (answer.code, answer.opaque) == (0, 5)


BAD: dict[str, tuple[Callable[[Papers], tuple[Serve, TlsOptions | None]], str, type[TieredError]]] = {
    "another CA": (
        lambda p: (answering(shows(p.server)), trusting(p.other_ca)),
        r"certificate is not signed by a CA in .*other-ca.pem; add its CA, .* to the file in broker.tls_ca",
        UsageError,
    ),
    "no CA": (
        lambda p: (answering(shows(p.own)), trusting(None)),
        "the server's certificate is not signed by a CA of this system; .*broker.tls_ca",
        UsageError,
    ),
    "another host": (
        lambda p: (answering(shows(p.elsewhere)), trusting(p.ca)),
        'certificate is not for 127.0.0.1; to ignore the name, set broker.tls_verify = "ca"',
        UsageError,
    ),
    "expired": (
        lambda p: (answering(shows(p.expired)), trusting(p.ca)),
        "certificate, .* has expired; renew",
        UsageError,
    ),
    "wants ours": (
        lambda p: (answering(shows(p.server, asks=p.ca)), trusting(p.ca)),
        "requires a client certificate.*broker.tls_certificate",
        UsageError,
    ),
    "wants ours, TLS 1.2": (
        lambda p: (answering(shows(p.server, asks=p.ca, newest=False)), trusting(p.ca)),
        "requires? a client certificate.*broker.tls_certificate",
        UsageError,
    ),
    "not ours": (
        lambda p: (answering(shows(p.server, asks=p.ca)), trusting(p.ca, p.stranger)),
        "rejects the certificate in .*stranger.pem",
        UsageError,
    ),
    "something else": (
        lambda p: (http, trusting(p.ca)),
        "does not support TLS; check the port",
        UsageError,
    ),
    "plain only": (
        lambda p: (hanging_up_on(HANDSHAKE), trusting(p.ca)),
        "closed the connection before it answered; .*tls.server.mode=disabled",
        UnavailableError,
    ),
    "TLS only": (
        lambda p: (hanging_up_on(FRAME), None),
        "; .*tls.server.mode=enforcing.*broker.tls = true",
        UnavailableError,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_each_failure_says_what_to_do(name: str, papers: Papers, caplog: pytest.LogCaptureFixture) -> None:
    made, words, kind = BAD[name]
    serve, options = made(papers)
    with listening(serve) as address:
        with pytest.raises(kind, match=words) as blocking:
            asked(address, options)
        assert address in str(blocking.value) and "\n" not in str(blocking.value)
        with caplog.at_level(logging.INFO), pytest.raises(UnavailableError, match=words) as raised:
            called(address, options)
        assert isinstance(raised.value, ThrottledError | UnansweredError)
        assert address in str(raised.value)
    logged = [record.getMessage() for record in caplog.records if record.name == "tiered.remoting.tls"]
    causes = [text.partition(" failed: ")[2] for text in logged]
    assert len(causes) == (options is not None) and all(text in str(raised.value) for text in causes)


def test_the_log_tells_once_what_fails_and_once_that_it_works_again(
    papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    shown = [shows(papers.elsewhere), shows(papers.elsewhere), shows(papers.server), shows(papers.server)]

    async def story(address: str, tls: ClientTls) -> None:
        for _ in (1, 2):
            with pytest.raises(ThrottledError):
                await RemotingUpstream(address, InflightLimit(), tls=tls).call(RemotingCommand(28, 5), 5)
        for _ in (1, 2):
            upstream = RemotingUpstream(address, InflightLimit(), tls=tls)
            await upstream.call(RemotingCommand(28, 5), 5)
            upstream.close()
        await asyncio.sleep(0.05)

    def serve(plain: socket.socket) -> None:
        answering(shown.pop(0))(plain)

    with listening(serve) as address, caplog.at_level(logging.INFO):
        asyncio.run(story(address, ClientTls(trusting(papers.ca))))
    failed, works = caplog.messages
    assert failed.startswith(f"a TLS connection to {address} failed: the server's certificate is not")
    assert works == f"TLS connections to {address} work again"


def test_a_server_that_says_nothing_is_waited_for_no_longer_than_the_time_limit(papers: Papers) -> None:
    def say_nothing(plain: socket.socket) -> None:
        while plain.recv(1 << 16):
            pass

    with listening(say_nothing) as address:
        client = BrokerClient(address, 0.3, tls=ClientTls(trusting(papers.ca)))
        with pytest.raises(UnavailableError, match=r"does not answer: .*timed out"):
            client.runtime_info()


def test_handshakes_at_once_are_limited_and_the_others_fail_with_the_reason(
    papers: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketmq_tiered.server.proxy.upstream.CONNECT_TIMEOUT_S", 0.4)
    dialled: list[float] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append(time.monotonic())
        await reader.read()
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        gate, tls = InflightLimit(handshakes_max=2), ClientTls(trusting(papers.ca))
        upstreams = [RemotingUpstream(f"127.0.0.1:{port}", gate, tls=tls) for _ in range(5)]
        calls = (upstream.call(RemotingCommand(28, 5), 5) for upstream in upstreams)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, ThrottledError) for result in results)
        assert not gate.handshakes.locked()
        server.close()

    asyncio.run(story())
    assert len([at for at in dialled if at < dialled[0] + 0.3]) == 2, "a slot is free after 0.4 s"


def test_files_that_change_count_for_the_next_connection_and_useless_ones_do_not(
    papers: Papers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = tmp_path / "ca.pem"
    shutil.copy(papers.other_ca, ca)
    tls = ClientTls(trusting(ca))
    with listening(answering(shows(papers.server))) as address, caplog.at_level(logging.INFO):

        def works() -> bool:
            client = BrokerClient(address, 5, tls=tls)
            try:
                return bool(client.runtime_info())
            except UsageError:
                return False
            finally:
                client.close()

        assert not works()
        shutil.copy(papers.ca, ca)
        assert works()
        ca.write_text("being written")
        assert works() and works()
        ca.unlink()
        assert works()
    assert [text.split(": ")[0] for text in caplog.messages] == [
        "TLS files for connections to brokers reloaded",
        "the changed TLS files for connections to brokers cannot be loaded, so that the old ones stay in use",
        "the changed TLS files for connections to brokers cannot be loaded, so that the old ones stay in use",
    ]


def test_files_that_do_not_load_are_named_by_their_settings(papers: Papers, tmp_path: Path) -> None:
    missing, none = tmp_path / "missing.pem", tmp_path / "none.pem"
    none.write_text("no certificate")
    encrypted = Authority(tmp_path).encrypted(papers.client.key)
    client, key, other = (str(path) for path in (papers.client.certificate, encrypted, papers.stranger.key))
    for options, words in (
        (trusting(missing), "broker.tls_ca = .*missing.pem.* No such file"),
        (trusting(none), "broker.tls_ca = .*none.pem.* cannot be loaded"),
        (TlsOptions(certificate=str(missing)), "broker.tls_certificate = .*missing.pem"),
        (TlsOptions(certificate=client, key=key), "broker.tls_key = .* cannot be loaded"),
        (
            TlsOptions(certificate=client, key=key, key_password=str(none)),
            "broker.tls_key = .* cannot be loaded",
        ),
        (
            TlsOptions(certificate=client, key=key, key_password=str(missing)),
            "broker.tls_key_password_file = .* No such",
        ),
        (TlsOptions(certificate=client, key=other), "broker.tls_key = .* KEY_VALUES_MISMATCH"),
    ):
        with pytest.raises(UsageError, match=words):
            ClientTls(options)


def test_an_encrypted_key_is_opened_by_its_password(papers: Papers, tmp_path: Path) -> None:
    key, word = Authority(tmp_path).encrypted(papers.client.key), tmp_path / "word"
    word.write_text("secret\r\n")
    files = str(papers.client.certificate), str(key), str(word)
    with listening(answering(shows(papers.server, asks=papers.ca))) as address:
        assert asked(address, TlsOptions("full", str(papers.ca), *files)) == {"a": "1"}


def test_old_versions_of_tls_are_not_spoken(papers: Papers) -> None:
    context = ClientTls(trusting(papers.ca)).context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
