"""Fixtures ``minio_url``, ``localstack_url``, ``moto_url``: one server of each kind per test process.

A server that cannot be installed skips the tests that need it, by name and with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.install import NotInstallableError
from tests.servers.localstack import start_localstack
from tests.servers.minio import start_minio
from tests.servers.moto import start_moto
from tests.servers.running_store import RunningStore


def _serve(name: str, start: Callable[[Path], RunningStore], directory: Path) -> Iterator[RunningStore]:
    try:
        running = start(directory)
    except NotInstallableError as error:
        pytest.skip(f"{name} is not available: {error}")
    yield running
    running.server.stop()


@pytest.fixture(scope="session")
def minio_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    """A MinIO."""
    yield from _serve("MinIO", start_minio, tmp_path_factory.mktemp("minio"))


@pytest.fixture(scope="session")
def localstack_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    """A LocalStack with S3."""
    yield from _serve("LocalStack", start_localstack, tmp_path_factory.mktemp("localstack"))


@pytest.fixture(scope="session")
def moto_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    """A moto server."""
    yield from _serve("moto", start_moto, tmp_path_factory.mktemp("moto"))
