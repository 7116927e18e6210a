"""moto's server, from the project's own environment: quick, but checks neither secrets nor bodies."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.servers.child import ChildServer, answers, free_port
from tests.servers.running_store import RunningStore


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
