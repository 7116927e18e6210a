"""kill -9 of a compaction, and of gc after it, at ten moments, on MinIO: no row changes, leftovers are collected, the
next compaction ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.killed_compaction import MERGE, MOMENTS
from tests.maintenance.compaction_scene import Scene
from tests.servers.running_store import RunningStore
from tiered.archive.verify import verify_archive
from tiered.object_store.open_store import open_store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(moment: str, tmp_path: Path, minio_url: RunningStore) -> None:
    url = f"{minio_url.fresh_bucket()}/killed"
    store = open_store(url, minio_url.options())
    scene = Scene(tmp_path, store=store)
    environment = {**os.environ, **minio_url.environment(), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.killed_compaction", url, str(tmp_path), moment],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    scene.check()
    if moment == MERGE:
        scene.owner.writer.claim(
            take_over=True
        )  # the next owner; the page of the dead one is garbage with its epoch
    while scene.plan() is not None:
        assert scene.run() is not None
    scene.check()
    scene.collect()
    scene.check()
    assert verify_archive(store, depth="full").leftovers == []
    assert scene.data_objects() * 5 < len(scene.owner.keys)
    store.close()
