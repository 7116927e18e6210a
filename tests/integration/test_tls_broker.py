"""Beside servers that take TLS only, and want a certificate: archived, and read by Java clients.

Name servers, brokers and Java clients that speak nothing but TLS and want each other's certificates.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.integration.client_scene import (
    all_there_is,
    begins_and_ends,
    everything,
    need_clients,
    until,
)
from tests.integration.proxy_scene import ProxyScene, proxy_beside_broker
from tests.integration.slave_scene import standing
from tests.servers.certificates import Authority, Certificate
from tests.servers.rocketmq import BROKER, RocketMq
from tests.servers.running_store import RunningStore
from tiered.errors import TieredError
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode
from tiered.remoting.tls import ClientTls, TlsOptions

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TlsCluster:
    need_clients("5.3.3")
    found = TlsCluster.made(tmp_path / "papers")
    found.begin(tmp_path, monkeypatch)
    return found


def refusal(address: str, options: TlsOptions | None) -> str:
    """The error of a request with these options."""
    tls = ClientTls(options) if options is not None else None
    with closing(BrokerClient(address, 5, tls=tls)) as client, pytest.raises(TieredError) as raised:
        client.runtime_info()
    return str(raised.value)


def refusals_say_why(address: str, cluster: TlsCluster) -> None:
    assert "set broker.tls = true" in refusal(address, None)
    assert "not signed by a CA in" in refusal(address, TlsOptions(ca=str(cluster.other_ca)))
    assert "(broker.tls_certificate)" in (said := refusal(address, TlsOptions(ca=str(cluster.ca)))) or (
        "set broker.tls_certificate" in said
    ), said


def a_group_is_looked_at(tiered_proxy: ProxyScene, cluster: TlsCluster, group: str) -> None:
    """Through the tiered proxy, and at the real name server."""
    words = ("--group", group, "--topic", "live0", "--earliest", "--dry-run", "--json")
    for address in (tiered_proxy.address, tiered_proxy.broker.name_server_address):
        done = tiered_proxy.sidecar.tiered(
            "reset-offset", "--serve", address, *words, *as_flags(cluster.dialling())
        )
        assert done.returncode == 0 and BROKER in done.stdout, done.stderr
    wrong = cluster.dialling() | {"broker.tls_ca": str(cluster.other_ca)}
    done = tiered_proxy.sidecar.tiered(
        "reset-offset", "--serve", tiered_proxy.address, *words, *as_flags(wrong)
    )
    assert done.returncode == 2 and "broker.tls_ca" in done.stderr and "Traceback" not in done.stderr
    done = tiered_proxy.sidecar.tiered("reset-offset", "--serve", tiered_proxy.address, *words)
    assert done.returncode == 4, done.stderr


@pytest.mark.parametrize(
    ("version", "host"),
    [
        ("5.3.3", "127.0.0.1"),
        pytest.param("5.3.3", "[::1]", marks=pytest.mark.soak),
        pytest.param("4.9.7", "127.0.0.1", marks=pytest.mark.soak),
        pytest.param("5.5.0", "127.0.0.1", marks=pytest.mark.soak),
    ],
)
def test_it_is_archived_and_read_through_the_proxy(
    version: str, host: str, cluster: TlsCluster, tmp_path: Path, minio_url: RunningStore
) -> None:
    need_clients(version)
    # By force from the archive: a broker does not delete anything in its first minute.
    settings = as_environment(cluster.dialling() | cluster.serving() | {"read.policy": "FORCE"})
    with proxy_beside_broker(
        tmp_path, minio_url, {}, settings, topics=1, host=host, version=version
    ) as tiered_proxy:
        refusals_say_why(tiered_proxy.broker.broker_address, cluster)
        tiered_proxy.fill(1500)
        tiered_proxy.wait_until_serving()
        tiered_proxy.sidecar.wait_until_archived(60)
        wanted = all_there_is(tiered_proxy, "live0")
        consumer = tiered_proxy.consume("push", "G-tls", 10**6, idle_s=60)
        consumer.wait_for_all(wanted)
        (group,) = tiered_proxy.sidecar.status()["proxy"]["groups"]
        assert group["name"] == "G-tls" and group["archivePulls"] > 0
        consumer.kill()
        assert sorted(consumer.lines()) == sorted(wanted)
        a_group_is_looked_at(tiered_proxy, cluster, "G-tls")
        assert tiered_proxy.sidecar.stop() == 0
        assert "a TLS connection to" not in tiered_proxy.sidecar.log.read_text()


UNVERIFIED, VERIFIED = TlsOptions("none"), TlsOptions()
SAID = {
    "enforcing": {None: "set broker.tls = true", VERIFIED: "add its CA", UNVERIFIED: ""},
    "permissive": {None: "", VERIFIED: "add its CA", UNVERIFIED: ""},
    "disabled": {None: "", VERIFIED: "tls.server.mode=disabled", UNVERIFIED: "tls.server.mode=disabled"},
}
"""What the error says by the server's mode, in test mode with a certificate it made itself; empty: it answers."""


@pytest.mark.soak
@pytest.mark.parametrize("mode", SAID)
@pytest.mark.parametrize("version", ["5.3.3", "4.9.7"])
def test_each_mode_of_a_server_as_it_comes(
    version: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_clients(version)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"-Dtls.server.mode={mode}")
    servers = RocketMq(version, tmp_path)
    with servers.name_server:
        for options, words in SAID[mode].items():
            if words:
                assert words in refusal(servers.name_server_address, options)
                continue
            tls = None if options is None else ClientTls(options)
            with closing(BrokerClient(servers.name_server_address, 5, tls=tls)) as client:
                assert client.call(RequestCode.GET_BROKER_CLUSTER_INFO).code == 0


@pytest.mark.soak
@pytest.mark.parametrize("version", ["5.3.3", "4.9.7"])
def test_as_its_slave_it_is_listed_and_serves(
    version: str, cluster: TlsCluster, tmp_path: Path, minio_url: RunningStore
) -> None:
    need_clients(version)
    with standing(version, tmp_path, minio_url, messages=2000, topics=1) as slave:
        sidecar, begun = slave.sidecar, dict(slave.sidecar.settings)
        wrong = cluster.dialling() | {"broker.tls_ca": str(cluster.other_ca)}
        sidecar.settings = begun | as_environment(wrong)
        sidecar.start()
        until(lambda: "broker.tls_ca" in sidecar.log.read_text(), "the log does not say what is wrong")
        assert "clients connect without TLS" in sidecar.log.read_text()
        assert sidecar.stop() == 0
        assert "7" not in slave.listed()
        sidecar.settings = begun | as_environment(cluster.dialling() | cluster.serving())
        sidecar.start()
        slave.wait_until_listed()
        sidecar.wait_until_archived(60)
        ends = begins_and_ends(slave, "live0")[1]
        assert set(slave.pinned("pull", "G-pulled", 0).finish()) == everything(ends)
        assigned = slave.pinned("assign", "G-pinned", 10**6, idle_s=60)
        assigned.wait_for_all(everything(ends))
        until(lambda: slave.committed("G-pinned") == ends, "the offsets did not reach the master", 20)
        until(lambda: slave.answered("G-pinned")[0] > 0, "not from the archive, or no heartbeat", 45)
        with slave.produce(40, per_second=20) as producer:
            producer.finish(30)
        assigned.wait_for_all(everything(begins_and_ends(slave, "live0")[1]))
        assigned.kill()


@dataclass(frozen=True)
class TlsCluster:
    """``own``: the sidecar's certificate as a client, ``server``: as what clients dial."""

    ca: Path
    other_ca: Path
    server: Certificate
    own: Certificate

    @classmethod
    def made(cls, directory: Path) -> TlsCluster:
        """Everything that begins by Java options from the environment, as all Java processes of a test do."""
        ours, others = Authority(directory), Authority(directory, "other-ca")
        return cls(ours.certificate, others.certificate, ours.signed("server"), ours.signed("sidecar"))

    def begin(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on Java processes, and what tests ask servers, speak TLS only."""
        path = directory / "tls.properties"
        # One file for both sides of every process: a broker dials name servers, and those dial brokers.
        path.write_text(
            "tls.test.mode.enable=false\n"
            f"tls.server.need.client.auth=require\ntls.server.authClient=true\ntls.server.trustCertPath={self.ca}\n"
            f"tls.server.certPath={self.server.certificate}\ntls.server.keyPath={self.server.key}\n"
            f"tls.client.authServer=true\ntls.client.trustCertPath={self.ca}\n"
            f"tls.client.certPath={self.own.certificate}\ntls.client.keyPath={self.own.key}\n"
        )
        options = f"-Dtls.server.mode=enforcing -Dtls.enable=true -Dtls.config.file={path}"
        monkeypatch.setenv("JAVA_TOOL_OPTIONS", options)
        tls = ClientTls(self.options())
        for user in ("client_scene", "live"):
            monkeypatch.setattr(f"tests.integration.{user}.BrokerClient", partial(BrokerClient, tls=tls))

    def options(self) -> TlsOptions:
        """Of a client that is let in."""
        return TlsOptions(ca=str(self.ca), certificate=str(self.own.certificate), key=str(self.own.key))

    def dialling(self) -> dict[str, str]:
        """Settings by which the sidecar dials them."""
        return {
            "broker.tls": "true",
            "broker.tls_ca": str(self.ca),
            "broker.tls_certificate": str(self.own.certificate),
            "broker.tls_key": str(self.own.key),
        }

    def serving(self) -> dict[str, str]:
        """Settings by which it serves their clients."""
        return {
            "serve.tls_certificate": str(self.server.certificate),
            "serve.tls_key": str(self.server.key),
            "serve.tls_client_ca": str(self.ca),
            "serve.tls_only": "true",
        }


def as_environment(settings: dict[str, str]) -> dict[str, str]:
    """Environment variables of ``settings``."""
    return {f"TIERED_{key.upper().replace('.', '__')}": value for key, value in settings.items()}


def as_flags(settings: dict[str, str]) -> list[str]:
    """Flags of a command."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
