"""Every command on an encrypted archive does and prints what it does on a plain one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.object_store.sealed_scene import key_file
from tests.sweeps import sweep

Run = Callable[..., tuple[int, str, str]]
CYCLES = ("--set", "offload.batch_bytes=131072")
MAINTENANCE = (
    ("compact-keys", "--older-than", "0", "--apply"),
    ("compact", "--older-than", "0", "--apply"),
    ("gc", "--apply", "--grace", "0"),
)
STATEMENT = (
    "SELECT topic, queue_id, count(*), min(queue_offset), max(queue_offset), "
    "md5(string_agg(hex(body) || coalesce(uniq_key, ''), ',' ORDER BY queue_offset)) "
    "FROM messages GROUP BY ALL ORDER BY ALL"
)


class Archive:
    """One archive, and the commands of an operator who has its keys, if there are any."""

    def __init__(self, run: Run, directory: Path, ring: Path | None) -> None:
        self.directory = directory
        self.url = f"file://{directory / 'archive'}"
        self._run = run
        self._settings = ("--set", f"object_store.key_ring={'' if ring is None else ring}")

    def tiered(self, verb: str, *arguments: object) -> str:
        """The output of a command that succeeds."""
        code, out, err = self._run(verb, *arguments, *self._settings)
        assert code == 0, (verb, arguments, err)
        return out

    def read(self, target: Path, layout: str) -> dict[str, Any]:
        """What all readers find."""
        found: dict[str, Any] = {"queues": json.loads(self.tiered("ls", self.url, "--json"))["queues"]}
        found["cat"] = self.tiered("cat", self.url, "--all", "--format", "jsonl")
        found["sql"] = self.tiered("sql", self.url, STATEMENT, "--json")
        self.tiered("export", self.url, f"file://{target / 'export'}")
        tables = [parquet.read_table(path) for path in sorted((target / "export").rglob("*.parquet"))]
        found["export"] = [sorted(map(repr, table.to_pylist())) for table in tables]
        self.tiered("restore", self.url, target / "store", "--layout", layout)
        log = target / "store" / "commitlog"
        found["restore"] = {path.name: path.read_bytes() for path in log.iterdir()}
        return found


@pytest.mark.parametrize("name", sweep(["H2", "K", "E"], fast=["H2"], rest="integration"))
def test_an_encrypted_archive_is_read_and_kept_as_a_plain_one(
    name: str, run: Run, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    pack, ring = real_store(name), key_file(tmp_path / "ring", "k1")
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in ("plain", "sealed"):
        archive = Archive(run, tmp_path / kind, ring if kind == "sealed" else None)
        archive.tiered(
            "backfill", pack / "store", archive.url, "--broker-conf", pack / "broker.conf", *CYCLES
        )
        found[kind] = [archive.read(tmp_path / kind / "before", "same")]
        for verb, *arguments in MAINTENANCE:
            archive.tiered(verb, archive.url, *arguments)
        found[kind].append(archive.read(tmp_path / kind / "after", "compact"))
        document = json.loads(archive.tiered("verify", archive.url, "--full", "--json"))
        assert document["anomalies"] == document["leftovers"] == [], kind
    for plain, sealed in zip(found["plain"], found["sealed"], strict=True):
        for what, wanted in plain.items():
            assert sealed[what] == wanted, what
    assert json.loads(run("keys", "check", archive.url, "--json", *archive._settings)[1])["keys"]
