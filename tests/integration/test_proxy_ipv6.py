"""Proxy mode with IPv6 clients, beside brokers that register and stamp messages with IPv4 or IPv6 addresses."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.client_scene import all_there_is, delete_old_files, need_clients, until
from tests.integration.proxy_scene import ProxyScene, proxy_beside_broker
from tests.servers.rocketmq import BROKER
from tests.servers.running_store import RunningStore
from tiered.catalog.catalog_reader import load
from tiered.errors import NotFoundError
from tiered.formats import fastjson
from tiered.remoting.client import BrokerClient

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(300)]


def archived_phys(tiered_proxy: ProxyScene) -> int:
    try:
        return load(tiered_proxy.sidecar.open_archive()).cursor.phys
    except NotFoundError:
        return 0


@pytest.mark.parametrize("broker_host", ["127.0.0.1", "[::1]"])
def test_clients_that_come_by_ipv6_read_archive_and_broker_as_one(
    broker_host: str, tmp_path: Path, minio_url: RunningStore
) -> None:
    need_clients("5.3.3")
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    config = {} if broker_host == "127.0.0.1" else {"brokerIP1": broker_host, "bindAddress": "::"}
    with proxy_beside_broker(tmp_path, minio_url, config, {}, host="[::1]") as tiered_proxy:
        tiered_proxy.fill(4000)
        tiered_proxy.wait_until_serving()
        with closing(BrokerClient(tiered_proxy.broker.broker_address, 5)) as client:
            end = client.confirm_offset()  # an IPv6 broker fails to tell of its running
        assert end
        until(lambda: archived_phys(tiered_proxy) >= end, "not archived", 120)
        assert delete_old_files(tiered_proxy, wait=False) > 100
        route = fastjson.loads(tiered_proxy.mqadmin("topicRoute", "-t", "live0"))
        port = tiered_proxy.broker.broker_address.rpartition(":")[2]
        assert route["brokerDatas"][0]["brokerAddrs"] == {
            "0": tiered_proxy.address,
            "1": f"{broker_host}:{port}",
        }
        wanted = all_there_is(tiered_proxy, "live0")
        got = tiered_proxy.consume("push", "G-six", len(wanted))
        assert Counter(got.finish()) == Counter(wanted)
        printed = tiered_proxy.mqadmin("queryMsgByOffset", "-t", "live0", "-b", BROKER, "-i", "0", "-o", "0")
        assert f"{broker_host.strip('[]')}" in printed.replace("0:0:0:0:0:0:0:1", "::1"), printed
        assert tiered_proxy.sidecar.stop() == 0
