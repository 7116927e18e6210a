"""Asking the broker: what a silent, an old and a half-working one become."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rocketmq_tiered.process.broker_side import BrokerOffsetsClient, address_of, tls_of
from tests.remoting.tls_peer import Papers, answering, listening, shows
from tiered.broker_store.bound import BoundFacts, BrokerOffsets, decide_bound
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.liveness import Liveness
from tiered.errors import UnavailableError, UsageError
from tiered.settings.load import load_settings


class FakeClient:
    """A broker with scripted answers and failures."""

    def __init__(self, info: dict[str, str] | None, confirm: int | Exception | None) -> None:
        self.info = info
        self.confirm = confirm
        self.closed = 0
        self.config: dict[str, str] | None = None

    def broker_config(self) -> dict[str, str] | None:
        return self.config

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


def _client_of(client: FakeClient) -> BrokerOffsetsClient:
    return BrokerOffsetsClient("127.0.0.1:10911", 1.0, connect=lambda *_: client)  # type: ignore[arg-type]


def test_a_5x_broker_says_everything() -> None:
    client = FakeClient({"commitLogMaxOffset": "100", "dispatchBehindBytes": "7"}, 90)
    client.config = {"enableControllerMode": "false"}
    offsets = _client_of(client).ask()
    assert offsets == BrokerOffsets(100, 90, 7)
    assert offsets.config == client.config


def test_a_49_broker_knows_no_confirm_offset() -> None:
    assert _client_of(FakeClient({"commitLogMaxOffset": "100"}, None)).ask() == BrokerOffsets(100, None, None)


def test_a_broker_without_runtime_info_still_has_a_word() -> None:
    offsets = _client_of(FakeClient(None, 90)).ask()
    assert offsets is not None
    assert (offsets.max_phys, offsets.confirm_phys, offsets.dispatch_behind_bytes) == (None, 90, None)


@pytest.mark.parametrize(
    ("config", "unflushed", "is_certain"),
    [
        ({"enableControllerMode": "false", "flushDiskType": "ASYNC_FLUSH"}, "12 B", True),
        ({"enableControllerMode": "true"}, "0 B", False),  # a slave, or a replica in sync that is away
        ({"enableControllerMode": "false", "duplicationEnable": "true"}, "0 B", False),
        ({"enableControllerMode": "false", "enableBuildConsumeQueueConcurrently": "true"}, "0 B", False),
        ({"enableControllerMode": "false", "flushDiskType": "SYNC_FLUSH"}, "12 B", False),
        ({"enableControllerMode": "false", "flushDiskType": "SYNC_FLUSH"}, "0 B", True),
        ({"flushDiskType": "SYNC_FLUSH"}, "12 B", True),  # 4.9
        (None, "0 B", False),
    ],
)
def test_a_broker_whose_dispatch_lag_is_not_exact_is_not_taken_at_its_count(
    config: dict[str, str] | None, unflushed: str, is_certain: bool
) -> None:
    """What it has not dispatched counts from there: what lies above may be taken back."""
    info = {"commitLogMaxOffset": "1000", "dispatchBehindBytes": "0", "remainHowManyDataToFlush": unflushed}
    client = FakeClient(info, 1000)
    client.config = config
    offsets = _client_of(client).ask()
    assert offsets is not None and offsets.is_dispatch_certain == is_certain
    facts = BoundFacts(Liveness.ALIVE, offsets, frontier_phys=700, log_end_phys=4096, cursor_phys=500)
    assert decide_bound(facts).phys == (1000 if is_certain else 700)


def test_a_silent_broker_is_none_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient({"commitLogMaxOffset": "1"}, UnavailableError("timed out"))
    offsets_client = _client_of(client)
    with caplog.at_level(logging.INFO):
        assert [offsets_client.ask() for _ in range(3)] == [None, None, None]
        client.confirm = 1
        assert offsets_client.ask() is not None
    assert caplog.messages == ["the broker does not answer", "the broker answers again"]
    assert client.closed == 3


def test_another_broker_at_the_address_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient({"commitLogMaxOffset": "100"}, 90)
    offsets_client = BrokerOffsetsClient("127.0.0.1:10911", 1.0, name="broker-a", connect=lambda *_: client)  # type: ignore[arg-type]
    assert offsets_client.ask() is not None, "who may not know is not stopped"
    offsets_client.close()
    client.config = {"brokerName": "broker-b"}
    assert offsets_client.ask() is None
    assert "is broker-b, but the store is that of broker-a" in str(caplog.records[-1].__dict__["cause"])
    client.config = {"brokerName": "broker-a"}
    assert offsets_client.ask() is not None


def test_without_an_address_no_request_is_sent() -> None:
    assert BrokerOffsetsClient("", 1.0).ask() is None


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
        offsets_client = BrokerOffsetsClient(address, 5.0, tls=tls)
        assert offsets_client.ask() == BrokerOffsets(None, None, None)
        offsets_client.close()
    assert tls is not None and tls.options.verify == "full"
    assert tls_of(load_settings().settings) is None


def test_a_file_for_tls_that_is_not_there_ends_the_start() -> None:
    flags = {"broker.tls": ("flag", True), "broker.tls_ca": ("flag", "/nowhere.pem")}
    with pytest.raises(UsageError, match=r"broker\.tls_ca = /nowhere.pem does not load: No such file"):
        tls_of(load_settings(flags=flags).settings)
