"""Unmodified Java clients beside a live broker: their name server address is the sidecar's, nothing else changes."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.integration.client_scene import (
    QUEUES,
    all_there_is,
    broker_range,
    delete_old_files,
    everything,
    need_clients,
)
from tests.integration.proxy_scene import ProxyScene, proxy_beside_broker
from tests.servers.rocketmq import BROKER, CLUSTER
from tests.servers.running_store import RunningStore
from tiered.formats import fastjson

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def progress(tiered_proxy: ProxyScene, group: str, topic: str) -> dict[int, tuple[int, int]]:
    """Queue id -> (broker's, consumer's) offset, as the real broker tells mqadmin."""
    printed = tiered_proxy.mqadmin("consumerProgress", "-g", group, real=True)
    rows = [line.split() for line in printed.splitlines() if line.startswith(topic)]
    return {int(row[2]): (int(row[3]), int(row[4])) for row in rows}


@pytest.fixture(scope="module")
def tiered_proxy(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[ProxyScene]:
    need_clients("4.9.7", "5.3.3", "5.5.0")
    with proxy_beside_broker(tmp_path_factory.mktemp("tiered_proxy"), minio_url, {}, {}) as found:
        found.fill(4000)
        found.wait_until_serving()
        yield found
        found.end_children()
        assert found.sidecar.stop() == 0, found.sidecar.log.read_text()[-2000:]


def test_routes_show_the_sidecar_before_the_broker(tiered_proxy: ProxyScene) -> None:
    printed, cluster = tiered_proxy.tools(["topicRoute -t live0", "clusterList"])
    route = fastjson.loads(printed)
    (broker,) = route["brokerDatas"]
    assert broker["brokerName"] == BROKER
    assert broker["brokerAddrs"] == {"0": tiered_proxy.address, "1": tiered_proxy.broker.broker_address}
    real = fastjson.loads(tiered_proxy.mqadmin("topicRoute", "-t", "live0", real=True))
    assert real["brokerDatas"][0]["brokerAddrs"] == {"0": tiered_proxy.broker.broker_address}
    assert route["queueDatas"] == real["queueDatas"]
    assert [line.split()[:4] for line in cluster.splitlines() if line.startswith(CLUSTER)] == [
        [CLUSTER, BROKER, "0", tiered_proxy.address],
        [CLUSTER, BROKER, "1", tiered_proxy.broker.broker_address],
    ]


def test_two_members_share_the_queues_and_are_listed_once_each(tiered_proxy: ProxyScene) -> None:
    members = [tiered_proxy.consume("push", "G-two", 10**6) for _ in range(2)]
    wanted = all_there_is(tiered_proxy, "live0")
    deadline_s = time.monotonic() + 60
    while sum(len(member.lines()) for member in members) < len(wanted):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    (status,) = [
        group for group in tiered_proxy.sidecar.status()["proxy"]["groups"] if group["name"] == "G-two"
    ]
    assert status["members"] == 2 and status["archivePulls"] + status["brokerPulls"] > 0
    printed = tiered_proxy.mqadmin("consumerConnection", "-g", "G-two")
    listed = [line.split()[1] for line in printed.splitlines() if line[:1].isdigit() and "@" in line]
    assert len(listed) == len(set(listed)) == 2, printed
    for member in members:
        member.kill()
    assert {line for member in members for line in member.lines()} == wanted


def test_a_group_reads_from_the_archive_on_into_what_is_sent_now(tiered_proxy: ProxyScene) -> None:
    """The broker has deleted most of it. From offset 0 nothing is missing, nothing comes twice, what failed
    comes again, and an orderly group stays in order. Clients of three versions."""
    assert delete_old_files(tiered_proxy) > 100
    wanted = len(all_there_is(tiered_proxy, "live0")) + 1000
    with tiered_proxy.produce(2000, per_second=200) as producer:
        plain = tiered_proxy.consume("push", "G-cold", wanted, version="4.9.7")
        orderly = tiered_proxy.consume("orderly", "G-cold-orderly", wanted, version="5.5.0")
        retried = tiered_proxy.consume("push", "G-cold-retry", wanted, topic="live1", failures=1)
        producer.finish(120)  # a busy broker refuses some: consumers end for want of them
        got, in_order = plain.finish(), orderly.finish()
        assert retried.child.wait(120) == 0
    ends = [broker_range(tiered_proxy, "live0", queue)[1] for queue in range(QUEUES)]
    assert Counter(got) == Counter(in_order) == Counter(everything(ends))
    for queue, end in enumerate(ends):
        assert [offset for q, offset in in_order if q == queue] == list(range(end))
    consumed = [fields[4] for fields in retried.fields() if fields[8] == "ok"]
    failed = {fields[4] for fields in retried.fields() if fields[8] == "back"}
    assert len(set(consumed)) == len(all_there_is(tiered_proxy, "live1")) and set(consumed) == failed
    assert progress(tiered_proxy, "G-cold", "live0") == {queue: (end, end) for queue, end in enumerate(ends)}
    printed = tiered_proxy.mqadmin("topicStatus", "-t", "live0")
    rows = [line.split() for line in printed.splitlines() if line.startswith(BROKER)]
    assert {(int(row[1]), int(row[2]), int(row[3])) for row in rows} == {
        (q, 0, n) for q, n in enumerate(ends)
    }
