"""kill -9 at every kind of moment, on MinIO, again and again: nothing lost, nothing twice, nothing left after gc.

The live process, killed while messages pour in, ten times and more at each moment: tests/soak/test_kill_live.py.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.catalog.collection import run_gc
from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.faults.killed_child import MOMENTS
from tests.servers.running_store import RunningStore
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
NAME = "B"


def kill_repeatedly(directory: Path, url: str, server: RunningStore, moment: str, kills: int) -> int:
    """Start and kill the backfill ``kills`` times, then let it finish; returns how often it was killed."""
    environment = {**os.environ, **server.environment(), "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = 0
    early = 1 if moment == "index build" else 3  # fewer index files are left with each life
    for nth in [*([early] * kills), 1_000_000]:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.faults.killed_child",
                str(directory / "store"),
                url,
                moment,
                str(nth),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr[-2000:]
        killed += done.returncode == -signal.SIGKILL
    assert done.returncode == 0
    return killed


def check_clean(directory: Path, url: str, server: RunningStore) -> None:
    """The whole truth; after gc no unreferenced objects."""
    root = open_store(url, server.options())
    check_against_truth(root, directory, NAME)
    archive = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    assert verify_archive(archive, depth="full").anomalies == []
    run_gc(archive, load(archive), apply=True, grace_ms=0, clock=lambda: time.time_ns() // 1_000_000)
    report = verify_archive(archive, depth="full")
    assert (report.anomalies, report.leftovers) == ([], [])
    root.close()


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_three_times_at(
    moment: str, real_store: Callable[[str], Path], minio_url: RunningStore
) -> None:
    url = f"{minio_url.fresh_bucket()}/killed"
    assert kill_repeatedly(real_store(NAME), url, minio_url, moment, 3) == 3
    check_clean(real_store(NAME), url, minio_url)
