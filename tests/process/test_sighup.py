"""SIGHUP while a service starts: it ends nothing and is not forgotten; SIGTERM ends it then as ever."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.fetcher.broker_store_writer import WrittenStore
from tests.servers.child import free_port
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
TELL_WHEN_BEGUN = (
    "import sys; from rocketmq_tiered import cli; "
    "begin = cli._split_verb; cli._split_verb = lambda given: (print('begun', flush=True), begin(given))[1]; "
    "sys.exit(cli.main())"
)


class Child:
    """One command, stopped where its verb's modules are not imported yet: a second, in which it begins to listen."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.log = home / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERED_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", TELL_WHEN_BEGUN, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment | {"PYTHONPATH": str(ROOT)},
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"begun\n"
        self.wait_until(lambda: self.catches(signal.SIGHUP))
        assert not self.catches(signal.SIGTERM), "it is further on than this test is about"

    def catches(self, number: int) -> bool:
        """Whether the process has a handler of its own for a signal."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(mask, 16) >> (number - 1) & 1)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll until ``condition`` holds."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"exit {self.process.returncode}: {self.log.read_text()}"
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.001)

    def said(self, message: str) -> int:
        """How many lines of the log say ``message``."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
        return sum(json.loads(line)["message"] == message for line in lines)

    def end(self, number: int) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)


@contextmanager
def _begun(home: Path, *arguments: str) -> Iterator[Child]:
    child = Child(home, *arguments)
    try:
        yield child
    finally:
        child.process.kill()
        child.process.communicate()


@pytest.fixture(params=["run", "serve"])
def command(request: Any, tmp_path: Path) -> tuple[str, ...]:
    """A service's whole command."""
    if request.param == "serve":
        builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path / "archive"), "cluster/broker"))
        builder.commit([Sent(QueueKey("t", 0, 0))])
        return (
            "serve",
            f"file://{tmp_path}/archive",
            "--bind",
            f"127.0.0.1:{free_port()}",
            "--set",
            "admin.port=0",
        )
    store = WrittenStore(tmp_path / "store")
    store.put("t", 0, b"body")
    return (
        "run",
        "--store",
        str(store.path),
        "--url",
        f"file://{tmp_path}/archive",
        "--cluster",
        "c",
        "--broker",
        "b",
        "--state-dir",
        str(tmp_path / "state"),
        "--set",
        "admin.port=0",
    )


STARTED = {"run": "started", "serve": "serving"}
ANSWERED = {
    "run": "settings reloaded: no setting changed that takes effect without a restart",
    "serve": "SIGHUP has no effect: tiered serve reads its settings at the start",
}


def test_one_that_comes_while_it_starts_is_answered_as_later_ones_are(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    verb = command[0]
    with _begun(tmp_path, *command) as child:
        child.process.send_signal(signal.SIGHUP)
        child.wait_until(lambda: child.said(STARTED[verb]) == 1)
        child.wait_until(lambda: child.said(ANSWERED[verb]) == 1)
        child.process.send_signal(signal.SIGHUP)
        child.wait_until(lambda: child.said(ANSWERED[verb]) == 2)
        assert child.end(signal.SIGTERM) == 0


def test_sigterm_ends_what_starts_and_leaves_nothing(command: tuple[str, ...], tmp_path: Path) -> None:
    with _begun(tmp_path, *command) as child:
        child.process.send_signal(signal.SIGHUP)
        assert child.end(signal.SIGTERM) == -signal.SIGTERM
        assert child.log.read_text() == ""
    with _begun(tmp_path, *command) as child:
        child.wait_until(lambda: child.said(STARTED[command[0]]) == 1)
        assert child.end(signal.SIGTERM) == 0
        assert child.said(ANSWERED[command[0]]) == 0
