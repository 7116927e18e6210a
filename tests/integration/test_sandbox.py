"""The processes of docker-compose.yml, started without Docker: each with its files of deploy/.

MinIO with the sandbox's accounts, name server and broker, the sidecar and gc with their own keys, Prometheus with its
configuration and alerts. Grafana cannot be installed here; its queries are sent to Prometheus.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.compose_accounts import COMPOSE, URL, minio, tiered
from tests.servers.child import ChildServer, answers, free_port
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import BROKER, MQADMIN, RocketMq
from tests.servers.running_store import RunningStore

__all__ = ["minio"]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "rocketmq-tiered.json"
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
STARTED_HERE = {"namesrv", "broker", "minio", "bucket", "sidecar", "gc", "prometheus"}
NOT_STARTED = {"store-owner": "changes an owner once", "grafana": "cannot be installed from a registry"}


def test_every_service_is_started_here_or_named() -> None:
    assert SERVICES.keys() == STARTED_HERE | NOT_STARTED.keys()


@pytest.fixture(scope="module")
def sandbox(minio: RunningStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """All processes; the address of Prometheus."""
    directory = tmp_path_factory.mktemp("sandbox")
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not on PATH")
    try:
        broker = RocketMq("5.3.3", directory)
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ is not available: {error}")
    admin, serve_admin, port = free_port(), free_port(), free_port()
    environment = {
        **{name: str(value) for name, value in SERVICES["sidecar"]["environment"].items()},
        "AWS_SHARED_CREDENTIALS_FILE": str(COMPOSE / "accounts" / "sidecar"),
        "TIERED_OBJECT_STORE__ENDPOINT_URL": minio.endpoint,
        "TIERED_BROKER__CONF_PATH": str(broker.broker_conf),
        "TIERED_BROKER__ADDRESS": broker.broker_address,
        "TIERED_ADMIN__HOST": "127.0.0.1",
        "TIERED_PROCESS__STATE_DIR": str(directory / "state"),
        "PYTHONPATH": str(ROOT),
    }

    def started_tiered(name: str, admin_port: int, *words: str) -> ChildServer:
        command = [sys.executable, "-m", "rocketmq_tiered.cli", *words]
        variables = {**environment, "TIERED_ADMIN__PORT": str(admin_port)}
        return ChildServer(
            name, command, variables, directory / f"{name}.log",
            lambda: answers(f"http://127.0.0.1:{admin_port}/{'ready' if name == 'sidecar' else 'health'}"),
        )  # fmt: skip

    sidecar = started_tiered("sidecar", admin, *SERVICES["sidecar"]["command"])
    server = started_tiered("serve", serve_admin, "serve", URL, "--bind", f"127.0.0.1:{free_port()}")
    scraper = ChildServer(
        "Prometheus",
        [
            prometheus, f"--config.file={configuration(directory, admin, serve_admin)}",
            f"--storage.tsdb.path={directory / 'metrics'}", f"--web.listen-address=127.0.0.1:{port}",
        ],
        {},
        directory / "prometheus.log",
        lambda: answers(f"http://127.0.0.1:{port}/-/ready"),
    )  # fmt: skip
    try:
        broker.start()
        broker.create_topic("orders", 4)
        for queue in range(2):
            broker.run_java(
                MQADMIN, "sendMessage", "-n", broker.name_server_address, "-t", "orders", "-b", BROKER,
                "-i", str(queue), "-p", "hello",
            )  # fmt: skip
        for one in (sidecar, server, scraper):
            one.start()
        yield f"http://127.0.0.1:{port}"
    finally:
        for one in (scraper, server, sidecar):
            one.stop(timeout_s=40)
        broker.stop()


def configuration(directory: Path, sidecar: int, serve: int) -> Path:
    """The sandbox's configuration of Prometheus with the addresses of this host, and the archive server beside."""
    text = (COMPOSE / "prometheus.yml").read_text("utf-8")
    text = text.replace("sidecar:10919", f"127.0.0.1:{sidecar}").replace(
        "/etc/prometheus", str(ROOT / "deploy/prometheus")
    )
    document = yaml.safe_load(text.replace("5s", "1s"))
    document["scrape_configs"].append(
        {"job_name": "rocketmq-tiered-serve", "static_configs": [{"targets": [f"127.0.0.1:{serve}"]}]}
    )
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(document))
    return path


def asked(prometheus: str, path: str, **parameters: str) -> Any:
    """Data of a response of Prometheus' API."""
    url = f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
        document = json.load(answer)
    assert document["status"] == "success", document
    return document["data"]


def test_prometheus_scrapes_and_no_alert_fires(sandbox: str) -> None:
    deadline_s = time.monotonic() + 30
    while len(asked(sandbox, "query", query="up == 1")["result"]) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.5)
    up = {one["metric"]["job"] for one in asked(sandbox, "query", query="up == 1")["result"]}
    assert up == {"rocketmq-tiered", "rocketmq-tiered-serve"}
    rules = [rule for group in asked(sandbox, "rules")["groups"] for rule in group["rules"]]
    assert len(rules) >= 15 and all(rule["health"] in ("ok", "unknown") for rule in rules)
    assert not [alert for alert in asked(sandbox, "alerts")["alerts"] if alert["state"] == "firing"]


EMPTY_HERE = {
    "Retention margin",  # nothing is behind
    "Object store: failures", "Requests in proxy and slave mode", "Refused and administrative requests",
    "Queues furthest behind", "Time since the last pass", "Garbage overdue", "Object store: 99th percentile",
}  # fmt: skip
"""Panels that may have no value without the mode, the failure or the age that they show."""


def test_the_dashboard_has_its_rows_and_every_query_has_values(sandbox: str) -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    assert [one["title"] for one in panels if one["type"] == "row"] == [
        "Upload", "Read", "Serve", "Retention", "Cost",
    ]  # fmt: skip
    deadline_s = time.monotonic() + 60
    empty: set[str] = set()
    while time.monotonic() < deadline_s:
        empty = {
            panel["title"]
            for panel in panels
            for target in panel.get("targets", ())
            if not asked(sandbox, "query", query=target["expr"].replace("$instance", ".+"))["result"]
        }
        if empty <= EMPTY_HERE:
            break
        time.sleep(1)
    assert empty <= EMPTY_HERE


def test_the_collector_has_its_own_account(sandbox: str, minio: RunningStore) -> None:
    command = re.search(r"tiered (gc [^;]+)", SERVICES["gc"]["command"][0])
    assert command is not None
    words = [URL if word.startswith('"$$') else word for word in command[1].split()]
    done = tiered(minio, "gc", *words)
    assert done.returncode == 0, done.stderr
