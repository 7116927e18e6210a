"""Build wheel and sdist, install the wheel in a clean environment, and archive the example store with it.

Fails above the sizes below. The steps are those of the image: without a compiler run at the first start.

The locked `build` and `hatchling` build both files, the wheel from the sdist. The environment gets the locked runtime
dependencies, checked by hash, without Spark and development tools. At the end it gets the extra `sql`, and runs all
commands and programs of docs/SQL.md and docs/READING.md. Exits non-zero on any failure.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
import zipfile
from pathlib import Path

import zstandard

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
STORE = "F-533-sigkill"
MESSAGES = 18_004
WHEEL_BYTES_MAX = 2 << 20
INSTALLED_BYTES_MAX = 420_000_000
"""Without pip, which pipx shares. llvmlite has 180 MB of them, cryptography 16."""
DOCUMENTS_S_MAX = 60
"""Of processor time for all that documents tell to run."""
READY_S_MAX = 5.0
"""Of processor time until the first start archives: on a busy machine it takes longer."""
SHARED = ("man/man1/tiered.1", "bash-completion/completions/tiered", "zsh/site-functions/_tiered")
PACKAGES = ("tiered", "uploader", "fetcher", "rocketmq_tiered")


def main() -> int:
    """Run all steps; returns the exit code."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    (wheel,), (sdist,) = list(DIST.glob("*.whl")), list(DIST.glob("*.tar.gz"))
    check_contents(wheel, sdist)
    if wheel.stat().st_size > WHEEL_BYTES_MAX:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {WHEEL_BYTES_MAX:,}")
    with tempfile.TemporaryDirectory(prefix="tiered-package-") as directory:
        check_installed(wheel, Path(directory))
        check_documents(wheel, Path(directory))
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
    print_sizes(wheel, environment)
    if missing := [name for name in SHARED if not (environment / "share" / name).exists()]:
        sys.exit(f"the installation lacks {missing}")
    imports = "; ".join(f"import {package}" for package in PACKAGES)
    run(environment / "bin" / "python", "-c", imports, cwd=directory)

    tiered = environment / "bin" / "tiered"
    version = run(tiered, "--version", cwd=directory)
    if wheel.name.split("-")[1] not in version:
        sys.exit(f"tiered --version prints {version.strip()}, the wheel is {wheel.name}")
    began = time.monotonic()
    run(tiered, "compile", cwd=directory)
    print(f"tiered compile: {time.monotonic() - began:.0f} s")
    with (ROOT / "examples" / f"{STORE}.tar.zst").open("rb") as packed:
        stream = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(packed)
        with tarfile.open(fileobj=io.BufferedReader(stream), mode="r|") as pack:  # type: ignore[type-var]
            pack.extractall(directory, filter="data")
    home, archive = directory / STORE, f"file://{directory / 'archive'}"
    commands = (
        ("backfill", home / "store", archive, "--broker-conf", home / "broker.conf"),
        ("verify", archive, "--full"),
    )
    for words in commands:
        said = run(tiered, *words, cwd=directory, **NO_CACHE)
        if "compil" in said:
            sys.exit(f"tiered {words[0]} compiles kernels after tiered compile:\n{said}")
    check_start(tiered, home, directory)
    messages = run(tiered, "cat", archive, "--all", cwd=directory).count("\n")
    if messages != MESSAGES:
        sys.exit(f"tiered cat prints {messages} messages, the store has {MESSAGES}")


def check_documents(wheel: Path, directory: Path) -> None:
    """The commands and programs of docs/SQL.md and docs/READING.md run as they are written, but for addresses, in the
    environment with the extra `sql`, and on the example store's archive. A block that is neither is the output of the
    command before it. Programs pass mypy --strict with the installed package's types."""
    binaries = directory / "venv" / "bin"
    pins = re.findall(r"^[^# \n]+==[^ \n]+", (ROOT / "requirements.lock").read_text("utf-8"), re.MULTILINE)
    (directory / "pins").write_text("\n".join(pins), "utf-8")
    run(binaries / "pip", "install", "--quiet", "-c", directory / "pins", f"{wheel}[sql]")
    before = os.times()
    orders = "from pathlib import Path; from tests.sql.conftest import write_orders; write_orders(Path({!r}))"
    run(sys.executable, "-c", orders.format(f"{directory}/orders"))
    (directory / "tiered.toml").touch()
    addresses = {
        "s3://bucket/prefix": f"file://{directory}/orders",
        "file:///tmp/tour/archive": f"file://{directory}/archive",
        "/tables": str(directory / "tables"),
    }
    path, said, programs = {"PATH": f"{binaries}:{os.environ['PATH']}"}, "", list[Path]()
    for page in ("SQL.md", "READING.md"):
        text = (ROOT / "docs" / page).read_text("utf-8")
        for written, given in addresses.items():
            text = text.replace(written, given)
        for indented in re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE):
            block = textwrap.dedent(indented).strip("\n")
            for part in [block] if "import " in block else block.split("\n\n"):
                if "import " in part:
                    programs.append(directory / f"program{len(programs)}.py")
                    programs[-1].write_text(part, "utf-8")
                    said = run("python", programs[-1], cwd=directory, **path)
                elif part.startswith("tiered "):
                    said = "".join(
                        run("bash", "-c", line, cwd=directory, **path) for line in part.split("\n")
                    )
                elif part and part != said.strip("\n"):
                    sys.exit(f"docs/{page} shows\n{part}\nThe command prints\n{said}")
    strict = ("-m", "mypy", "--strict", "--ignore-missing-imports", "--config-file=", "--scripts-are-modules")
    run(sys.executable, *strict, "--python-executable", binaries / "python", *programs, cwd=directory)
    after = os.times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"docs/SQL.md and docs/READING.md: run in {used_s:.0f} s of processor time")
    if used_s > DOCUMENTS_S_MAX:
        sys.exit(f"the documents took {used_s:.0f} s of processor time, more than {DOCUMENTS_S_MAX} s")


NO_CACHE = {"NUMBA_CACHE_DIR": "/dev/null"}
"""As with a read-only file system: only what is compiled ahead is there."""


def print_sizes(wheel: Path, environment: Path) -> None:
    """Of wheel and environment, with its largest packages; exits if the environment is too large."""
    site = next((environment / "lib").glob("python*/site-packages"))
    sizes = {path.name: tree_bytes(path) for path in site.iterdir()}
    whole = tree_bytes(environment) - sizes["pip"]
    largest = sorted(sizes, key=lambda name: -sizes[name])[:8]
    print(f"wheel {wheel.stat().st_size / 1e6:.2f} MB, installed {whole / 1e6:.0f} MB: ", end="")
    print(", ".join(f"{name} {sizes[name] / 1e6:.0f}" for name in largest))
    if whole > INSTALLED_BYTES_MAX:
        sys.exit(f"the installation has {whole:,} bytes, more than {INSTALLED_BYTES_MAX:,}")


def tree_bytes(path: Path) -> int:
    """Of all files below."""
    files = (
        [path]
        if path.is_file()
        else [one for one in path.rglob("*") if one.is_file() and not one.is_symlink()]
    )
    return sum(one.stat().st_size for one in files)


def check_start(tiered: Path, home: Path, directory: Path) -> None:
    """`tiered run` is ready soon after its start, with nothing cached but what is compiled ahead."""
    command = [
        tiered,
        "run",
        "--store",
        home / "store",
        "--broker-conf",
        home / "broker.conf",
        "--url",
        f"file://{directory / 'started'}",
        "--state-dir",
        directory / "state",
        "--set",
        "admin.port=0",
    ]
    began = time.monotonic()
    with (directory / "run.log").open("w+") as log:
        process = subprocess.Popen(
            list(map(str, command)), stderr=log, env={**os.environ, **NO_CACHE}, cwd=directory
        )
        try:
            while "state following" not in (text := (directory / "run.log").read_text("utf-8")):
                if process.poll() is not None or time.monotonic() - began > 60:
                    sys.exit(f"tiered run did not begin to archive:\n{text}")
                time.sleep(0.02)
            took_s, used_s = time.monotonic() - began, cpu_s(process.pid)
        finally:
            process.terminate()
            process.wait()
    print(f"tiered run: following after {took_s:.1f} s, {used_s:.1f} s of processor time")
    if used_s > READY_S_MAX or "compiling" in text:
        sys.exit(f"the first start used {used_s:.1f} s, more than {READY_S_MAX} s, or compiled:\n{text}")


def cpu_s(pid: int) -> float:
    """Processor time of a process until now."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def run(*command: object, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command and return its output; exits with its error output if it fails. With ``variables`` of the
    environment the error output is returned too."""
    print("$", *command, flush=True)
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{command[0]}: exit code {done.returncode}")
    return done.stdout + (done.stderr if variables else "")


if __name__ == "__main__":
    sys.exit(main())
