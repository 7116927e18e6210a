"""Gets the servers and tools that tests run: MinIO by `go install`, LocalStack into a virtual environment of its own.

Everything lands in ``$XDG_CACHE_HOME/rocketmq-tiered`` (default ``~/.cache``), once; processes wait for each
other. What cannot be had raises NotInstallableError, whose text becomes the reason of a skip, and is not tried again
for a while. Every installer takes the seconds one command of it may take: by default less than a test may take.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 200.0
"""Below the time limit of a test; ``tests.servers.prepare`` allows more."""
RETRY_AFTER_S = 3600
"""A failed installation is not repeated by the following tests."""
_FAILED = ".failed"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LOCALSTACK_LOCK = Path(__file__).parent / "localstack.lock"
"""Every package of LocalStack's environment with its hashes."""


class GoTool(NamedTuple):
    """A program that `go` builds. ``modules_sha256``: of the modules in it, see ``modules_digest``."""

    package: str
    version: str
    modules_sha256: str


MINIO = GoTool(
    "github.com/minio/minio",
    "v0.0.0-20260212201848-7aac2a2c5b7c",
    "41379b1e24182769727e228d148889f6c238dc67562c0e7e93aa2fb7b71097df",
)
MC = GoTool(
    "github.com/minio/mc",
    "v0.0.0-20250313080218-cf909e1063a9",
    "75a596cb0aada45ad80ecf66c228f9f883fd341d18af04633e20c7d70b3be580",
)
COMPOSE = GoTool(
    "github.com/compose-spec/compose-go/v2/cmd",
    "v2.16.2",
    "296d7023edc6dc0e46f65318c8b31d749f0d90bbc640f3c84dc6f1721f756c91",
)
PROMTOOL = GoTool(
    "github.com/prometheus/prometheus/cmd/promtool",
    "v0.55.1",
    "5f99ac1902a1cd73825780f13edd23c64e8b90bc0ea17da3f089cad1b8dd46b1",
)
HELM = GoTool(
    "helm.sh/helm/v3/cmd/helm",
    "v3.22.0",
    "bbcc3214d9e0107dc86e787c5e90067c46ea7b5173d1317fca4bf3e86e579650",
)
KUBERNETES_API = ("k8s.io/client-go", "v0.37.0", "h1:nsN31fy8wBySuZ+QRnKmrjRSQLOG2rvoGN0tKd12zhQ=")
"""A module with the OpenAPI documents of Kubernetes 1.37: its name, version and checksum."""
DIGESTS_FOR = ("linux", "x86_64")
"""Elsewhere the programs have other modules."""


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
    for candidate in (shutil.which("minio"), gopath / "bin" / "minio"):
        if candidate is not None and os.access(candidate, os.X_OK):
            return Path(candidate)
    return _built(MINIO, cached, timeout_s)


def mc_binary(timeout_s: float = TIMEOUT_S) -> Path:
    """MinIO's client, which also manages accounts; built now when missing."""
    return _built(MC, cache_directory() / "bin" / "mc", timeout_s)


def helm_binary(timeout_s: float = TIMEOUT_S) -> Path:
    """Helm, which renders and lints charts; built now when missing (two minutes)."""
    return _built(HELM, cache_directory() / "bin" / "helm", timeout_s)


def kubernetes_api(timeout_s: float = TIMEOUT_S) -> Path:
    """The directory of Kubernetes' OpenAPI documents, fetched now when missing."""
    name, version, checksum = KUBERNETES_API
    directory = cache_directory() / f"kubernetes-api-{version}"
    if directory.exists():
        return directory
    with only_once("kubernetes-api"):
        if shutil.which("go") is None:
            raise NotInstallableError(f"{name} is fetched by go, which is not on PATH")
        module = json.loads(run_installer(["go", "mod", "download", "-json", f"{name}@{version}"], timeout_s))
        if module["Sum"] != checksum:
            raise NotInstallableError(f"{name}@{version} has checksum {module['Sum']}, not the pinned one")
        unfinished = directory.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        documents = Path(module["Dir"], "openapi", "openapitest", "testdata")
        shutil.copytree(documents, unfinished, copy_function=shutil.copyfile)
        unfinished.chmod(0o755)  # modules are read-only
        unfinished.rename(directory)
    return directory


def compose_validator(timeout_s: float = TIMEOUT_S) -> Path:
    """compose-go's command: reads a compose file as Docker does, without an engine."""
    return _built(COMPOSE, cache_directory() / "compose-go" / "cmd", timeout_s)


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
            raise NotInstallableError(f"{PROMTOOL.package} is built by go, which is not on PATH")
        # Its module excludes others, so that `go install` refuses it: it is built as a part of one that is empty.
        (directory / "go.mod").write_text("module promtool\n\ngo 1.22\n")
        (directory / "go.sum").unlink(missing_ok=True)
        go = ["go", "-C", str(directory)]
        run_installer([*go, "get", f"{PROMTOOL.package}@{PROMTOOL.version}"], timeout_s)
        run_installer([*go, "build", "-ldflags=-s -w", "-o", "promtool", PROMTOOL.package], timeout_s)
        _require_modules(PROMTOOL, directory / "promtool")
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
    locked = ("--require-hashes", "-r", str(LOCALSTACK_LOCK))
    uv = _uv()
    if uv is not None:
        run_installer([*uv, "venv", "--quiet", "--python", "3.11", str(environment)], timeout_s)
        run_installer([*uv, "pip", "install", "--quiet", "--python", python, *locked], timeout_s)
        return
    if sys.version_info[:2] != (3, 11):
        raise NotInstallableError("LocalStack needs Python 3.11, or uv to fetch it")
    run_installer([sys.executable, "-m", "venv", str(environment)], timeout_s)
    run_installer([python, "-m", "pip", "install", "--quiet", *locked], timeout_s)


def _uv() -> list[str] | None:
    for command in (["uv"], [sys.executable, "-m", "uv"]):
        try:
            if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            continue
    return None


def _built(tool: GoTool, program: Path, timeout_s: float) -> Path:
    """``program``, built now when it is missing or of other modules."""
    if _is_pinned(tool, program):
        return program
    with only_once(program.name):
        if _is_pinned(tool, program):
            return program
        if shutil.which("go") is None:
            raise NotInstallableError(f"{tool.package} is built by go, which is not on PATH")
        program.parent.mkdir(parents=True, exist_ok=True)
        command = ["go", "install", f"{tool.package}@{tool.version}"]
        run_installer(command, timeout_s, GOBIN=str(program.parent), GOFLAGS="-mod=mod")
        _require_modules(tool, program)
    return program


def _is_pinned(tool: GoTool, program: Path) -> bool:
    """Whether ``program`` is there and of the pinned modules; a mark beside it saves the next question."""
    mark = program.with_name(f"{program.name}.modules")
    if not program.exists():
        return False
    if mark.exists() and mark.read_text() == tool.modules_sha256:
        return True
    if shutil.which("go") is not None and not _has_modules(tool, program):
        return False
    mark.write_text(tool.modules_sha256)
    return True


def _require_modules(tool: GoTool, program: Path) -> None:
    """Remove ``program`` if it was built from anything but the pinned modules."""
    if not _has_modules(tool, program):
        found = modules_digest(program)
        program.unlink()
        raise NotInstallableError(f"{tool.package}@{tool.version} has modules {found}, not the pinned ones")


def _has_modules(tool: GoTool, program: Path) -> bool:
    if (sys.platform, platform.machine()) != DIGESTS_FOR:
        return True
    return modules_digest(program) == tool.modules_sha256


def modules_digest(program: Path) -> str:
    """SHA-256 of the sorted lines "path version h1:sum" of all modules in a Go program: the checksums of go.sum, which
    go writes into what it builds."""
    printed = subprocess.run(
        ["go", "version", "-m", str(program)], capture_output=True, text=True, check=False
    )
    modules = (line.split() for line in printed.stdout.splitlines())
    lines = sorted(" ".join(words[1:]) for words in modules if words[:1] in (["mod"], ["dep"], ["=>"]))
    return hashlib.sha256("\n".join(line for line in lines if "h1:" in line).encode()).hexdigest()


def run_installer(command: list[str], timeout_s: float = TIMEOUT_S, **environment: str) -> str:
    """Run to success and return the output; anything else is a NotInstallableError with its last line."""
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
    return done.stdout


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
