"""The admin port of a real `tiered serve`: health, readiness, status, metrics with refusals, and the Host check."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.offloading import backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.servers.child import ChildServer, free_port
from tests.servers.tiered_serve import tiered_serve
from tiered.object_store.file import FileStore
from tiered.remoting.command import RemotingCommand, encode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ROOT = Path(__file__).parent.parent.parent
RULES = "accounts:\n- {accessKey: reader-1, secretKey: secret-1234, topicPerms: [t=SUB]}\n"


@dataclass
class Served:
    """`tiered serve` with access rules."""

    server: ChildServer
    address: str
    admin_port: int

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """A page of the admin port."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=20)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def ask_unsigned(self) -> None:
        """A pull without a signature, and its refusal."""
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port)), 20) as client:
            client.sendall(encode(RemotingCommand(31, 1, ext_fields={"topic": "t", "queueId": "0"})))
            assert client.recv(4096)


@pytest.fixture
def archive(tmp_path: Path) -> str:
    written = WrittenStore(tmp_path / "store")
    for number in range(10):
        written.put("t", 0, b"%d" % number)
    store = FileStore(tmp_path / "archive")
    backfill(tmp_path / "store", store)
    return store.url


@contextmanager
def serving(archive: str, directory: Path) -> Iterator[Served]:
    directory.mkdir()
    (directory / "rules.yml").write_text(RULES)
    port = free_port()
    flags = ("--set", f"admin.port={port}", "--set", f"serve.acl_file={directory}/rules.yml")
    server, address = tiered_serve(archive, directory, *flags)
    server.start()
    try:
        served = Served(server, address, port)
        until(lambda: served.get("/health") == (200, "serving\n"))
        yield served
    finally:
        server.stop()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_admin_port_of_a_server(archive: str, tmp_path: Path) -> None:
    with serving(archive, tmp_path / "one") as one:
        assert one.get("/ready") == (200, "serving, and owner of the consumer groups\n")
        one.ask_unsigned()
        until(
            lambda: 'rocketmq_tiered_store_serve_audited_total{event="refused"} 1.0' in one.get("/metrics")[1]
        )
        assert "rocketmq_tiered_store_decode_memory_shortages_total{" in one.get("/metrics")[1]
        status = json.loads(one.get("/status.json")[1])
        assert status["address"] == one.address and status["ownsGroups"] and status["audited"]["refused"] == 1
        assert one.get("/metrics", Host="attacker.example")[0] == 421
        with serving(archive, tmp_path / "two") as two:
            code, why = two.get("/ready")
            assert code == 503 and "another server owns the consumer groups" in why
            assert two.get("/health")[0] == 200


def test_a_taken_admin_port_ends_the_start_with_a_hint(archive: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [
                sys.executable, "-m", "rocketmq_tiered.cli", "serve", archive, "--bind", "127.0.0.1:0",
                "--set", f"admin.port={port}",
            ],
            capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert ended.returncode == 2 and "set admin.port" in ended.stderr
