"""Slave mode in `tiered run`: addresses, read policies, status, and a thread shared with proxy mode."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from fetcher.access import ArchiveAccess
from fetcher.policy.read_policy import ReadPolicies, ReadPolicy
from rocketmq_tiered.cli import status as status_command
from rocketmq_tiered.process.report import decode_report, encode_report
from rocketmq_tiered.process.serving import ServingThread, open_handlers, services_of, slave_config
from rocketmq_tiered.process.serving_metrics import serving_families
from rocketmq_tiered.server.proxy.proxy_service import ProxyService
from rocketmq_tiered.server.proxy.relay_service import RelayService
from rocketmq_tiered.server.proxy.relay_status import GroupReading, SlaveStatus
from rocketmq_tiered.server.proxy.upstream import InflightLimit, RemotingUpstream
from rocketmq_tiered.server.slave.registration import SlaveConfig
from rocketmq_tiered.server.slave.slave_service import SlaveOptions, SlaveService
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.process.handlers_double import FakeHandlers
from tests.process.status_report import REPORT
from tests.server.slave.master_double import MasterDouble
from tests.server.slave.name_server_double import NameServerDouble
from tests.server.slave.until import until
from tiered.broker_store.conf import BrokerNames, broker_conf
from tiered.errors import UsageError
from tiered.object_store.file import FileStore
from tiered.remoting.command import RemotingCommand
from tiered.settings.load import contradictions
from tiered.settings.sections import (
    ArchiveSettings,
    BrokerSettings,
    ServeSettings,
    Settings,
    SlaveSettings,
)

CONF = {"brokerIP1": "10.0.0.1", "listenPort": "10911", "namesrvAddr": "10.0.0.8:9876;10.0.0.9:9876"}
STATUS = SlaveStatus(
    "h:10931",
    3,
    True,
    (GroupReading("g", 2, 30, 4, 5),),
    7,
    True,
    False,
    (("10.0.0.8:9876", "registered"), ("10.0.0.9:9876", "not registered: id 7 is taken")),
)


def settings(advertise: str, **others: object) -> Settings:
    slave = SlaveSettings(broker_id=7, advertise=advertise, bind="0.0.0.0:10931")
    return Settings(slave=slave, **others)  # type: ignore[arg-type]


def test_addresses_come_from_settings_and_broker_conf() -> None:
    found = slave_config(settings("sidecar-host:10931"), broker_conf(CONF), "broker-a")
    name_servers = ("10.0.0.8:9876", "10.0.0.9:9876")
    assert found == SlaveConfig("broker-a", "10.0.0.1:10911", name_servers, "sidecar-host:10931", 7)


@pytest.mark.parametrize(
    ("advertise", "complaint"),
    [
        ("host", "slave.advertise"),
        ("0.0.0.0:10931", "not an address that clients can dial"),
        ("10.0.0.1:10911", "address of the broker or of a name server"),
        ("h:9876", "same as serve.advertise"),
        ("h:0", "has port 0"),
        ("127.0.0.1:10931", "is a loopback address"),
        ("localhost:10931", "is a loopback address"),
        ("[::1]:10931", "is a loopback address"),
    ],
)
def test_impossible_addresses_are_refused(advertise: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        slave_config(
            settings(advertise, serve=ServeSettings(advertise="h:9876")), broker_conf(CONF), "broker-a"
        )


def test_a_loopback_address_is_allowed_if_the_broker_has_one_too() -> None:
    conf = broker_conf({"brokerIP1": "127.0.0.1", "listenPort": "10911", "namesrvAddr": "localhost:9876"})
    assert slave_config(settings("127.0.0.1:10931"), conf, "b").advertise == "127.0.0.1:10931"


def test_a_loopback_port_with_an_address_for_other_hosts_is_refused() -> None:
    wanted = Settings(slave=SlaveSettings(broker_id=7, advertise="sidecar-host:10931"))
    with pytest.raises(UsageError, match=r"slave\.bind = 127\.0\.0\.1:10931 is a loopback address"):
        services_of(wanted, broker_conf(CONF), BrokerNames(CLUSTER, BROKER))
    (service,) = services_of(settings("sidecar-host:10931"), broker_conf(CONF), BrokerNames(CLUSTER, BROKER))
    assert service.bind == "0.0.0.0:10931"


def test_an_id_without_an_address_and_an_address_without_an_id_are_contradictions() -> None:
    for slave, key in (
        (SlaveSettings(advertise="h:1"), "slave.broker_id"),
        (SlaveSettings(broker_id=3), "slave.advertise"),
    ):
        assert [found for found, _ in contradictions(Settings(slave=slave))] == [key]
    assert contradictions(Settings(slave=SlaveSettings(broker_id=3, advertise="h:1"))) == []


def test_archived_messages_come_from_the_archive_unless_disabled() -> None:
    patterns = (
        ("a*", ReadPolicy.DISABLE),
        ("b", ReadPolicy.FORCE),
        ("c", ReadPolicy.NOT_IN_DISK),
    )
    found = ReadPolicies(ReadPolicy.NOT_IN_MEM, patterns).for_slave()
    assert found.default is ReadPolicy.FORCE
    assert found.patterns == (
        ("a*", ReadPolicy.DISABLE),
        ("b", ReadPolicy.FORCE),
        ("c", ReadPolicy.FORCE),
    )
    assert ReadPolicies(ReadPolicy.DISABLE).for_slave().default is ReadPolicy.DISABLE


def test_it_is_part_of_the_status_document_and_of_the_metrics(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = replace(REPORT, slave=STATUS)
    assert decode_report(orjson.loads(encode_report(report))) == report
    assert decode_report(orjson.loads(encode_report(REPORT))).slave is None
    slave = SlaveConfig("broker-a", "10.0.0.1:10911", ("10.0.0.8:9876",), "h:10931", 7)
    service = SlaveService(SlaveOptions(slave, CLUSTER, ServeSettings()))
    monkeypatch.setattr(service, "status", lambda: STATUS)
    families = {family.name: family for family in serving_families(service)}
    registered = families["rocketmq_tiered_store_slave_registered"].samples
    assert {sample.labels["name_server"]: sample.value for sample in registered} == {
        "10.0.0.8:9876": 1,
        "10.0.0.9:9876": 0,
    }
    status_command._print(report)
    printed = capsys.readouterr().out
    assert "id 7 at h:10931, 3 connected; the master redirects no consumers (slaveReadEnable)" in printed
    assert "name server 10.0.0.9:9876: not registered: id 7 is taken" in printed
    silent = replace(STATUS, is_master_available=False, master_failure="m:1 cannot be reached: no answer")
    status_command._print(replace(REPORT, slave=silent))
    assert "the master does not answer: m:1 cannot be reached: no answer\n" in capsys.readouterr().out


async def test_proxy_and_slave_share_one_thread_and_one_archive(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two ports; the slave is registered once the archive is open, and no longer when they close."""

    name_server, master = NameServerDouble(), MasterDouble()
    name_server.addresses = {0: "127.0.0.1:1"}
    await name_server.start()
    await master.start()
    # Access control is assumed, so the slave asks the master whether this client may pull.
    fields = {"nextBeginOffset": "9", "minOffset": "9", "maxOffset": "9", "suggestWhichBrokerId": "0"}
    master.answers[11] = RemotingCommand(21, 0, ext_fields=fields)
    url, broker = f"file://{tmp_path}/archive", BrokerSettings(store_path=str(real_store("A") / "store"))
    wanted = Settings(
        archive=ArchiveSettings(url=url),
        serve=ServeSettings(bind="127.0.0.1:0", advertise="127.0.0.1:9"),
        slave=SlaveSettings(broker_id=7, advertise="127.0.0.1:8", bind="127.0.0.1:0"),
        broker=replace(broker, address=master.address, name_servers=(name_server.address,)),
    )
    backfill(real_store("A") / "store", FileStore(tmp_path / "archive"))
    names = BrokerNames(CLUSTER, BROKER)
    name_server.names = BROKER, CLUSTER

    async def opened(access: ArchiveAccess, service: RelayService[Any], opened_with: Settings) -> Any:
        if isinstance(service, SlaveService):
            return await open_handlers(None, access, service, opened_with)
        accesses.append(access)
        return FakeHandlers()

    accesses: list[ArchiveAccess] = []
    proxy, slave = services_of(wanted, broker_conf({}), names)
    assert isinstance(proxy, ProxyService) and isinstance(slave, SlaveService)
    thread = ServingThread(names, wanted, [proxy, slave], opened)
    bound = await asyncio.to_thread(thread.start)
    assert len({port for _, port in bound}) == 2
    try:
        await until(lambda: name_server.addresses.get(7) == "127.0.0.1:8", 20)
        assert proxy.status().is_archive_open and slave.status().is_archive_open and len(accesses) == 1
        client = RemotingUpstream(f"{bound[1][0]}:{bound[1][1]}", InflightLimit())
        fields = {
            "topic": "t_four",
            "queueId": "0",
            "queueOffset": "0",
            "consumerGroup": "g",
            "maxMsgNums": "5",
            "sysFlag": "4",
            "subscription": "*",
            "suspendTimeoutMillis": "0",
            "commitOffset": "0",
            "subVersion": "0",
        }
        found = await client.call(RemotingCommand(11, 0, ext_fields=fields), 10)
        assert found.code == 0 and found.ext_fields["suggestWhichBrokerId"] == "7", found.remark
        client.close()
    finally:
        await asyncio.to_thread(thread.close, 0.1)
    assert 7 not in name_server.addresses and not thread.is_alive
    await name_server.stop()
    await master.stop()
