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
from tiered.formats.keys import archive_prefix
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import OffloadSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

KILLS = knob("MAINTENANCE_KILLS", 1)
TOPIC = "t_keys"
MANY_OBJECTS = OffloadSettings(batch_bytes=128 << 10, split_bytes=64 << 10, block_bytes=16 << 10)
BEFORE_COMMIT, COMMITTED, HALF_DELETED = MOMENTS


class Commands:
    """Real `tiered` processes on one archive."""

    def __init__(self, server: RunningStore, url: str) -> None:
        self.url = url
        self._environment = {
            **os.environ, **server.environment(), "PYTHONPATH": str(Path(__file__).parents[2]),
        }  # fmt: skip

    def run(self, verb: str, *arguments: str, moment: str = "") -> str:
        """Its output; with ``moment``, it must die there."""
        command = [
            sys.executable,
            "-m",
            "tests.faults.killed_maintenance",
            moment,
            verb,
            self.url,
            *arguments,
        ]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=300, check=False
        )
        expected = -signal.SIGKILL if moment else 0
        assert done.returncode == expected, (verb, arguments, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

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


def test_killed_at_every_step(real_store: Callable[[str], Path], minio_url: RunningStore) -> None:
    url = f"{minio_url.fresh_bucket()}/killed"
    root = open_store(url, minio_url.options())
    backfill(real_store("A") / "store", root, settings=MANY_OBJECTS)
    root.close()
    commands = Commands(minio_url, url)
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
    root = open_store(url, minio_url.options())
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
