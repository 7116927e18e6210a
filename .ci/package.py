"""Build wheel and sdist, install the wheel in a clean environment, and archive the example store with it.

The locked `build` and `hatchling` build both files, the wheel from the sdist. The environment gets the locked runtime
dependencies, checked by hash, without Spark and development tools. Exits non-zero on any failure.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import zstandard

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
STORE = "F-533-sigkill"
MESSAGES = 18_004
PACKAGES = (
    "tiered",
    "uploader",
    "maintenance",
    "fetcher",
    "server",
    "sidecar",
    "pipeline",
    "rocketmq_tiered",
)


def main() -> int:
    """Run all steps; returns the exit code."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    (wheel,), (sdist,) = list(DIST.glob("*.whl")), list(DIST.glob("*.tar.gz"))
    check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory(prefix="tiered-package-") as directory:
        check_installed(wheel, Path(directory))
    print(f"{wheel.name} and {sdist.name}: built, installed, {MESSAGES} messages archived and read back")
    return 0


def check_contents(wheel: Path, sdist: Path) -> None:
    """Every module and the licence are in both files, and the type marker is in the wheel."""
    modules = {
        path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    packed = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as source:
        sources = {name.split("/", 1)[-1] for name in source.getnames()}
    for name, contents in ((wheel.name, packed), (sdist.name, sources)):
        if missing := modules - contents:
            sys.exit(f"{name} lacks {sorted(missing)}")
    if "rocketmq_tiered/py.typed" not in packed or not any(name.endswith("LICENSE") for name in packed):
        sys.exit(f"{wheel.name} lacks py.typed or LICENSE")


def check_installed(wheel: Path, directory: Path) -> None:
    """The installed command reports its version, archives the example store and reads it back."""
    environment = directory / "venv"
    run(sys.executable, "-m", "venv", environment)
    pip = (environment / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--require-hashes", "-r", ROOT / "requirements-runtime.lock")
    run(*pip, "--no-index", "--no-deps", wheel)
    run(environment / "bin" / "pip", "check")
    imports = "; ".join(f"import {package}" for package in PACKAGES)
    run(environment / "bin" / "python", "-c", imports, cwd=directory)

    tiered = environment / "bin" / "tiered"
    version = run(tiered, "--version", cwd=directory)
    if wheel.name.split("-")[1] not in version:
        sys.exit(f"tiered --version prints {version.strip()}, the wheel is {wheel.name}")
    with (ROOT / "examples" / f"{STORE}.tar.zst").open("rb") as packed:
        stream = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(packed)
        with tarfile.open(fileobj=io.BufferedReader(stream), mode="r|") as pack:  # type: ignore[type-var]
            pack.extractall(directory, filter="data")
    home, archive = directory / STORE, f"file://{directory / 'archive'}"
    run(tiered, "backfill", home / "store", archive, "--broker-conf", home / "broker.conf", cwd=directory)
    messages = run(tiered, "cat", archive, "--all", cwd=directory).count("\n")
    if messages != MESSAGES:
        sys.exit(f"tiered cat prints {messages} messages, the store has {MESSAGES}")


def run(*command: object, cwd: Path = ROOT) -> str:
    """Run a command and return its output; exits with its error output if it fails."""
    print("$", *command, flush=True)
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{command[0]}: exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
