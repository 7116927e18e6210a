"""A MinIO with the accounts of docker-compose.yml: users with deploy/compose's policies, made by its own script."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.install import NotInstallableError, mc_binary
from tests.servers.minio import start_minio
from tests.servers.running_store import RunningStore

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
URL = "s3://rocketmq-tiered/demo"


@pytest.fixture(scope="module")
def minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    """With the owner's keys, the accounts and the bucket as the sandbox has them; the script ran twice."""
    directory = tmp_path_factory.mktemp("compose")
    try:
        client = mc_binary()
        server = start_minio(directory, secrets=COMPOSE / "accounts")
    except NotInstallableError as error:
        pytest.skip(f"MinIO is not available: {error}")
    environment = {
        **os.environ,
        "PATH": f"{client.parent}:{os.environ['PATH']}",
        "MC_CONFIG_DIR": str(directory / "mc"),
    }
    command = ["sh", "accounts.sh", server.endpoint, "accounts", "policies"]
    try:
        for _ in range(2):
            done = subprocess.run(
                command, cwd=COMPOSE, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        yield server
    finally:
        server.server.stop()


def tiered(server: RunningStore, account: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as one of the accounts."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {
        "AWS_SHARED_CREDENTIALS_FILE": str(COMPOSE / "accounts" / account),
        "AWS_REGION": "us-east-1",
        "TIERED_OBJECT_STORE__ENDPOINT_URL": server.endpoint,
    }
    command = [sys.executable, "-m", "rocketmq_tiered.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
