"""Every command on an encrypted archive does and prints what it does on a plain one; keys come and go; and what the
messages say is in no file but the broker's."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.fetcher.broker_store_writer import WrittenStore
from tests.object_store.sealed_scene import key_file
from tests.process.sidecar import ROOT, TIERED
from tests.sweeps import sweep

Run = Callable[..., tuple[int, str, str]]
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
        self.settings = ("--set", f"object_store.key_ring={'' if ring is None else ring}")

    def tiered(self, verb: str, *arguments: object, code: int = 0) -> str:
        """What a command prints that ends with ``code``."""
        found, out, err = self._run(verb, *arguments, *self.settings)
        assert found == code, (verb, arguments, err)
        return err if code else out

    def backfill(self, store: Path, *arguments: object) -> None:
        """Archive ``store``, in many small objects."""
        self.tiered("backfill", store, self.url, "--set", "offload.batch_bytes=131072", *arguments)

    def stored(self) -> dict[str, bytes]:
        """All data objects."""
        return {path.name: path.read_bytes() for path in self.directory.rglob("*.s*o")}

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
        archive.backfill(pack / "store", "--broker-conf", pack / "broker.conf")
        found[kind] = [archive.read(tmp_path / kind / "before", "same")]
        for verb, *arguments in MAINTENANCE:
            archive.tiered(verb, archive.url, *arguments)
        found[kind].append(archive.read(tmp_path / kind / "after", "compact"))
        document = json.loads(archive.tiered("verify", archive.url, "--full", "--json"))
        assert document["anomalies"] == document["leftovers"] == [], kind
        shutil.rmtree(next(archive.directory.rglob("catalog")))
        code = run("repair", archive.url, "--apply", *archive.settings)[0]
        found[kind].append({"cat": archive.tiered("cat", archive.url, "--all"), "repair": code})
    for plain, sealed in zip(found["plain"], found["sealed"], strict=True):
        for what, wanted in plain.items():
            assert sealed[what] == wanted, what


def test_keys_are_rotated_rewrapped_and_destroyed(
    run: Run, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    pack, topic = real_store("F"), "t_k_keys"  # small enough to be joined with others
    rules = ("--set", f'topics.rules=[{{"pattern": "{topic}", "encryption_key": "own"}}]')
    first = Archive(run, tmp_path, key_file(tmp_path / "first", "own", "k1"))
    first.backfill(pack / "store", "--broker-conf", pack / "broker.conf", *rules)
    assert "other keys of their own" in first.tiered(
        "backfill", pack / "store", first.url, "--broker-conf", pack / "broker.conf", code=2
    )
    everything = first.tiered("cat", first.url, "--all", "--format", "jsonl").splitlines()

    both = Archive(run, tmp_path, key_file(tmp_path / "both", "own", "k1", "k2"))
    both.tiered("keys", "rotate", both.url)
    both.tiered("compact", both.url, "--older-than", "0", "--apply")
    before = both.stored()
    assert "k2" in first.tiered("cat", first.url, "--all", code=2), (
        "half-rotated: the old ring names the new key"
    )
    both.tiered("keys", "rewrap", both.url)
    assert both.stored() == before
    keys = json.loads(both.tiered("keys", "check", both.url, "--json"))["keys"]
    assert sorted((one["ringKey"], one["ofTopics"]) for one in keys) == [("k2", False)] * 2 + [("own", True)]
    new = Archive(run, tmp_path, key_file(tmp_path / "new", "own", "k2"))
    assert new.tiered("cat", new.url, "--all", "--format", "jsonl").splitlines() == everything

    left = Archive(run, tmp_path, key_file(tmp_path / "left", "k2"))
    assert "key own is not in" in left.tiered("cat", left.url, topic, code=2)
    assert (
        "key own is not in"
        in left.tiered("keys", "check", left.url, code=2) + run("keys", "check", left.url, *left.settings)[1]
    )
    others = [line for line in everything if json.loads(line)["topic"] != topic]
    found: list[str] = []
    for other in sorted({json.loads(line)["topic"] for line in others}):
        found += left.tiered("cat", left.url, other, "--format", "jsonl").splitlines()
    assert sorted(found) == sorted(others) and others != everything
    left.tiered("compact", left.url, "--older-than", "0", "--apply")
    code, said, _ = run("verify", left.url, "--full", *left.settings)
    assert (code, said.count("not decrypted: key own is not in")) == (2, 1) and "ANOMAL" not in said

    without = Archive(run, tmp_path, None)
    for depth in ("--full", "--sample=0.5"):
        document = json.loads(without.tiered("verify", without.url, depth, "--json"))
        assert document["ok"] and document["anomalies"] == []
        assert document["counts"]["withoutKey"] > 0 and "own" in document["lackingKeys"][0]
    without.tiered("gc", without.url, "--apply", "--grace", "0")
    shutil.copytree(tmp_path / "archive", tmp_path / "mirror")
    new.url = f"file://{tmp_path / 'mirror'}"
    assert new.tiered("cat", new.url, "--all", "--format", "jsonl").splitlines() == everything
    assert json.loads(new.tiered("verify", new.url, "--full", "--json"))["anomalies"] == []
    damaged = next((tmp_path / "archive").rglob("*.s*o"))
    stored = bytearray(damaged.read_bytes())
    stored[len(stored) // 2] ^= 1
    damaged.write_bytes(stored)
    assert run("verify", without.url, "--full", *without.settings)[0] == 1


MARK = b"hidden"


def _store_of_marks(path: Path, messages: int) -> None:
    """Messages whose bodies, keys, tags, properties and groups have MARK; bodies do not compress."""
    store, chance = WrittenStore(path), random.Random(1)
    for number in range(messages):
        word = f"{MARK.decode()}-{number}-{chance.getrandbits(64):x}"
        store.put(
            f"topic-{number % 3}",
            number % 4,
            MARK + chance.randbytes(200) + word.encode(),
            tags=word,
            keys=word,
            more={"why": word},
        )
    (path / "config").mkdir(exist_ok=True)
    offsets = {f"topic-0@{MARK.decode()}-group": {"0": 5}}
    (path / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": offsets}))


@pytest.mark.parametrize("messages", sweep([4_000, 100_000], fast=[4_000]))
def test_what_messages_say_is_in_no_file_but_the_brokers(messages: int, run: Run, tmp_path: Path) -> None:
    """In none of the archive, the disk cache, the directories of compaction and of the process, also of killed ones,
    which leave no core."""
    _store_of_marks(tmp_path / "store", messages)
    for ring, is_found in ((None, True), (key_file(tmp_path / "ring", "k1"), False)):
        home = tmp_path / ("plain" if ring is None else "sealed")
        archive = Archive(run, home, ring)
        places = ("--set", f"fetch.disk_cache_path={home / 'cache'}")
        archive.backfill(tmp_path / "store", "--cluster", "c", "--broker", "b")
        archive.tiered("cat", archive.url, "--all", *places)
        spool = home / "spool"
        command = ("compact", archive.url, "--older-than", "0", "--apply", "--spool", str(spool))
        (home / "tmp").mkdir()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(home / "tmp")}
        with_core = ("sh", "-c", 'ulimit -c unlimited; exec "$@"', "sh", *TIERED)
        killed = subprocess.Popen([*with_core, *command, *archive.settings], env=environment, cwd=home)
        while killed.poll() is None and not any(spool.rglob("0")):
            time.sleep(0.001)
        killed.send_signal(signal.SIGABRT)
        assert killed.wait() == -signal.SIGABRT
        found = [path for path in home.rglob("*") if path.is_file() and MARK in path.read_bytes()]
        assert bool(found) == is_found, found
        assert len(list((home / "cache").rglob("*"))) > 1
