"""`tiered cost` beside a real `tiered run` that writes to MinIO: its counters are included."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.servers.running_store import RunningStore
from tiered.catalog.catalog_reader import load
from tiered.errors import NotFoundError
from tiered.formats.keys import archive_prefix
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TIERED = (sys.executable, "-m", "rocketmq_tiered.cli")
MESSAGES = 18_004


def test_counters_of_a_run_and_prices_of_its_bucket(
    minio_url: RunningStore, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    url = f"{minio_url.fresh_bucket()}/some/prefix"
    home = real_store("F")
    environment = os.environ | minio_url.environment()
    command = (
        *TIERED, "run", "--store", str(home / "store"), "--broker-conf", str(home / "broker.conf"), "--url", url,
        "--state-dir", str(tmp_path / "state"), "--set", "admin.port=0",
    )  # fmt: skip
    (tmp_path / "prices.toml").write_text('name = "MinIO"\nput_1000 = 1000\nstorage_gib_month = 0\n')
    log = tmp_path / "run.log"
    with log.open("wb") as stream, subprocess.Popen(command, env=environment, stderr=stream) as process:
        try:
            _await_data(minio_url, url, process, log)
            document = _cost(
                url, environment, "--state-dir", tmp_path / "state", "--prices", tmp_path / "prices.toml"
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
    requests = document["counters"]["requests"]
    assert requests["put"] > 3 and requests["list"] > 0 and document["counters"]["uploadedBytes"] > 1 << 20
    assert sum(topic["messages"] for topic in document["topics"]) == MESSAGES
    month = document["month"]
    assert month["puts"] == pytest.approx(document["putsADay"] * 30) and month["storage"] == 0
    assert month["gets"] is not None and month["lists"] > 0
    listed = minio_url.client().list_objects_v2(Bucket=url.split("/")[2])["Contents"]
    stored = _cost(url, environment)
    assert (stored["storedObjects"], stored["storedBytes"]) == (
        len(listed),
        sum(item["Size"] for item in listed),
    )
    assert stored["month"]["storage"] > 0 and stored["counters"] is None


def _cost(url: str, environment: dict[str, str], *flags: object) -> dict[str, Any]:
    command = [*TIERED, "cost", url, *map(str, flags), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _await_data(server: RunningStore, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    root = open_store(url, server.options())
    store = PrefixedStore(root, archive_prefix("FxCluster", "fx-a"))
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and process.poll() is None:
        with suppress(NotFoundError):
            if int(load(store).table["row_count"].sum()) == MESSAGES:
                root.close()
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text())
