"""Slave mode inside `tiered run`: where it stands, under which policies, and what status shows of it."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from fetcher.serving.facade.group_reads import GroupReading
from fetcher.serving.slave.registrar import Standing
from fetcher.serving.slave.registration import SlavePlace, Stand
from fetcher.serving.slave.service import SlaveCounters, SlaveStatus
from sidecar.cli import status as status_command
from sidecar.report import decode_report, encode_report
from sidecar.slave_metrics import SlaveCollector, slave_report
from sidecar.slave_port import slave_place, slave_policies
from tests.sidecar.test_facade_thread import REPORT
from tiered.broker_store.conf import broker_conf
from tiered.errors import UsageError
from tiered.settings.sections import ReadSettings, ServeSettings, Settings, SlaveSettings, contradictions

CONF = {"brokerIP1": "10.0.0.1", "listenPort": "10911", "namesrvAddr": "10.0.0.8:9876;10.0.0.9:9876"}
STATUS = SlaveStatus(
    "h:10931", 7, 3, True, True, False,
    (Standing("10.0.0.8:9876", Stand.REGISTERED, ""), Standing("10.0.0.9:9876", Stand.REFUSED, "id 7 is taken")),
    (GroupReading("g", 2, 30, 4, 5),),
)  # fmt: skip


def settings(advertise: str, **others: object) -> Settings:
    return Settings(slave=SlaveSettings(broker_id=7, advertise=advertise), **others)  # type: ignore[arg-type]


def test_its_place_comes_from_settings_and_broker_conf() -> None:
    found = slave_place(settings("sidecar-host:10931"), broker_conf(CONF), "broker-a")
    name_servers = ("10.0.0.8:9876", "10.0.0.9:9876")
    assert found == SlavePlace("broker-a", "10.0.0.1:10911", name_servers, "sidecar-host:10931", 7)


@pytest.mark.parametrize(
    ("advertise", "complaint"),
    [
        ("host", "slave.advertise"),
        ("0.0.0.0:10931", "no address that clients can dial"),
        ("10.0.0.1:10911", "of the broker or a name server itself"),
        ("h:9876", "serve.advertise, too"),
        ("h:0", "no port"),
        ("127.0.0.1:10931", "lead every client to its own host"),
        ("localhost:10931", "lead every client to its own host"),
        ("[::1]:10931", "lead every client to its own host"),
    ],
)
def test_impossible_places_are_refused(advertise: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        slave_place(
            settings(advertise, serve=ServeSettings(advertise="h:9876")), broker_conf(CONF), "broker-a"
        )


def test_a_loopback_address_is_one_where_everybody_is_on_it() -> None:
    conf = broker_conf({"brokerIP1": "127.0.0.1", "listenPort": "10911", "namesrvAddr": "localhost:9876"})
    assert slave_place(settings("127.0.0.1:10931"), conf, "b").advertise == "127.0.0.1:10931"


def test_an_id_without_an_address_and_an_address_without_an_id_are_contradictions() -> None:
    for slave, key in (
        (SlaveSettings(advertise="h:1"), "slave.broker_id"), (SlaveSettings(broker_id=3), "slave.advertise"),
    ):  # fmt: skip
        assert [found for found, _ in contradictions(Settings(slave=slave))] == [key]
    assert contradictions(Settings(slave=SlaveSettings(broker_id=3, advertise="h:1"))) == []


def test_what_is_archived_comes_from_the_archive_unless_disabled() -> None:
    read = ReadSettings(policy="NOT_IN_MEM", topic_policies=("a*=DISABLE", "b=3", "c=NOT_IN_DISK"))
    found = slave_policies(read)
    assert found.default_policy() == "FORCE"
    assert found.patterns() == (("a*", "DISABLE"), ("b", "FORCE"), ("c", "FORCE"))
    assert slave_policies(ReadSettings(policy="0")).default_policy() == "DISABLE"


def test_it_is_part_of_the_status_document_and_of_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(REPORT, slave=slave_report(STATUS))
    assert decode_report(orjson.loads(encode_report(report))) == report
    assert decode_report(orjson.loads(encode_report(REPORT))).slave is None
    families = {family.name: family for family in SlaveCollector(lambda: STATUS, SlaveCounters()).collect()}
    registered = families["rocketmq_tiered_store_slave_registered"].samples
    assert {sample.labels["name_server"]: sample.value for sample in registered} == {
        "10.0.0.8:9876": 1, "10.0.0.9:9876": 0,
    }  # fmt: skip
    status_command._print(report)
    printed = capsys.readouterr().out
    assert "id 7 at h:10931, 3 connected; the master sends nobody here (slaveReadEnable)" in printed
    assert "name server 10.0.0.9:9876: not registered: id 7 is taken" in printed
