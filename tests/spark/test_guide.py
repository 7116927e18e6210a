"""docs/SPARK.md: its code and commands run, in order, on an archive of topics `orders` and `prices`."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rocketmq_tiered.spark.cli.main import main
from tests.end_to_end.offloading import CLUSTER
from tests.fetcher.broker_store_writer import WrittenStore
from tests.kernels.record_builder import Message
from tests.servers.running_store import REGION, RunningStore
from tests.spark.conftest import archive_store
from tests.spark.uploaded_archives import uploaded

pytestmark = pytest.mark.integration
PAGE = Path(__file__).parents[2] / "docs" / "SPARK.md"
URL = "s3://bucket/prefix"
NOVEMBER_MS = 1_795_000_000_000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(store, archive)."""
    root = tmp_path_factory.mktemp("guide")
    store = WrittenStore(root / "store")
    later_ms = NOVEMBER_MS - Message(b"orders", 0, 0, b"").store_timestamp
    for number in range(40):
        city = "Aachen" if number % 4 else "Bonn"
        body = json.dumps({"id": number, "city": city}).encode()
        store.put(
            "orders",
            number % 2,
            body,
            tags="paid" if number % 2 else "open",
            keys=f"o{number}",
            later_ms=later_ms,
        )
        store.put("prices", 0, b"" if number % 10 == 9 else b"%d" % number, keys=f"p{number % 10}")
    archive_store(store.path, root / "archive", "a")
    return store.path, root / "archive"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_code_runs(
    spark: SparkSession,
    written: tuple[Path, Path],
    minio_url: RunningStore,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store, archive = written
    in_bucket = uploaded(archive, minio_url)

    def run(code: str) -> None:
        url = in_bucket if "minio" in code else f"file://{archive}"
        places = {
            URL: url,
            URL.replace("s3:", "s3a:"): in_bucket.replace("s3:", "s3a:"),
            "/data/store": str(store),
            "/data": str(tmp_path),
            "http://minio:9000": minio_url.endpoint,
            "broker-a": "a",
            '"us-east-1"': f'"{REGION}"',
            '"KEY"': f'"{minio_url.access_key}"',
            '"SECRET"': f'"{minio_url.secret_key}"',
        }
        for place, own in places.items():
            code = code.replace(place, own)
        exec(compile(code, str(PAGE), "exec"), names)

    names: dict[str, Any] = {}
    first, second, server, stream, views, search, statistics, comparison = blocks("python")
    run(first)
    shown = capfd.readouterr().out
    assert "|paid|   20|" in shown and "|Aachen|   30|" in shown and "|  Bonn|   10|" in shown
    run(second)
    assert "|paid|      20|" in capfd.readouterr().out
    run(server)
    assert capfd.readouterr().out == "40\n"
    run(search)
    found = capfd.readouterr().out
    assert '"id": 31' in found and '"id": 30' not in found and '"id": 32' not in found
    run(statistics)
    shown = capfd.readouterr().out
    assert "|orders|     2|      40|" in shown and "|prices|     1|      40|" in shown
    assert "| p1|       4|" in shown
    run(comparison)
    assert capfd.readouterr().out == "0 missing or different, 0 extra or different\n"
    run(stream)
    assert spark.read.parquet(str(tmp_path / "orders")).count() == 40
    merged: list[tuple[str, str, str]] = []

    def merge(changes: Any, batch: int) -> None:
        merged.extend((row["keys"], row["text"], row["_change_type"]) for row in changes.collect())

    # MERGE requires a table format, such as Delta: here it is parsed only.
    (statement,) = re.findall(r'"""(MERGE.*?)"""', views, re.DOTALL)
    assert spark._jsparkSession.sessionState().sqlParser().parsePlan(statement) is not None
    names["taken"] = merge
    run(views.replace("foreachBatch(merge)", "foreachBatch(taken)"))
    assert sorted(merged) == sorted(
        (f"p{key}", "" if key == 9 else str(30 + key), "delete" if key == 9 else "upsert")
        for key in range(10)
    )


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line.startswith("tiered-spark")]


def test_the_commands_run(
    spark: SparkSession, written: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, archive = written
    assert len(commands()) >= 5
    for command in commands():
        line = command.replace(URL, f"file://{archive}").replace("/data/store", str(store))
        line = line.replace("s3://lake", f"file://{tmp_path}").replace("/data/", f"{tmp_path}/")
        line = line.replace("DefaultCluster", CLUSTER).replace("broker-a", "a")
        arguments = shlex.split(line)[1:]
        assert main(arguments) == 0, (command, capsys.readouterr().err)
        assert capsys.readouterr().out.strip(), command
