"""Fixtures ``minio_url``, ``localstack_url``, ``moto_url``: one server of each kind per test process.

A server that cannot be installed skips the tests that need it, by name and with the reason.

LocalStack, the second opinion: another implementation of S3, which checks bodies but no secrets.

moto's server, from the project's own environment: quick, but checks neither secrets nor bodies.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.child import ChildServer, answers, free_port
from tests.servers.install import NotInstallableError, localstack_python
from tests.servers.minio import start_minio
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
    """A LocalStack with S3 and KMS."""
    yield from _serve("LocalStack", start_localstack, tmp_path_factory.mktemp("localstack"))


@pytest.fixture(scope="session")
def moto_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    """A moto server."""
    yield from _serve("moto", start_moto, tmp_path_factory.mktemp("moto"))


READY_SCRIPTS = Path(__file__).parents[2] / "localstack" / "ready.d"


def start_localstack(directory: Path, *, port: int | None = None) -> RunningStore:
    """A LocalStack that offers S3 and KMS only."""
    port = port or free_port()
    endpoint = f"http://127.0.0.1:{port}"
    python = localstack_python()
    # Outside Docker, LocalStack looks for its scripts below FILESYSTEM_ROOT.
    shutil.copytree(READY_SCRIPTS, directory / "etc" / "localstack" / "init" / "ready.d", dirs_exist_ok=True)
    server = ChildServer(
        "LocalStack",
        [str(python), "-m", "localstack.runtime.main"],
        {
            "SERVICES": "s3,kms",
            "EAGER_SERVICE_LOADING": "1",
            "GATEWAY_LISTEN": f"127.0.0.1:{port}",
            "LOCALSTACK_VOLUME_DIR": str(directory),
            "FILESYSTEM_ROOT": str(directory),
            # Even when this test runs in a container: its own directories, not /etc/localstack and /tmp/localstack.
            "OVERRIDE_IN_DOCKER": "0",
            "DISABLE_EVENTS": "1",
            "SKIP_SSL_CERT_DOWNLOAD": "1",
            "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        },
        directory / "localstack.log",
        lambda: answers(f"{endpoint}/_localstack/health", containing=b'"s3": "'),
    )
    server.start()
    return RunningStore("LocalStack", endpoint, "test", "test", server, checks_secrets=False)


def start_moto(directory: Path, *, port: int | None = None) -> RunningStore:
    """A moto server with S3's API."""
    port = port or free_port()
    endpoint = f"http://127.0.0.1:{port}"
    directory.mkdir(parents=True, exist_ok=True)
    server = ChildServer(
        "moto",
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        {},
        directory / "moto.log",
        lambda: answers(f"{endpoint}/moto-api/"),
    )
    server.start()
    return RunningStore("moto", endpoint, "test", "test", server, checks_secrets=False, checks_bodies=False)
