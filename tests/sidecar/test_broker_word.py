"""Asking the broker: what a silent, an old and a half-working one become."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sidecar.broker_side import KeptTls, address_of, tls_of
from sidecar.broker_word import BrokerVoice
from tests.remoting.tls_peer import Papers, answering, listening, shows
from tests.servers.certificates import Authority
from tiered.broker_store.bound import BrokerWord
from tiered.broker_store.conf import BrokerConf
from tiered.errors import UnavailableError, UsageError
from tiered.settings.load import load_settings


class FakeClient:
    """A broker that answers, or fails, as told."""

    def __init__(self, info: dict[str, str] | None, confirm: int | Exception | None) -> None:
        self.info = info
        self.confirm = confirm
        self.closed = 0
        self.name: str | None = None

    def broker_config(self) -> dict[str, str] | None:
        return None if self.name is None else {"brokerName": self.name}

    def runtime_info(self) -> dict[str, str]:
        if self.info is None:
            raise UnavailableError("no runtime information")
        return self.info

    def confirm_offset(self) -> int | None:
        if isinstance(self.confirm, Exception):
            raise self.confirm
        return self.confirm

    def close(self) -> None:
        self.closed += 1


def _voice(client: FakeClient) -> BrokerVoice:
    return BrokerVoice("127.0.0.1:10911", 1.0, connect=lambda *_: client)  # type: ignore[arg-type]


def test_a_5x_broker_says_everything() -> None:
    info = {"commitLogMaxOffset": "100", "dispatchBehindBytes": "7"}
    assert _voice(FakeClient(info, 90)).ask() == BrokerWord(100, 90, 7)


def test_a_49_broker_knows_no_confirm_offset() -> None:
    assert _voice(FakeClient({"commitLogMaxOffset": "100"}, None)).ask() == BrokerWord(100, None, None)


def test_a_broker_without_runtime_info_still_has_a_word() -> None:
    assert _voice(FakeClient(None, 90)).ask() == BrokerWord(None, 90, None)


def test_a_silent_broker_is_none_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient({"commitLogMaxOffset": "1"}, UnavailableError("timed out"))
    voice = _voice(client)
    with caplog.at_level(logging.INFO):
        assert [voice.ask() for _ in range(3)] == [None, None, None]
        client.confirm = 1
        assert voice.ask() is not None
    assert caplog.messages == ["the broker does not answer", "the broker answers again"]
    assert client.closed == 3


def test_another_broker_at_the_address_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient({"commitLogMaxOffset": "100"}, 90)
    voice = BrokerVoice("127.0.0.1:10911", 1.0, name="broker-a", connect=lambda *_: client)  # type: ignore[arg-type]
    assert voice.ask() is not None, "who may not know is not stopped"
    voice.close()
    client.name = "broker-b"
    assert voice.ask() is None
    assert "is broker broker-b, not broker-a" in str(caplog.records[-1].__dict__["cause"])
    client.name = "broker-a"
    assert voice.ask() is not None


def test_without_an_address_nobody_is_asked() -> None:
    assert BrokerVoice("", 1.0).ask() is None


def test_where_the_broker_is() -> None:
    conf = BrokerConf(broker_ip="::1", listen_port=1234)
    assert address_of(load_settings().settings, conf) == "::1:1234"
    assert address_of(load_settings().settings, None) == ""
    named = load_settings(flags={"broker.address": ("flag", "10.0.0.1:10911")}).settings
    assert address_of(named, conf) == "10.0.0.1:10911"


@pytest.mark.parametrize("address", ["broker", "broker:", ":10911", "broker:http", "broker:99999"])
def test_a_bad_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=r"broker\.address"):
        address_of(load_settings(flags={"broker.address": ("flag", address)}).settings, None)


def test_it_is_dialled_as_the_settings_say(tmp_path: Path) -> None:
    papers = Papers.made(tmp_path)
    files = {"tls_ca": papers.ca, "tls_certificate": papers.client.certificate, "tls_key": papers.client.key}
    flags = {f"broker.{name}": ("flag", str(path)) for name, path in files.items()}
    tls = tls_of(load_settings(flags={"broker.tls": ("flag", True), **flags}).settings)
    with listening(answering(shows(papers.server, asks=papers.ca))) as address:
        voice = BrokerVoice(address, 5.0, tls=tls)
        assert voice.ask() == BrokerWord(None, None, None)
        voice.close()
    assert tls is not None and tls.options.verify == "full"
    assert tls_of(load_settings().settings) is None


def test_a_later_job_goes_on_with_what_was_loaded(tmp_path: Path) -> None:
    ca = tmp_path / "copy.pem"
    ca.write_bytes(Authority(tmp_path).certificate.read_bytes())
    flags = {"broker.tls": ("flag", True), "broker.tls_ca": ("flag", str(ca))}
    kept, settings = KeptTls(), load_settings(flags=flags).settings
    first = kept.of(settings)
    ca.write_text("half writ")
    assert kept.of(settings) is first is not None
    assert kept.of(load_settings().settings) is None
    with pytest.raises(UsageError):
        kept.of(settings)


def test_a_file_for_tls_that_is_not_there_ends_the_start() -> None:
    flags = {"broker.tls": ("flag", True), "broker.tls_ca": ("flag", "/nowhere.pem")}
    with pytest.raises(UsageError, match=r"broker\.tls_ca = '/nowhere.pem' does not load: No such file"):
        tls_of(load_settings(flags=flags).settings)
