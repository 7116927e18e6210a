"""`tiered serve` over an archive in a directory, as a child process."""

import sys
from pathlib import Path

from tests.servers.child import ChildServer, free_port, listens

ROOT = Path(__file__).parent.parent.parent


def tiered_serve(url: str, directory: Path, *flags: str) -> tuple[ChildServer, str]:
    """The server, not started yet, and the address clients dial."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "rocketmq_tiered.cli",
        "serve",
        url,
        "--bind",
        f"127.0.0.1:{port}",
        "--set",
        "admin.port=0",
        *flags,
    ]
    environment = {"PYTHONPATH": str(ROOT)}
    server = ChildServer("tiered serve", command, environment, directory / "serve.log", lambda: listens(port))
    return server, f"127.0.0.1:{port}"
