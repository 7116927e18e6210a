"""Gets the servers and tools that tests run: MinIO by `go install`, LocalStack into a virtual environment of its own.

Everything lands in ``$XDG_CACHE_HOME/rocketmq-tiered`` (default ``~/.cache``), once; processes wait for each
other. What cannot be had raises NotInstallableError, whose text becomes the reason of a skip, and is not tried again
for a while. Every installer takes the seconds one command of it may take: by default less than a test may take.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TIMEOUT_S = 200.0
"""Below the time limit of a test; ``tests.servers.prepare`` allows more."""
RETRY_AFTER_S = 3600
"""A failed installation is not repeated by the following tests."""
_FAILED = ".failed"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LOCALSTACK_PACKAGES = (
    "localstack-core[base-runtime]==4.4.0",
    "cbor2<5.8",
    "pyopenssl<25.2",
    "service_identity",
    "setuptools<81",
)


PROMTOOL = "github.com/prometheus/prometheus/cmd/promtool"
PROMTOOL_VERSION = "v0.55.1"


class NotInstallableError(Exception):
    """The server is not here and cannot be fetched."""


def cache_directory() -> Path:
    """Where installed servers live."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rocketmq-tiered"


def minio_binary(timeout_s: float = TIMEOUT_S) -> Path:
    """The MinIO server: on PATH, in Go's own place, in the cache, or built now (about two minutes)."""
    cached = cache_directory() / "bin" / "minio"
    gopath = Path(os.environ.get("GOPATH") or Path.home() / "go")
    for candidate in (shutil.which("minio"), gopath / "bin" / "minio", cached):
        if candidate is not None and os.access(candidate, os.X_OK):
            return Path(candidate)
    with only_once("minio"):
        if not cached.exists():
            _go_install("github.com/minio/minio@latest", cached.parent, timeout_s)
    return cached


def compose_validator(timeout_s: float = TIMEOUT_S) -> Path:
    """compose-go's command: reads a compose file as Docker does, without an engine."""
    cached = cache_directory() / "compose-go" / "cmd"
    gopath = Path(os.environ.get("GOPATH") or Path.home() / "go")
    for candidate in (gopath / "bin" / "cmd", cached):
        if os.access(candidate, os.X_OK):
            return candidate
    with only_once("compose-go"):
        if not cached.exists():
            _go_install("github.com/compose-spec/compose-go/v2/cmd@latest", cached.parent, timeout_s)
    return cached


def promtool_binary() -> Path:
    """Prometheus' checker of rules: on PATH, or what ``build_promtool`` left: it takes longer than a test may."""
    cached = cache_directory() / "promtool" / "promtool"
    for candidate in (shutil.which("promtool"), cached):
        if candidate is not None and os.access(candidate, os.X_OK):
            return Path(candidate)
    raise NotInstallableError("not on PATH, and not built by `make servers`")


def build_promtool(timeout_s: float) -> Path:
    """``promtool_binary``, built now when missing (three minutes of two processors)."""
    directory = cache_directory() / "promtool"
    with only_once("promtool"):
        try:
            return promtool_binary()
        except NotInstallableError:
            directory.mkdir(exist_ok=True)
        if shutil.which("go") is None:
            raise NotInstallableError(f"{PROMTOOL} is built by go, which is not on PATH")
        # Its module excludes others, so that `go install` refuses it: it is built as a part of one that is empty.
        (directory / "go.mod").write_text("module promtool\n\ngo 1.22\n")
        (directory / "go.sum").unlink(missing_ok=True)
        go = ["go", "-C", str(directory)]
        run_installer([*go, "get", f"{PROMTOOL}@{PROMTOOL_VERSION}"], timeout_s)
        run_installer([*go, "build", "-ldflags=-s -w", "-o", "promtool", PROMTOOL], timeout_s)
    return promtool_binary()


def localstack_python(timeout_s: float = TIMEOUT_S) -> Path:
    """The interpreter of LocalStack's environment, made now when missing (about a minute)."""
    environment = cache_directory() / "localstack-4.4.0"
    python = environment / "bin" / "python"
    complete = environment / ".complete"
    if complete.exists():
        return python
    with only_once("localstack"):
        if not complete.exists():
            shutil.rmtree(environment, ignore_errors=True)
            _make_environment(environment, timeout_s)
            complete.touch()
    return python


def _make_environment(environment: Path, timeout_s: float) -> None:
    python = str(environment / "bin" / "python")
    uv = _uv()
    if uv is not None:
        run_installer([*uv, "venv", "--quiet", "--python", "3.11", str(environment)], timeout_s)
        run_installer([*uv, "pip", "install", "--quiet", "--python", python, *LOCALSTACK_PACKAGES], timeout_s)
        return
    if sys.version_info[:2] != (3, 11):
        raise NotInstallableError("LocalStack needs Python 3.11, or uv to fetch it")
    run_installer([sys.executable, "-m", "venv", str(environment)], timeout_s)
    run_installer([python, "-m", "pip", "install", "--quiet", *LOCALSTACK_PACKAGES], timeout_s)


def _uv() -> list[str] | None:
    for command in (["uv"], [sys.executable, "-m", "uv"]):
        try:
            if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            continue
    return None


def _go_install(package: str, directory: Path, timeout_s: float) -> None:
    if shutil.which("go") is None:
        raise NotInstallableError(f"{package} is built by go, which is not on PATH")
    directory.mkdir(parents=True, exist_ok=True)
    run_installer(["go", "install", package], timeout_s, GOBIN=str(directory), GOFLAGS="-mod=mod")


def run_installer(command: list[str], timeout_s: float = TIMEOUT_S, **environment: str) -> None:
    """Run to success; anything else is a NotInstallableError with its last line."""
    try:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotInstallableError(f"{command[0]} took longer than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise NotInstallableError(f"{' '.join(command[:3])} failed: {_reason(done.stdout)[:200]}")


def _reason(output: str) -> str:
    """The reason of a failed installation: Maven's first error, other tools' last line."""
    lines = [line.strip() for line in _COLOURS.sub("", output).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("[ERROR]")]
    return (errors[:1] or lines[-1:] or ["no output"])[0]


@contextmanager
def only_once(name: str) -> Iterator[None]:
    """Only one process at a time installs ``name``; a recent failure fails again immediately."""
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        failure = directory / f"{name}{_FAILED}"
        if failure.exists() and time.time() - failure.stat().st_mtime < RETRY_AFTER_S:
            raise NotInstallableError(failure.read_text())
        try:
            yield
        except NotInstallableError as error:
            failure.write_text(str(error))
            raise
        failure.unlink(missing_ok=True)


def forget_failures() -> None:
    """Forget earlier failures."""
    for failure in cache_directory().glob(f"*{_FAILED}"):
        failure.unlink(missing_ok=True)
