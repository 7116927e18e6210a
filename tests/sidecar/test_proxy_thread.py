"""The proxy inside `tiered run`: where it stands, and the life of its thread."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest

from fetcher.access import ArchiveAccess, open_async_access
from fetcher.policy.read_policy import BrokerSide, LocalView, Residency
from server.groups.client_table import ClientTable
from server.proxy.group_reads import GroupReading
from server.proxy.proxy_service import ProxyConfig, ProxyService
from server.proxy.proxy_status import ProxyStatus
from sidecar.proxy_answers import MergedAnswers
from sidecar.proxy_metrics import ProxyCollector, serving_report
from sidecar.proxy_place import proxy_config
from sidecar.proxy_thread import ProxyOrder, proxy_port
from sidecar.report import decode_report, encode_report
from sidecar.serving_thread import ServingThread
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.servers.child import free_port
from tests.sidecar.answers_double import Answers
from tests.sidecar.status_report import REPORT
from tiered.broker_store.conf import broker_conf
from tiered.broker_store.names import BrokerNames
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
    TopicSettings,
)

CONF = broker_conf(
    {"brokerIP1": "10.0.0.1", "listenPort": "10911", "namesrvAddr": "10.0.0.8:9876;10.0.0.9:9876"}
)
ADVERTISED = Settings(serve=ServeSettings(advertise="broker-host:9876"))


class Away:
    """Stands for a broker that is away."""

    has_broker = True

    async def look(self) -> LocalView:
        return LocalView(BrokerSide.AWAY)

    async def residency(self) -> Residency:
        return Residency.NOT_ASKED


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_the_place_comes_from_broker_conf_unless_settings_say_otherwise() -> None:
    found = proxy_config(ADVERTISED, CONF, "broker-a")
    assert found == ProxyConfig(
        "broker-a", "10.0.0.1:10911", ("10.0.0.8:9876", "10.0.0.9:9876"), "broker-host:9876"
    )
    broker = BrokerSettings(address="127.0.0.1:1", name_servers=("127.0.0.1:2",))
    found = proxy_config(replace(ADVERTISED, broker=broker), CONF, "broker-a")
    assert (found.broker_address, found.name_servers) == ("127.0.0.1:1", ("127.0.0.1:2",))


@pytest.mark.parametrize(
    ("advertise", "properties", "complaint"),
    [
        ("host", {}, "serve.advertise"),
        ("0.0.0.0:9876", {}, "no address that clients can dial"),
        ("[::]:9876", {}, "no address that clients can dial"),
        ("h:9876", {"namesrvAddr": "n:1"}, "where is the broker"),
        ("h:9876", {"brokerIP1": "10.0.0.1"}, "where are the name servers"),
        ("h:9876", {"brokerIP1": "10.0.0.1", "namesrvAddr": "h:9876"}, "of the broker or a name server itself"),
        ("10.0.0.1:10911", {"brokerIP1": "10.0.0.1", "namesrvAddr": "n:1"}, "of the broker or a name server"),
        ("h:9876", {"brokerIP1": "10.0.0.1", "namesrvAddr": "n"}, "broker.name_servers"),
    ],
)  # fmt: skip
def test_impossible_places_are_refused(advertise: str, properties: dict[str, str], complaint: str) -> None:
    settings = Settings(serve=ServeSettings(advertise=advertise))
    with pytest.raises(UsageError, match=complaint):
        proxy_config(settings, broker_conf(properties), "broker-a")


@dataclass(frozen=True)
class Serving:
    """A proxy alone in its thread."""

    proxy: ProxyService
    thread: ServingThread


def thread_at(url: str, port: int, answers: Answers) -> Serving:
    settings = Settings(archive=ArchiveSettings(url=url), serve=ServeSettings(bind=f"127.0.0.1:{port}"))
    place = ProxyConfig(BROKER, "127.0.0.1:1", ("127.0.0.1:1",), "127.0.0.1:9")

    async def make(access: ArchiveAccess, service: ProxyService) -> Answers:
        assert access.broker == BROKER
        return answers

    service, proxy = proxy_port(ProxyOrder(place, make), settings)
    return Serving(service, ServingThread(BrokerNames(CLUSTER, BROKER), settings, [proxy]))


def test_it_serves_before_there_is_an_archive_and_opens_one_that_appears(
    real_store: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers()
    served = thread_at(f"file://{tmp_path}/archive", 0, answers)
    ((_, port),) = served.thread.start()
    client = BrokerClient(f"127.0.0.1:{port}", 5)
    try:
        assert client.call(11, {"topic": "T"}).code == 2, "not before the archive is open"
        assert client.call(103).code == 16
        assert not served.proxy.status().is_archive_open
        backfill(real_store("A") / "store", FileStore(tmp_path / "archive"))
        until(lambda: served.proxy.status().is_archive_open)
        policies = ReadSettings(policy="FORCE")
        served.thread.apply(Settings(read=policies))
        until(lambda: Settings(read=policies) in answers.applied)
        assert "values of before" not in caplog.text, "read policies are in force at once"
        limited = FetchSettings(bytes_per_s=1 << 20, user_requests=9)
        served.thread.apply(Settings(read=policies, fetch=limited))
        until(lambda: "clients are served by the values of before until a restart" in caplog.text)
        (said,) = (record for record in caplog.records if "values of before" in record.message)
        assert vars(said)["keys"] == ["fetch.user_requests", "fetch.bytes_per_s"]
        names = {
            family.name for family in ProxyCollector(served.proxy.status, served.proxy.counters).collect()
        }
        assert "rocketmq_tiered_store_serve_connections" in names
    finally:
        client.close()
        served.thread.close(0.1)
    assert answers.is_closed and not served.thread.is_alive
    served.thread.apply(Settings())  # too late, and harmless


def test_what_clients_keep_until_a_restart_is_told_also_before_there_is_an_archive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ports are made as the process starts: another broker's address is the uploader's alone."""
    served = thread_at(f"file://{tmp_path}/archive", 0, Answers())
    served.thread.start()
    try:
        served.thread.apply(
            Settings(
                broker=BrokerSettings(address="127.0.0.1:2", request_timeout_ms=99),
                topics=TopicSettings(exclude=("noise-*",)),
                fetch=FetchSettings(user_requests=9),
                serve=ServeSettings(pull_messages_max=9),
            )
        )
        until(lambda: "values of before" in caplog.text)
        (said,) = (record for record in caplog.records if "values of before" in record.message)
        assert vars(said)["keys"] == ["broker.address", "serve.pull_messages_max"]
    finally:
        served.thread.close(0.1)


def test_what_is_archived_from_a_reload_on_is_known_to_who_decides_pulls(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    """A topic taken as never archived would let its readers pass what is on its way into the archive."""

    async def whole() -> None:
        settings = Settings(
            archive=ArchiveSettings(url=f"file://{tmp_path}/archive"),
            broker=BrokerSettings(store_path=str(real_store("A") / "store")),
            topics=TopicSettings(exclude=("orders",)),
        )
        access = open_async_access(settings.archive.url, cluster=CLUSTER, broker=BROKER, settings=settings)
        merged = await MergedAnswers.opened(access, ClientTable(time.monotonic), settings, None)
        try:
            look = Away()
            assert not (await merged.line.situation(look, "orders", 0, 0)).is_admitted
            merged.apply(replace(settings, topics=TopicSettings(exclude=("noise-*",))))
            assert (await merged.line.situation(look, "orders", 0, 0)).is_admitted
            assert not (await merged.line.situation(look, "noise-1", 0, 0)).is_admitted
        finally:
            merged.close()
            await asyncio.to_thread(access.close)

    backfill(real_store("A") / "store", FileStore(tmp_path / "archive"))
    asyncio.run(whole())


def test_a_commit_of_this_process_is_seen_at_once(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    store = FileStore(tmp_path / "archive")
    backfill(real_store("A") / "store", store)
    answers = Answers()
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


def test_who_is_served_is_part_of_the_status_document() -> None:
    reading = GroupReading("g", 2, 30, 4, 5)
    served = serving_report(ProxyStatus("host:9876", 3, 2, True, [("g", 2)], (reading,)))
    report = replace(REPORT, serving=served)
    assert decode_report(orjson.loads(encode_report(report))) == report
    assert decode_report(orjson.loads(encode_report(REPORT))).serving is None


def test_a_port_in_use_is_a_usage_error(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        served = thread_at(f"file://{tmp_path}/archive", port, Answers())
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
            served.thread.start()
    served.thread.close(0.1)
    assert not served.thread.is_alive
