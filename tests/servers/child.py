"""A server as a child process: started on a free port, ready when it says so, stopped by its process id."""

import contextlib
import os
import secrets
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 10.0


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def free_port_block(length: int) -> int:
    """The first of ``length`` neighbouring ports of 127.0.0.1 that are all free, below the system's
    ephemeral range, for a server that derives ports from its own."""
    for _ in range(1000):
        first = secrets.randbelow(10_000) + 20_000
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + length):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RuntimeError(f"no {length} neighbouring ports are free")


class Startable:
    """What runs inside ``with``, by methods ``start`` and ``stop``."""

    def __enter__(self: Any) -> None:
        self.start()

    def __exit__(self: Any, *_: object) -> None:
        self.stop()


class ChildServer(Startable):
    """One child process. ``start`` after ``stop`` or ``kill`` brings it back with the same command."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        is_ready: Callable[[], bool],
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(os.environ) | dict(environment)
        self._is_ready = is_ready
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it serves."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
            )
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                code = self._process.poll()
                self.kill()
                raise RuntimeError(f"{self.name} did not start (exit code {code}):\n{self._tail()}")
            time.sleep(0.05)

    def start_if_stopped(self) -> None:
        """Bring it back unless it runs."""
        if self._process is None:
            self.start()

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Terminate it, and kill it after ``timeout_s``. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def kill(self) -> None:
        """End it at once. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _tail(self) -> str:
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-20:])


def answers(url: str, *, containing: bytes = b"") -> bool:
    """Whether a GET of ``url`` succeeds and its body holds ``containing``."""
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting)
    )
    try:
        with opener.open(url, timeout=2) as answer:
            return containing in answer.read()
    except (urllib.error.URLError, OSError):
        return False


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
