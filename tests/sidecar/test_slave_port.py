"""Slave mode inside `tiered run`: where it stands, under which policies, and what status shows of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from fetcher.access import ArchiveAccess
from server.proxy.group_reads import GroupReading
from server.proxy.inflight_limit import InflightLimit
from server.proxy.proxy_service import ProxyConfig, ProxyService
from server.proxy.upstream import RemotingUpstream
from server.slave.registrar import NameServerStatus
from server.slave.registration import RegistrationState, SlaveConfig
from server.slave.slave_status import SlaveCounters, SlaveStatus
from sidecar.cli import status as status_command
from sidecar.proxy_thread import ProxyOrder, proxy_port
from sidecar.report import decode_report, encode_report
from sidecar.serving_thread import ServingThread
from sidecar.slave_metrics import SlaveCollector, slave_report
from sidecar.slave_port import slave_config, slave_policies, slave_port
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.server.slave.master_double import MasterDouble
from tests.server.slave.name_server_double import NameServerDouble
from tests.server.slave.until import until
from tests.sidecar.answers_double import Answers
from tests.sidecar.status_report import REPORT
from tiered.broker_store.conf import broker_conf
from tiered.broker_store.names import BrokerNames
from tiered.errors import UsageError
from tiered.object_store.file import FileStore
from tiered.remoting.command import RemotingCommand
from tiered.settings.contradictions import contradictions
from tiered.settings.sections import (
    ArchiveSettings,
    BrokerSettings,
    ReadSettings,
    ServeSettings,
    Settings,
    SlaveSettings,
)  # fmt: skip

CONF = {"brokerIP1": "10.0.0.1", "listenPort": "10911", "namesrvAddr": "10.0.0.8:9876;10.0.0.9:9876"}
STATUS = SlaveStatus(
    "h:10931", 7, 3, True, True, False,
    (NameServerStatus("10.0.0.8:9876", RegistrationState.REGISTERED, ""),
     NameServerStatus("10.0.0.9:9876", RegistrationState.REFUSED, "id 7 is taken")),
    (GroupReading("g", 2, 30, 4, 5),),
)  # fmt: skip


def settings(advertise: str, **others: object) -> Settings:
    return Settings(slave=SlaveSettings(broker_id=7, advertise=advertise), **others)  # type: ignore[arg-type]


def test_its_place_comes_from_settings_and_broker_conf() -> None:
    found = slave_config(settings("sidecar-host:10931"), broker_conf(CONF), "broker-a")
    name_servers = ("10.0.0.8:9876", "10.0.0.9:9876")
    assert found == SlaveConfig("broker-a", "10.0.0.1:10911", name_servers, "sidecar-host:10931", 7)


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
        slave_config(
            settings(advertise, serve=ServeSettings(advertise="h:9876")), broker_conf(CONF), "broker-a"
        )


def test_a_loopback_address_is_one_where_everybody_is_on_it() -> None:
    conf = broker_conf({"brokerIP1": "127.0.0.1", "listenPort": "10911", "namesrvAddr": "localhost:9876"})
    assert slave_config(settings("127.0.0.1:10931"), conf, "b").advertise == "127.0.0.1:10931"


def test_nobody_is_led_to_a_port_that_only_this_host_reaches() -> None:
    names = BrokerNames(CLUSTER, BROKER)
    with pytest.raises(UsageError, match=r"slave\.bind is '127\.0\.0\.1:10931'"):
        slave_port(settings("sidecar-host:10931"), broker_conf(CONF), names)
    reached = Settings(slave=SlaveSettings(broker_id=7, advertise="sidecar-host:10931", bind="0.0.0.0:0"))
    assert slave_port(reached, broker_conf(CONF), names)[1].bind == "0.0.0.0:0"


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
    silent = replace(STATUS, is_master_available=False, master_failure="m:1 cannot be reached: no answer")
    status_command._print(replace(REPORT, slave=slave_report(silent)))
    assert "the master does not answer: m:1 cannot be reached: no answer\n" in capsys.readouterr().out


def test_proxy_and_slave_share_one_thread_and_one_archive(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two ports; the slave is registered once the archive is open, and no longer when they close."""

    async def whole() -> None:
        name_server, master = NameServerDouble(), MasterDouble()
        name_server.addresses = {0: "127.0.0.1:1"}
        await name_server.start()
        await master.start()
        # Nobody says that it does not check its clients: it is asked whether this one may pull.
        told = {"nextBeginOffset": "9", "minOffset": "9", "maxOffset": "9", "suggestWhichBrokerId": "0"}
        master.answers[11] = RemotingCommand(21, 0, ext_fields=told)
        url, broker = f"file://{tmp_path}/archive", BrokerSettings(store_path=str(real_store("A") / "store"))
        wanted = Settings(
            archive=ArchiveSettings(url=url), serve=ServeSettings(bind="127.0.0.1:0", advertise="127.0.0.1:9"),
            slave=SlaveSettings(broker_id=7, advertise="127.0.0.1:8", bind="127.0.0.1:0"),
            broker=replace(broker, address=master.address, name_servers=(name_server.address,)),
        )  # fmt: skip
        backfill(real_store("A") / "store", FileStore(tmp_path / "archive"))
        names = BrokerNames(CLUSTER, BROKER)
        name_server.names = BROKER, CLUSTER

        async def proxy_answers(access: ArchiveAccess, service: ProxyService) -> Answers:
            accesses.append(access)
            return Answers()

        accesses: list[ArchiveAccess] = []
        place = ProxyConfig(BROKER, master.address, (name_server.address,), "127.0.0.1:9")
        proxy, first = proxy_port(ProxyOrder(place, proxy_answers), wanted)
        slave, second = slave_port(wanted, None, names)
        thread = ServingThread(names, wanted, [first, second])
        bound = await asyncio.to_thread(thread.start)
        assert len({port for _, port in bound}) == 2
        try:
            await until(lambda: name_server.addresses.get(7) == "127.0.0.1:8", 20)
            assert proxy.status().is_archive_open and slave.status().is_archive_open and len(accesses) == 1
            client = RemotingUpstream(f"{bound[1][0]}:{bound[1][1]}", InflightLimit())
            fields = {
                "topic": "t_four", "queueId": "0", "queueOffset": "0", "consumerGroup": "g", "maxMsgNums": "5",
                "sysFlag": "4", "subscription": "*", "suspendTimeoutMillis": "0", "commitOffset": "0",
                "subVersion": "0",
            }  # fmt: skip
            found = await client.call(RemotingCommand(11, 0, ext_fields=fields), 10)
            assert found.code == 0 and found.ext_fields["suggestWhichBrokerId"] == "7", found.remark
            client.close()
        finally:
            await asyncio.to_thread(thread.close, 0.1)
        assert 7 not in name_server.addresses and not thread.is_alive
        await name_server.stop()
        await master.stop()

    asyncio.run(whole())
