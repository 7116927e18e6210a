"""kill -9 of `tiered expire` and `tiered gc` at every step, on MinIO: the archive stays whole, the next pass finishes.

Ten times at each step: ``SOAK_MAINTENANCE_KILLS=10``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.faults.killed_maintenance import MOMENTS
from tests.servers.running_store import RunningStore
from tests.soak.results import knob
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import OffloadSettings

KILLS = knob("MAINTENANCE_KILLS", 1)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600 + 600 * KILLS)]

ATTEMPTS = 5
"""Of a command whose store does not answer: a busy machine."""
TOPIC = "t_k_one"
MANY_OBJECTS = OffloadSettings(batch_bytes=64 << 10, split_bytes=16 << 10, block_bytes=16 << 10)
BEFORE_COMMIT, COMMITTED, HALF_DELETED = MOMENTS


class Commands:
    """Real `tiered` processes on one archive, as a context manager. ``output``: a file for what they print."""

    def __init__(self, server: RunningStore, url: str, output: Path) -> None:
        self.url, self._output = url, output
        environment = {
            **os.environ,
            **server.environment(),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.killed_maintenance"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.communicate()

    def run(self, verb: str, *arguments: str, moment: str = "") -> str:
        """Its output; with ``moment``, it must die there."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        command = {"moment": moment, "words": [verb, self.url, *arguments], "output": str(self._output)}
        for _ in range(ATTEMPTS):
            print(json.dumps(command), file=self._parent.stdin, flush=True)
            code = int(self._parent.stdout.readline())
            if code != UnavailableError.exit_code:
                break
        errors = self._output.with_suffix(".err").read_text()
        assert code == (-signal.SIGKILL if moment else 0), (verb, arguments, errors[-2000:])
        return self._output.read_text()

    def expire(self, keep_bytes: int, moment: str = "") -> int:
        """Expire all but the newest bytes of the topic; messages that expired."""
        rules = f'topics.rules=[{{"pattern": "{TOPIC}", "max_bytes": {keep_bytes}}}]'
        out = self.run("expire", "--set", rules, "--yes", "--apply", "--json", moment=moment)
        return 0 if moment else int(json.loads(out)["rows"])

    def gc(self, moment: str = "") -> int:
        """Collect at once; objects that were deleted."""
        out = self.run("gc", "--apply", "--grace", "0s", "--json", moment=moment)
        return 0 if moment else len(json.loads(out)["delete"])

    def messages(self) -> tuple[int, int]:
        """Messages of the topic, and their bytes."""
        rows = [row for row in json.loads(self.run("ls", "--json"))["queues"] if row["topic"] == TOPIC]
        return sum(row["messages"] for row in rows), sum(row["bytes"] for row in rows)


def test_killed_at_every_step(
    real_store: Callable[[str], Path], minio_url: RunningStore, tmp_path: Path
) -> None:
    url = f"{minio_url.fresh_bucket()}/killed"
    root = open_store(url, minio_url.options())
    backfill(real_store("F") / "store", root, settings=MANY_OBJECTS)
    root.close()
    with Commands(minio_url, url, tmp_path / "output") as commands:
        kill_at_every_step(commands, minio_url)


def kill_at_every_step(commands: Commands, server: RunningStore) -> None:
    """KILLS times, each time after less has expired."""
    messages, size_bytes = commands.messages()
    for number in range(KILLS):
        keep_bytes = size_bytes * (KILLS - number) // (KILLS + 1)
        before = commands.messages()
        commands.expire(keep_bytes, BEFORE_COMMIT)
        assert commands.messages() == before
        commands.expire(keep_bytes, COMMITTED)
        after = commands.messages()
        assert after < before and after[1] <= keep_bytes
        assert commands.expire(keep_bytes) == 0, "the pass was whole"
        for moment in (HALF_DELETED, BEFORE_COMMIT, COMMITTED):
            commands.gc(moment)
            commands.run("verify", "--full")
        commands.gc()
        assert commands.messages() == after and commands.gc() == 0
    assert 0 < commands.messages()[0] < messages
    # A list that no commit names belongs to an epoch, and is collected in the next one.
    root = open_store(commands.url, server.options())
    archive = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    next_writer = CatalogWriter(
        archive, cluster=CLUSTER, broker=BROKER, instance="next", kind="run", clock_ms=archive.clock_ms
    )
    next_writer.load()
    next_writer.claim(take_over=True)
    root.close()
    commands.gc()
    commands.gc()
    commands.run("verify", "--full", "--strict")
