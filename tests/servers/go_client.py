"""The Go client's consumer (``go/``), built once into the cache."""

import shutil
from pathlib import Path

from tests.servers.install import TIMEOUT_S, NotInstallableError, cache_directory, only_once, run_installer

GO_SOURCES = Path(__file__).parent / "go"


def go_consumer(timeout_s: float = TIMEOUT_S) -> Path:
    """The program, built now when missing or older than its sources."""
    if shutil.which("go") is None:
        raise NotInstallableError("the Go client is built by go, which is not on PATH")
    program = cache_directory() / "bin" / "go-consumer"
    newest = max(source.stat().st_mtime for source in GO_SOURCES.iterdir())
    with only_once("go-consumer"):
        if not program.exists() or program.stat().st_mtime < newest:
            program.parent.mkdir(parents=True, exist_ok=True)
            run_installer(["go", "build", "-C", str(GO_SOURCES), "-o", str(program), "."], timeout_s)
    return program
