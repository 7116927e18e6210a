"""The commands against S3 servers: a whole cycle, and what a user sees when the store refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.servers.child import free_port
from tests.servers.proxy import Action, FaultProxy, ProxiedRequest
from tests.servers.running_store import RunningStore
from tests.sweeps import sweep

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
TIERED = (sys.executable, "-c", "import sys; from rocketmq_tiered.cli import main; sys.exit(main())")


SHORT_OUTAGE = """
import sys
from rocketmq_tiered.cli import main
from uploader import bounded_run
bounded_run.OUTAGE_S_MAX = {}
sys.exit(main())
"""


def _command(
    server: RunningStore | None, *arguments: str, outage_s_max: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    program = [*TIERED] if outage_s_max is None else [sys.executable, "-c", SHORT_OUTAGE.format(outage_s_max)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TIERED_"))}
    clean |= {"PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true"}
    clean |= (server.environment() if server is not None else {}) | environment
    return subprocess.run([*program, *arguments], capture_output=True, text=True, check=False, env=clean)


def _one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("tiered: ")]
    assert len(lines) == 1 and lines[0] == done.stderr.splitlines()[-1], done.stderr
    return lines[0]


def _whole_cycle(server: RunningStore, home: Path) -> None:
    url = f"{server.fresh_bucket()}/some/prefix"
    first = _command(server, "backfill", str(home / "store"), url, "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["messages"] == 18_004
    second = _command(server, "backfill", str(home / "store"), url, "--json")
    assert (json.loads(second.stdout)["objects"], json.loads(second.stdout)["commits"]) == (0, 0)
    listed = json.loads(_command(server, "ls", url, "--json").stdout)
    assert sum(queue["messages"] for queue in listed["queues"]) == 18_004
    assert len(_command(server, "cat", url, "--all").stdout.splitlines()) == 18_004
    verified = _command(server, "verify", url, "--full", "--strict")
    assert verified.returncode == 0, verified.stdout
    assert _command(server, "gc", url, "--apply", "--grace", "0").returncode == 0
    assert _command(server, "verify", url, "--full", "--strict").returncode == 0


@pytest.mark.integration
def test_a_whole_cycle_on_minio(minio_url: RunningStore, real_store: Callable[[str], Path]) -> None:
    _whole_cycle(minio_url, real_store("F"))


@pytest.mark.integration
def test_a_whole_cycle_on_localstack(localstack_url: RunningStore, real_store: Callable[[str], Path]) -> None:
    _whole_cycle(localstack_url, real_store("F"))


def test_a_missing_bucket_is_exit_3(moto_url: RunningStore, real_store: Callable[[str], Path]) -> None:
    store = str(real_store("F") / "store")
    for done in (
        _command(moto_url, "ls", "s3://absent-bucket/x"),
        _command(moto_url, "backfill", store, "s3://absent-bucket/x"),
    ):
        assert done.returncode == 3
        assert "absent-bucket" in _one_line(done)


def test_an_endpoint_that_refuses_connections_is_exit_4(moto_url: RunningStore) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    done = _command(moto_url, "ls", "s3://bucket/x", "--endpoint-url", endpoint)
    assert done.returncode == 4
    assert endpoint.removeprefix("http://") in _one_line(done)


def test_no_credentials_is_exit_2(moto_url: RunningStore, tmp_path: Path) -> None:
    endpoint = ("--endpoint-url", moto_url.endpoint, "--region", "us-east-1")
    done = _command(None, "ls", f"{moto_url.fresh_bucket()}/x", *endpoint, HOME=str(tmp_path))
    assert done.returncode == 2
    assert "credentials" in _one_line(done)


@pytest.mark.integration
def test_a_wrong_secret_is_exit_2_and_not_printed(minio_url: RunningStore) -> None:
    secret = "wrong-secret-wrong-secret"
    done = _command(minio_url, "ls", f"{minio_url.fresh_bucket()}/x", AWS_SECRET_ACCESS_KEY=secret)
    assert done.returncode == 2
    assert _one_line(done) and secret not in done.stderr + done.stdout


@pytest.mark.parametrize("commits", sweep([0, 1], fast=[1]))
def test_a_backfill_whose_commits_are_refused_is_exit_4(
    minio_url: RunningStore, real_store: Callable[[str], Path], commits: int
) -> None:
    """Not even the first one, before there is data that could be refused; or none behind the first."""
    taken: set[str] = set()

    def decide(asked: ProxiedRequest) -> Action:
        if asked.method != "PUT" or "/catalog/" not in asked.path:
            return Action.PASS
        if len(taken) < commits:
            taken.add(asked.path)
        return Action.PASS if asked.path in taken else Action.SLOW_DOWN

    url = minio_url.fresh_bucket()
    with FaultProxy(minio_url.endpoint, decide) as proxy:
        server = replace(minio_url, endpoint=proxy.endpoint)
        arguments = ("backfill", str(real_store("F") / "store"), url)
        done = _command(server, *arguments, outage_s_max=1.0)
    assert done.returncode == 4, done.stderr
    assert "has stored nothing for 1 s" in _one_line(done) and "SlowDown" in _one_line(done)
    assert "a request to the object store for the catalog failed and is tried again" in done.stderr
    assert _command(minio_url, *arguments).returncode == 0
