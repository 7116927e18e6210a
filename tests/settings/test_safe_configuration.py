"""The configuration to copy from docs/THREATS.md: loaded by the program's own readers, and used by its servers."""

from __future__ import annotations

import asyncio
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.server.listen.options import server_options
from rocketmq_tiered.server.security.authorizer import RulesAuthorizer
from rocketmq_tiered.server.security.rules import read_rules
from rocketmq_tiered.server.wire.listener import Listener
from rocketmq_tiered.server.wire.request import Authorizer, HandlerTable, Request, Response
from tests.server.serving_peer import RecordingPeer
from tiered.errors import TieredError
from tiered.remoting.client import BrokerClient
from tiered.remoting.codes import RequestCode, ResponseCode
from tiered.remoting.command import RemotingCommand
from tiered.remoting.credentials import Credentials, signature_of
from tiered.remoting.tls import ClientTls, TlsOptions
from tiered.settings.load import load_settings
from tiered.settings.sections import Settings

DOCUMENT = (Path(__file__).parents[2] / "docs" / "THREATS.md").read_text("utf-8")
SECRET = "CHANGE-ME-2"
PULL = {"consumerGroup": "billing", "topic": "orders", "queueId": "0"}


def block(language: str) -> str:
    """The only code block of ``language``."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """As written, with files of this test at the places it names."""
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=sidecar -keyout sidecar.key"
    )
    subprocess.run(
        ["openssl", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-out", "sidecar.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    (tmp_path / "ca.pem").write_bytes((tmp_path / "sidecar.pem").read_bytes())
    (tmp_path / "plain_acl.yml").write_text(block("yaml"))
    (tmp_path / "tiered.toml").write_text(block("toml").replace("/etc/rocketmq-tiered", str(tmp_path)))
    loaded = load_settings(tmp_path / "tiered.toml").settings
    return replace(loaded, serve=replace(loaded.serve, bind="127.0.0.1:0"))


def test_the_settings_load_without_a_complaint(settings: Settings) -> None:
    serve, broker = settings.serve, settings.broker
    assert serve.tls_only and serve.tls_client_required and serve.tls_client_ca and serve.acl_file
    assert not serve.proxy_from and not settings.object_store.trusted_network
    assert broker.tls and broker.tls_verify == "full" and broker.credentials_file
    assert settings.admin.host == "127.0.0.1" and not settings.admin.host_names
    assert settings.archive.url.startswith("s3://") and not settings.object_store.endpoint_url


def refusal(
    authorizer: Authorizer, account: str, secret: str, code: int = 11, **fields: str
) -> Response | None:
    fields = {"AccessKey": account, **PULL, **fields}
    fields["Signature"] = signature_of(fields, b"", secret)
    return authorizer.refusal(Request(RemotingCommand(code, 1, ext_fields=fields), RecordingPeer()))


def test_the_rules_give_each_account_its_own_only(settings: Settings) -> None:
    authorizer = server_options(settings.serve).authorizer
    assert isinstance(authorizer, RulesAuthorizer)
    assert refusal(authorizer, "billing-consumer", SECRET) is None
    for account, secret, fields in (
        ("billing-consumer", SECRET, {"topic": "payments"}),
        ("billing-consumer", SECRET, {"consumerGroup": "audit"}),
        ("billing-consumer", "wrong", {}),
        ("tiered-sidecar", "CHANGE-ME-1", {}),
        ("unknown-account", "", {}),
    ):
        refused = refusal(authorizer, account, secret, **fields)
        assert refused is not None and refused.code == ResponseCode.NO_PERMISSION, (account, fields)
    assert not any(one.is_super for one in read_rules(Path(settings.serve.acl_file)).accounts.values())


def test_a_server_with_it_answers_only_accounts_with_tls_and_a_certificate(
    settings: Settings, tmp_path: Path
) -> None:
    ca, key = str(tmp_path / "ca.pem"), settings.serve.tls_key
    with_certificate = TlsOptions(ca=ca, certificate=settings.serve.tls_certificate, key=key)
    account, other = Credentials("billing-consumer", SECRET), Credentials("tiered-sidecar", "CHANGE-ME-1")

    def result(address: str, tls: TlsOptions | None, credentials: Credentials | None) -> int | None:
        """The code of the reply to a pull; None without one."""
        client = BrokerClient(address, 5, credentials, None if tls is None else ClientTls(tls))
        try:
            return client.call(RequestCode.PULL_MESSAGE, PULL).code
        except TieredError:
            return None
        finally:
            client.close()

    async def pulled(_: Request) -> Response:
        return Response()

    async def results() -> list[int | None]:
        table = HandlerTable()
        table.register(RequestCode.PULL_MESSAGE)(pulled)
        listener = Listener(table, server_options(settings.serve))
        host, port = await listener.start()
        ways = (
            (with_certificate, account),
            (with_certificate, other),
            (with_certificate, None),
            (TlsOptions(ca=ca), account),
            (None, account),
        )
        try:
            return [await asyncio.to_thread(result, f"{host}:{port}", *way) for way in ways]
        finally:
            await listener.close(0)

    assert asyncio.run(results()) == [0, 16, 16, None, None]
