"""Name servers, brokers and Java clients that speak nothing but TLS and want each other's certificates.

Owns their certificates and options, and the settings of a sidecar among them. What must come of it is the tests'.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.servers.certificates import Authority, Certificate
from tiered.remoting.client import BrokerClient
from tiered.remoting.tls import ClientTls, TlsOptions


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
