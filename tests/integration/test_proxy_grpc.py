"""POP in proxy mode is relayed: a RocketMQ 5 proxy uses the tiered proxy as its name server, and its clients pop."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.integration.client_scene import Job, all_there_is, delete_old_files, need_clients
from tests.integration.proxy_scene import ProxyScene, proxy_beside_broker
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import CLUSTER, run_java
from tests.servers.rocketmq_proxy import PROXY_VERSION, RocketMqProxy
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(400)]


@dataclass
class Proxied:
    """A proxy before the tiered proxy."""

    tiered_proxy: ProxyScene
    proxy: RocketMqProxy

    def receive(self, group: str, wanted: int, *, forget: int = 0, idle_s: int = 10) -> list[list[str]]:
        """What a gRPC simple consumer of live0 got: see GrpcConsume.java."""
        output = self.tiered_proxy.directory / f"{group}-grpc.txt"
        self.proxy.consume(
            group, "live0", str(wanted), str(idle_s), str(output), "10", "*", str(forget), timeout_s=150
        )
        return [line.split(" ") for line in output.read_text("utf-8").splitlines()]

    def ids(self, name: str) -> set[str]:
        """Unique keys of all that the broker has of live0."""
        job = Job("pull", f"P-{name}", 10**6, idle_s=2)
        return {fields[4] for fields in self.tiered_proxy.consume_all("5.3.3", [job], real=True)[0]}


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore) -> Iterator[Proxied]:
    need_clients(PROXY_VERSION)
    with proxy_beside_broker(
        tmp_path_factory.mktemp("proxied"), minio_url, {"cleanResourceInterval": 1000}, {}
    ) as tiered_proxy:
        tiered_proxy.fill(1000, 400)
        tiered_proxy.wait_until_serving()
        try:
            proxy = RocketMqProxy(tiered_proxy.directory / "proxy", tiered_proxy.address, CLUSTER)
        except NotInstallableError as error:
            pytest.skip(f"proxy: {error}")
        with proxy:
            yield Proxied(tiered_proxy, proxy)


def test_a_grpc_client_receives_and_acknowledges(proxied: Proxied) -> None:
    """What it does not acknowledge comes again, what it acknowledged does not."""
    proxied.receive("G-grpc", 1, idle_s=3)  # a group that is new to the broker may begin at the end
    before = proxied.ids("before")
    proxied.tiered_proxy.fill(400, 200)
    new = proxied.ids("after") - before
    assert len(new) > 100
    found = proxied.receive("G-grpc", 10**6, forget=10, idle_s=15)
    assert new <= set(Counter(line[2] for line in found if line[5] == "ok"))
    forgot = {line[2] for line in found if line[5] == "forgot"}
    assert len(forgot) == 10 and forgot <= {line[2] for line in found if line[4] == "2"}
    assert proxied.receive("G-grpc", 1, idle_s=12) == []


def test_a_client_that_pops_does_so_by_the_proxy(proxied: Proxied) -> None:
    tiered_proxy = proxied.tiered_proxy
    tiered_proxy.mqadmin(
        "setConsumeMode", "-b", tiered_proxy.broker.broker_address, "-t", "live0", "-g", "G-pop", "-m", "POP"
    )
    wanted = proxied.ids("pop")
    consumer = tiered_proxy.consume("pop", "G-pop", len(wanted), idle_s=25, failures=1)
    assert consumer.child.wait(120) == 0
    done = {fields[4] for fields in consumer.fields() if fields[8] == "ok"}
    assert done == wanted
    assert any(fields[8] == "back" for fields in consumer.fields()), "what failed came again"


def test_a_remoting_client_of_the_proxy_reads_the_archive(proxied: Proxied) -> None:
    """Its pulls come to the tiered proxy like any client's.

    The proxy drops answers if the connection is full (apache/rocketmq#8159). The queue continues when the
    client asks again, after 30 s. A client whose first heartbeat comes late shares out its queues 20 s later.
    """
    tiered_proxy = proxied.tiered_proxy
    # Of what pops leave behind little is archived at once: the archive is not waited for.
    delete_old_files(tiered_proxy, wait=False)
    wanted = all_there_is(tiered_proxy, "live0")
    output = tiered_proxy.directory / "remoting.txt"
    arguments = Job("push", "G-remoting", len(wanted), idle_s=45).arguments(output)
    run_java(
        PROXY_VERSION,
        tiered_proxy.directory,
        "Consume",
        proxied.proxy.remoting_address,
        *arguments,
        timeout_s=180,
    )
    found = Counter((int(line.split()[0]), int(line.split()[1])) for line in output.read_text().splitlines())
    assert found == Counter(wanted)
