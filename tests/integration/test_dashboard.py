"""The Grafana dashboard: the query of every panel finds series of live processes in Prometheus."""

import json
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.integration.live_scene import Load, Producer, Scene
from tests.integration.troubles import Case, case
from tests.servers.child import free_port
from tests.servers.install import NotInstallableError
from tests.servers.prometheus import Prometheus
from tests.servers.proxy import Action
from tests.servers.rocketmq import RocketMq
from tests.servers.running_store import RunningStore
from tests.servers.tiered_serve import tiered_serve
from tiered.errors import UnavailableError
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "rocketmq-tiered.json"
QUEUE = {"topic": "live0", "queueId": "0"}
REQUESTS = (
    (RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "live0"}),
    (RequestCode.GET_MIN_OFFSET, QUEUE),
    (RequestCode.QUERY_CONSUMER_OFFSET, QUEUE | {"consumerGroup": "G"}),
    (RequestCode.SEND_MESSAGE, QUEUE | {"producerGroup": "P"}),
    (
        RequestCode.PULL_MESSAGE,
        QUEUE
        | {
            "consumerGroup": "G",
            "queueOffset": "0",
            "maxMsgNums": "1",
            "sysFlag": "0",
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subVersion": "0",
            "subscription": "*",
        },
    ),
    (RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "none"}),
    (
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        {
            "topic": "live0",
            "group": "G",
            "timestamp": "0",
            "isForce": "true",
        },
    ),
)


def queries() -> dict[str, str]:
    """Query by panel and its number there, of all instances."""
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return {
        f"{panel['title']} {number}": target["expr"].replace("$instance", ".*")
        for panel in panels
        for number, target in enumerate(panel.get("targets", ()))
    }


@pytest.fixture
def broker(tmp_path: Path) -> RocketMq:
    try:
        return RocketMq("5.3.3", tmp_path / "mq")
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ: {error}")


def test_every_panel_has_data(
    tmp_path: Path, broker: RocketMq, minio_url: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tiered run` in proxy mode and `tiered serve`, requests to both, a refused one, and a failure of the store."""
    try:
        prometheus = Prometheus(tmp_path / "prometheus")
    except NotInstallableError as error:
        pytest.skip(f"Prometheus: {error}")
    for name, value in minio_url.environment().items():
        monkeypatch.setenv(name, value)
    with ExitStack() as opened:
        for server in (prometheus.server, broker):
            server.start()
            opened.callback(server.stop)
        broker.create_topic("live0", 4)
        load = Load(1 << 40, 1000, 2, per_second=100)
        opened.enter_context(Producer(broker, Scene(topics=1), load, tmp_path / "load.txt"))
        found = opened.enter_context(case(tmp_path / "sidecar", broker, minio_url))
        proxy, slave = (f"127.0.0.1:{free_port()}" for _ in range(2))
        found.set(
            SERVE__BIND=proxy,
            SERVE__ADVERTISE=proxy,
            SLAVE__BIND=slave,
            SLAVE__ADVERTISE=slave,
            SLAVE__BROKER_ID=7,
            GC__EVERY_MS=5000,
        )
        found.sidecar.start()
        found.sidecar.wait_until_following(60)
        port = free_port()
        serve, served = tiered_serve(
            found.sidecar.url, tmp_path, "--endpoint-url", minio_url.endpoint, "--set", f"admin.port={port}"
        )
        serve.start()
        opened.callback(serve.stop)
        prometheus.scrape("run", found.admin.removeprefix("http://"))
        prometheus.scrape("serve", f"127.0.0.1:{port}")
        deadline_s, left = time.monotonic() + 120, queries()
        while left:
            _use(found, proxy, slave, served)
            # Of a broker that answers there are no failures; the query is made all the same.
            left = {
                name: query
                for name, query in left.items()
                if not prometheus.query(query) and "_failed_total" not in query
            }
            assert time.monotonic() < deadline_s, left
            time.sleep(2)


def _use(found: Case, *addresses: str) -> None:
    """Requests that are answered, relayed and refused, and one that the store refuses."""
    found.answers_with(Action.SLOW_DOWN)
    time.sleep(1)
    found.answers_with(Action.PASS)
    for address in addresses:
        client = BrokerClient(address, 5)
        for code, fields in REQUESTS:
            with suppress(UnavailableError):
                client.call(code, fields)
        client.close()
