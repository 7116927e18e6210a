"""Serving in `tiered run`: addresses of proxy mode, handlers, and the thread from start to close."""

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from fetcher.access import ArchiveAccess, open_async_access
from fetcher.policy.read_policy import BrokerSide, LocalView, Residency
from rocketmq_tiered.process.broker_side import checks_clients, missing_rules
from rocketmq_tiered.process.report import decode_report, encode_report
from rocketmq_tiered.process.serving import (
    MergedHandlers,
    ServingThread,
    needs_account,
    proxy_config,
    services_of,
)
from rocketmq_tiered.process.serving_metrics import serving_families
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.proxy.proxy_service import ProxyConfig, ProxyService
from rocketmq_tiered.server.proxy.relay_service import RelayService
from rocketmq_tiered.server.proxy.relay_status import GroupReading, ProxyStatus
from rocketmq_tiered.server.proxy.timer_gateway import GatewayConfig
from rocketmq_tiered.server.security.audit import AuditEvent
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.process.handlers_double import FakeHandlers
from tests.process.status_report import REPORT
from tests.servers.child import free_port
from tiered.broker_store.conf import BrokerConf, BrokerNames, broker_conf, parse_java_properties
from tiered.clock import Clock
from tiered.errors import UsageError
from tiered.object_store.file import FileStore
from tiered.remoting.client import BrokerClient
from tiered.settings.sections import (
    ArchiveSettings,
    BrokerSettings,
    FetchSettings,
    ReadSettings,
    ServeSettings,
    Settings,
    SlaveSettings,
    TopicSettings,
)

CONF = broker_conf(
    {"brokerIP1": "10.0.0.1", "listenPort": "10911", "namesrvAddr": "10.0.0.8:9876;10.0.0.9:9876"}
)
RESTART = "for clients, these changed settings take effect when tiered run is restarted"
ADVERTISED = Settings(serve=ServeSettings(advertise="broker-host:9876"))


class Away:
    """A broker that is away."""

    async def local_view(self) -> LocalView:
        return LocalView(BrokerSide.AWAY)

    async def residency(self) -> Residency:
        return Residency.NOT_CHECKED


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_addresses_come_from_settings_or_else_from_broker_conf() -> None:
    found = proxy_config(ADVERTISED, CONF, "broker-a")
    assert found == ProxyConfig(
        "broker-a",
        "10.0.0.1:10911",
        ("10.0.0.8:9876", "10.0.0.9:9876"),
        "broker-host:9876",
        timers=GatewayConfig("TIERED_TIMERS", 2 * 365 * 86_400_000, 3_600_000),
    )
    broker = BrokerSettings(address="127.0.0.1:1", name_servers=("127.0.0.1:2",))
    found = proxy_config(replace(ADVERTISED, broker=broker), CONF, "broker-a")
    assert (found.broker_address, found.name_servers) == ("127.0.0.1:1", ("127.0.0.1:2",))


@pytest.mark.parametrize(
    ("advertise", "properties", "complaint"),
    [
        ("host", {}, "serve.advertise"),
        ("0.0.0.0:9876", {}, "not an address that clients can dial"),
        ("[::]:9876", {}, "not an address that clients can dial"),
        ("h:9876", {"namesrvAddr": "n:1"}, "the broker's address is not known"),
        ("h:9876", {"brokerIP1": "10.0.0.1"}, "name servers are not known"),
        (
            "h:9876",
            {"brokerIP1": "10.0.0.1", "namesrvAddr": "h:9876"},
            "address of the broker or of a name server",
        ),
        ("10.0.0.1:10911", {"brokerIP1": "10.0.0.1", "namesrvAddr": "n:1"}, "address of the broker"),
        ("h:9876", {"brokerIP1": "10.0.0.1", "namesrvAddr": "n"}, "broker.name_servers"),
    ],
)
def test_impossible_addresses_are_refused(advertise: str, properties: dict[str, str], complaint: str) -> None:
    settings = Settings(serve=ServeSettings(advertise=advertise))
    with pytest.raises(UsageError, match=complaint):
        proxy_config(settings, broker_conf(properties), "broker-a")


@dataclass(frozen=True)
class Serving:
    """Proxy mode alone on its thread."""

    proxy: ProxyService
    thread: ServingThread


def thread_at(url: str, port: int, answers: FakeHandlers) -> Serving:
    settings = Settings(archive=ArchiveSettings(url=url), serve=ServeSettings(bind=f"127.0.0.1:{port}"))
    config = ProxyConfig(BROKER, "127.0.0.1:1", ("127.0.0.1:1",), "127.0.0.1:9")

    async def opened(access: ArchiveAccess, service: RelayService[Any], settings: Settings) -> FakeHandlers:
        assert access.broker == BROKER
        return answers

    service = ProxyService(config, settings.serve, settings.read)
    return Serving(service, ServingThread(BrokerNames(CLUSTER, BROKER), settings, [service], opened))


def test_it_listens_before_the_archive_exists_and_opens_it_later(
    real_store: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = FakeHandlers()
    served = thread_at(f"file://{tmp_path}/archive", 0, answers)
    ((_, port),) = served.thread.start()
    client = BrokerClient(f"127.0.0.1:{port}", 5)
    try:
        assert client.call(11, {"topic": "T"}).code == 2, "the archive is not open yet"
        assert client.call(103).code == 16
        assert not served.proxy.status().is_archive_open
        backfill(real_store("A") / "store", FileStore(tmp_path / "archive"))
        until(lambda: served.proxy.status().is_archive_open)
        policies = ReadSettings(policy="FORCE")
        served.thread.apply(Settings(read=policies))
        until(lambda: Settings(read=policies) in answers.applied)
        assert RESTART not in caplog.text, "read policies apply at once"
        limited = FetchSettings(bytes_per_s=1 << 20, memory_bytes=99 << 20)
        served.thread.apply(Settings(read=policies, fetch=limited))
        until(lambda: RESTART in caplog.text)
        (said,) = (record for record in caplog.records if RESTART in record.message)
        assert said.message.endswith(": fetch.memory_bytes, fetch.bytes_per_s")
        families = {family.name: family for family in serving_families(served.proxy)}
        assert "rocketmq_tiered_store_proxy_connections" in families
        assert "rocketmq_tiered_store_proxy_refused_proxy_headers" in families
        audited = families["rocketmq_tiered_store_proxy_audited"].samples
        assert {one.labels["event"] for one in audited} == set(AuditEvent)
    finally:
        client.close()
        served.thread.close(0.1)
    assert answers.is_closed and not served.thread.is_alive
    served.thread.apply(Settings())  # ignored after close


async def test_a_reload_changes_which_topics_count_as_archived(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    """Readers of a topic that counts as never archived would skip messages that are about to be archived."""

    backfill(real_store("A") / "store", FileStore(tmp_path / "archive"))
    settings = Settings(
        archive=ArchiveSettings(url=f"file://{tmp_path}/archive"),
        broker=BrokerSettings(store_path=str(real_store("A") / "store")),
        topics=TopicSettings(exclude=("orders",)),
    )
    access = open_async_access(settings.archive.url, cluster=CLUSTER, broker=BROKER, settings=settings)
    merged = await MergedHandlers.opened(access, ClientTable(Clock()), settings, None, None)
    try:
        look = Away()
        assert not (await merged.router.situation(look, "orders", 0, 0)).is_admitted
        merged.apply(replace(settings, topics=TopicSettings(exclude=("noise-*",))))
        assert (await merged.router.situation(look, "orders", 0, 0)).is_admitted
        assert not (await merged.router.situation(look, "noise-1", 0, 0)).is_admitted
    finally:
        merged.close()
        await asyncio.to_thread(access.close)


def test_a_commit_of_this_process_is_adopted_at_once(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    store = FileStore(tmp_path / "archive")
    backfill(real_store("A") / "store", store)
    answers = FakeHandlers()
    served = thread_at(f"file://{tmp_path}/archive", 0, answers)
    served.thread.start()
    try:
        until(lambda: served.proxy.status().is_archive_open)
        access = served.thread._access
        assert access is not None
        newer = replace(access.state, version=access.state.version + 1)
        served.thread.adopt(newer)
        assert access.state is newer
        until(lambda: answers.commits == 1)
    finally:
        served.thread.close(0.1)


def test_proxy_mode_is_part_of_the_status_document() -> None:
    reading = GroupReading("g", 2, 30, 4, 5)
    status = ProxyStatus("host:9876", 3, True, (reading,), 2, has_plain_accounts=True)
    report = replace(REPORT, proxy=status)
    assert decode_report(orjson.loads(encode_report(report))) == report
    assert decode_report(orjson.loads(encode_report(REPORT))).proxy is None


def test_a_port_in_use_is_a_usage_error(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        served = thread_at(f"file://{tmp_path}/archive", port, FakeHandlers())
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
            served.thread.start()
    served.thread.close(0.1)
    assert not served.thread.is_alive


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("brokerName=a\n", False),
        ("aclEnable = true\n", True),
        ("aclEnable=false\n", False),
        ("authenticationEnabled=TRUE\n", True),
        ("authorizationEnabled=true\n", True),
    ],
)
def test_the_configuration_file_shows_whether_the_broker_has_access_control(
    text: str, expected: bool
) -> None:
    assert checks_clients(broker_conf(parse_java_properties(text))) is expected


@pytest.mark.parametrize(
    ("conf", "words"),
    [(None, "requires broker.conf"), (broker_conf({"aclEnable": "true"}), "requires serve.acl_file")],
)
@pytest.mark.parametrize("section", ["serve", "slave"])
def test_beside_access_control_clients_are_served_by_rules_only(
    conf: BrokerConf | None, words: str, section: str
) -> None:
    names = BrokerNames("c", "b")
    settings = replace(
        Settings(slave=SlaveSettings(advertise="h:2" if section == "slave" else "")),
        serve=ServeSettings(advertise="h:1" if section == "serve" else ""),
    )
    with pytest.raises(UsageError, match=f"{section}.advertise {words}"):
        services_of(settings, conf, names)
    with_rules = replace(settings, serve=replace(settings.serve, acl_file="rules.yml"))
    assert missing_rules(with_rules, conf) is None
    assert missing_rules(Settings(), conf) is None


def test_whether_clients_need_an_account_follows_broker_conf(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    settings = replace(Settings(), broker=BrokerSettings(conf_path=str(conf)))
    assert needs_account(settings), "it cannot be read"
    for text, expected in (("aclEnable=false\n", False), ("aclEnable=true\n", True)):
        conf.write_text(text)
        assert needs_account(settings) is expected
    assert not needs_account(Settings())
