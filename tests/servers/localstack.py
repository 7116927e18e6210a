"""LocalStack, the second opinion: another implementation of S3, which checks bodies but no secrets."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.servers.child import ChildServer, answers, free_port
from tests.servers.install import localstack_python
from tests.servers.running_store import RunningStore

READY_SCRIPTS = Path(__file__).parents[2] / "localstack" / "ready.d"


def start_localstack(directory: Path, *, port: int | None = None) -> RunningStore:
    """A LocalStack that offers S3 only."""
    port = port or free_port()
    endpoint = f"http://127.0.0.1:{port}"
    python = localstack_python()
    # Outside Docker, LocalStack looks for its scripts below FILESYSTEM_ROOT.
    shutil.copytree(READY_SCRIPTS, directory / "etc" / "localstack" / "init" / "ready.d", dirs_exist_ok=True)
    server = ChildServer(
        "LocalStack",
        [str(python), "-m", "localstack.runtime.main"],
        {
            "SERVICES": "s3",
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
