"""Soak tests fill disks: each has a MinIO of its own, and what brokers and servers stored goes when the test ends."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.install import NotInstallableError
from tests.servers.minio import start_minio
from tests.servers.running_store import RunningStore


@pytest.fixture
def minio_url(tmp_path: Path) -> Iterator[RunningStore]:
    """A MinIO for this test alone."""
    directory = tmp_path / "minio"
    directory.mkdir()
    try:
        running = start_minio(directory)
    except NotInstallableError as error:
        pytest.skip(f"MinIO is not available: {error}")
    yield running
    running.server.stop()
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def stores_do_not_pile_up(tmp_path: Path) -> Iterator[None]:
    """Logs of a test stay for a while; stores of brokers do not."""
    yield
    for pins in list(tmp_path.rglob("pins")):  # hard links keep what the store no longer names
        shutil.rmtree(pins)
    for store in list(tmp_path.rglob("store")):
        if (store / "commitlog").is_dir():
            shutil.rmtree(store)
