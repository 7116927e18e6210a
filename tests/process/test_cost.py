"""`tiered cost`: its output, and the counters that it reads from a running instance."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from rocketmq_tiered.cli import main
from rocketmq_tiered.process.admin import AdminServer
from rocketmq_tiered.process.instance import InstanceDescription, StateDirectory
from rocketmq_tiered.process.metrics import registry_of, store_families
from rocketmq_tiered.process.request_counts import counts_in
from tests.process.page_scene import Alive
from tiered.errors import UsageError
from tiered.object_store.request_metrics import StoreMetrics

Run = Callable[..., tuple[int, str, str]]


def metrics_text() -> str:
    metrics = StoreMetrics()
    for _ in range(3):
        metrics.record("put", 0.1, 1000, None)
    metrics.record("get_range", 0.1, 50, None)
    metrics.record("list", 0.1, 0, "ThrottledError")
    return generate_latest(registry_of(lambda: store_families(metrics))).decode()


class Source(Alive):
    """An AdminSource with metrics only."""

    def metrics(self) -> bytes:
        return metrics_text().encode()


@pytest.fixture(scope="module")
def url(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    place = f"file://{tmp_path_factory.mktemp('cost')}"
    assert main(["backfill", str(real_store("F") / "store"), place, "--json"]) == 0
    return place


def test_counters_are_read_from_the_metrics_as_served() -> None:
    counts = counts_in(metrics_text(), 60.0)
    assert counts.requests == {"put": 3, "get_range": 1, "list": 1}
    assert (counts.uploaded_bytes, counts.downloaded_bytes) == (3000, 50)
    assert (counts.gets, counts.lists) == (1, 1)


def test_an_archive_without_a_running_instance(run: Run, url: str) -> None:
    code, out, err = run("cost", url)
    assert code == 0 and not err
    assert "reads and lists are not included" in out
    assert "prices: AWS S3 Standard, us-east-1" in out
    document = json.loads(run("cost", url, "--json")[1])
    assert document["counters"] is None and document["month"]["gets"] is None
    assert sum(topic["messages"] for topic in document["topics"]) == 18_004
    kinds = {kind["kind"]: kind for kind in document["kinds"]}
    stored = kinds["data of many queues"]["bytes"]
    assert sum(topic["storedBytes"] for topic in document["topics"]) == pytest.approx(stored, abs=10)
    assert document["storedBytes"] == sum(kind["bytes"] for kind in kinds.values())
    assert document["compaction"] == json.loads(run("compact", url, "--json")[1])
    assert out.endswith(run("compact", url)[1].partition("dry run")[2])


def test_a_running_instance_has_its_counters_included(run: Run, url: str, tmp_path: Path) -> None:
    names = json.loads(run("cost", url, "--json")[1])
    server = AdminServer("127.0.0.1", 0, Source())
    try:
        with StateDirectory(tmp_path / "state") as state:
            began_ms = time.time_ns() // 1_000_000 - 3_600_000
            state.describe(
                InstanceDescription(1, server.url, url, names["cluster"], names["broker"], "/x", began_ms)
            )
            _, out, _ = run("cost", url, "--state-dir", tmp_path / "state", "--json")
            text = run("cost", url, "--state-dir", tmp_path / "state")[1]
    finally:
        server.close()
    document = json.loads(out)
    assert document["counters"]["requests"]["put"] == 3
    assert document["commitsADay"] is None and document["month"]["gets"] is None
    assert "less than an hour old" in text
    assert "3 " in text and "downloaded" in text


def test_a_wrong_price_file_is_a_wrong_call(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text("storage = 1\n")
    code, _, err = run("cost", url, "--prices", tmp_path / "prices.toml")
    assert code == UsageError.exit_code and "storage is not the name of a price" in err
