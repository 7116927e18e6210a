"""A façade whose clients come by IPv6, beside a broker that is dialled by IPv4."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.client_scene import all_there_is, delete_old_files, need_clients
from tests.integration.facade_scene import beside_facade
from tests.servers.running_store import RunningStore
from tiered.formats import fastjson

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(300)]


def test_clients_that_come_by_ipv6_read_archive_and_broker_as_one(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    need_clients("5.3.3")
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    with beside_facade(tmp_path, minio_url, {}, {}, host="[::1]") as facade:
        facade.fill(4000)
        facade.wait_until_serving()
        assert delete_old_files(facade) > 100
        route = fastjson.loads(facade.mqadmin("topicRoute", "-t", "live0"))
        assert route["brokerDatas"][0]["brokerAddrs"] == {
            "0": facade.address,
            "1": facade.broker.broker_address,
        }
        wanted = all_there_is(facade, "live0")
        got = facade.consume("push", "G-six", len(wanted))
        assert Counter(got.finish()) == Counter(wanted)
        assert facade.sidecar.stop() == 0
