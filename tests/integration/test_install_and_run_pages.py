"""A new user: from `pipx install` of the built wheel to a message read from MinIO beside a live broker.

The commands are those of the pages Install and Run, in order. Only the values of `export` lines are this test's.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.compose_accounts import URL, minio
from tests.servers.child import free_port
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import BROKER, CLUSTER, MQADMIN, RocketMq
from tests.servers.running_store import RunningStore

__all__ = ["minio"]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ACCOUNT = ROOT / "deploy" / "compose" / "accounts" / "sidecar"
READABLE_S = 60


def blocks(page: Path) -> list[str]:
    """The blocks of shell commands of a page."""
    return re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMq]:
    """With one message."""
    try:
        running = RocketMq("5.3.3", tmp_path_factory.mktemp("broker"))
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ is not available: {error}")
    with running:
        running.create_topic("orders", 1)
        running.run_java(
            MQADMIN,
            "sendMessage",
            "-n",
            running.name_server_address,
            "-t",
            "orders",
            "-b",
            BROKER,
            "-i",
            "0",
            "-k",
            "order-1",
            "-p",
            "first message",
        )
        yield running


def test_a_new_user_follows_the_pages(broker: RocketMq, minio: RunningStore, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path / "dist")]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    lock = (ROOT / "requirements-runtime.lock").read_text("utf-8")
    (tmp_path / "versions.txt").write_text(
        "\n".join(re.findall(r"^[\w.\[\]-]+==[^\s;]+", lock, re.MULTILINE))
    )
    keys = dict(line.split(" = ") for line in ACCOUNT.read_text("utf-8").splitlines() if " = " in line)
    exported = {
        "BROKER_CONF": str(broker.broker_conf),
        "ARCHIVE_URL": URL,
        "AWS_ENDPOINT_URL": minio.endpoint,
        "AWS_ACCESS_KEY_ID": keys["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": keys["aws_secret_access_key"],
    }
    home = tmp_path / "home"
    environment = {
        "HOME": str(home),
        "PATH": f"{home}/.local/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PIPX_DEFAULT_PYTHON": sys.executable,
        "PIP_FIND_LINKS": str(tmp_path / "dist"),
        "PIP_CONSTRAINT": str(tmp_path / "versions.txt"),
        "TIERED_ADMIN__PORT": str(free_port()),
        # The disk of this machine may be fuller than a broker's should be.
        "TIERED_PINS__CREATE_BELOW_RATIO": "0.99",
        "TIERED_PINS__RELEASE_ABOVE_RATIO": "1",
        **{
            name: value for name, value in os.environ.items() if name.startswith(("PIP_INDEX", "UV_", "SSL_"))
        },
        **{name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")},
    }
    home.mkdir()
    began = time.monotonic()
    said, pages = "", (ROOT / "docs" / "INSTALL.md", ROOT / "docs" / "RUN.md")
    try:
        for command in (line for page in pages for block in blocks(page) for line in block.splitlines()):
            if command.startswith("export "):
                name = command.split()[1].split("=")[0]
                environment[name] = exported.pop(name)
                continue
            said = result_of(command, environment, home)
            print(f"$ {command}\n{said}[{time.monotonic() - began:.1f} s]")
    finally:
        stop(home)
    assert not exported, "every value is used"
    assert "first message" in said and "order-1" in said
    assert f"{CLUSTER}/{BROKER}" in (home / "status").read_text()
    assert (home / ".local" / "share" / "bash-completion" / "completions" / "tiered").resolve().exists()
    assert (home / ".local" / "share" / "man" / "man1" / "tiered.1").exists()
    assert "compil" not in (home / "tiered.log").read_text(), "tiered compile has done it"


def result_of(command: str, environment: dict[str, str], home: Path) -> str:
    """What a command of a page prints. Those that wait for the sidecar are repeated for a while, as a user does."""
    deadline_s = time.monotonic() + READABLE_S
    while True:
        shell = ["bash", "-c", f"{command} echo $! > pid" if command.endswith("&") else command]
        done = subprocess.run(
            shell,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        waits = command.startswith(("tiered status", "tiered ls", "tiered cat"))
        is_there = "following" in done.stdout if command == "tiered status" else done.stdout != ""
        if done.returncode == 0 and (is_there or not waits):
            if command == "tiered status":
                (home / "status").write_text(done.stdout)
            return done.stdout
        log = home / "tiered.log"
        assert waits and time.monotonic() < deadline_s, (
            f"$ {command}: exit code {done.returncode}\n{done.stdout}{done.stderr}\n"
            f"{log.read_text() if log.exists() else ''}"
        )
        time.sleep(0.5)


def stop(home: Path) -> None:
    """End the process that the pages started."""
    if (home / "pid").exists():
        process = int((home / "pid").read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, 15)
        deadline_s = time.monotonic() + 40
        while Path(f"/proc/{process}").exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
