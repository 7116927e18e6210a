"""A façade whose clients come by IPv6, beside brokers that are listed, and stamp their messages, by either family."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.client_scene import all_there_is, delete_old_files, need_clients, until
from tests.integration.proxy_scene import Facade, beside_facade
from tests.servers.rocketmq import BROKER
from tests.servers.running_store import RunningStore
from tiered.catalog.protocol import load
from tiered.errors import NotFoundError
from tiered.formats import fastjson
from tiered.remoting.client import BrokerClient

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(300)]


def archived_phys(facade: Facade) -> int:
    try:
        return load(facade.sidecar.open_archive()).cursor.phys
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
    with beside_facade(tmp_path, minio_url, config, {}, host="[::1]") as facade:
        facade.fill(4000)
        facade.wait_until_serving()
        with closing(BrokerClient(facade.broker.broker_address, 5)) as client:
            end = client.confirm_offset()  # an IPv6 broker fails to tell of its running
        assert end
        until(lambda: archived_phys(facade) >= end, "not archived", 120)
        assert delete_old_files(facade, wait=False) > 100
        route = fastjson.loads(facade.mqadmin("topicRoute", "-t", "live0"))
        port = facade.broker.broker_address.rpartition(":")[2]
        assert route["brokerDatas"][0]["brokerAddrs"] == {"0": facade.address, "1": f"{broker_host}:{port}"}
        wanted = all_there_is(facade, "live0")
        got = facade.consume("push", "G-six", len(wanted))
        assert Counter(got.finish()) == Counter(wanted)
        told = facade.mqadmin("queryMsgByOffset", "-t", "live0", "-b", BROKER, "-i", "0", "-o", "0")
        assert f"{broker_host.strip('[]')}" in told.replace("0:0:0:0:0:0:0:1", "::1"), told
        assert facade.sidecar.stop() == 0
