"""`tiered run` as a child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rocketmq_tiered.process.instance import running_instance
from tiered.errors import NotFoundError

TIMEOUT_S = 60.0
TIERED = (
    sys.executable,
    "-X",
    "faulthandler",
    "-c",
    "import sys; from rocketmq_tiered.cli import main; sys.exit(main())",
)
ROOT = Path(__file__).parents[2]


class Sidecar:
    """One `tiered run` child process, which is killed at the end of ``with``."""

    def __init__(self, home: Path, *arguments: str, name: str = "state") -> None:
        self.state_dir = home / name
        self.log = home / f"{name}.log"
        command = (
            "run",
            "--store",
            str(home / "store"),
            "--url",
            f"file://{home}/archive",
            "--state-dir",
            str(self.state_dir),
            "--broker-conf",
            str(home / "broker.conf"),
            "--set",
            "admin.port=0",
            *arguments,
        )
        with self.log.open("ab") as log:
            environment = {k: v for k, v in os.environ.items() if not k.startswith("TIERED_")}
            environment["PYTHONPATH"] = str(ROOT)
            self.process = subprocess.Popen([*TIERED, *command], stderr=log, env=environment)

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def get(self, path: str) -> tuple[int, str]:
        """One request to the admin server."""
        address = urlsplit(running_instance(self.state_dir).admin_url)
        connection = HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def report(self) -> dict[str, Any]:
        """The /status.json document, empty while there is none."""
        try:
            code, text = self.get("/status.json")
        except (NotFoundError, OSError):
            return {}
        document: dict[str, Any] = json.loads(text) if code == 200 else {}
        return document

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll until ``condition`` holds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"exit {self.process.returncode}: {self.log.read_text()}"
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def wait_archived(self) -> None:
        """Until everything in the store is archived and this process owns the archive."""
        self.wait_until(lambda: (r := self.report()).get("lagMessages") == 0 and r["epoch"] > 0)

    def end(self, number: int) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
            raise AssertionError(self.log.read_text()) from None

    def lines(self) -> list[dict[str, Any]]:
        """The log; every line is JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]
