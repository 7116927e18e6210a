"""Archives of every earlier format live on: today's uploader continues them, then they expire and are compacted."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rocketmq_tiered
from tests.fetcher.broker_store_writer import WrittenStore
from tests.formats.golden_archive import GOLDEN
from tests.kernels.record_builder import Message, encode
from tests.sweeps import sweep
from tiered.catalog.catalog_reader import load
from tiered.formats.container import CATALOG_MAJOR
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

VERSIONS = sorted(path.name for path in GOLDEN.glob("[0-9].[0-9]"))
OLD = [version for version in VERSIONS if version < f"{CATALOG_MAJOR}"]
LOG_BEGIN = 4096
"""Where the log of the golden archives begins."""
NAMES = ("cluster", "broker")
SET = ("offload.batch_bytes=65536", "index.after_backfill=true")
Queues = dict[tuple[str, int], dict[int, bytes]]
Run = Callable[..., tuple[int, str, str]]


def expected_of(version: str) -> Queues:
    found: dict[str, Any] = json.loads((GOLDEN / version / "expected.json").read_text())
    return {
        (item["queue"][0], item["queue"][1]): {
            row["offset"]: base64.b64decode(row["record"]) for row in item["rows"]
        }
        for item in found["queues"]
    }


def broker_store(directory: Path, version: str) -> WrittenStore:
    """A store whose log has all that was archived."""
    store = WrittenStore(directory)
    empty = len(encode(Message(), 0))
    store.put_record(encode(Message(body=bytes(LOG_BEGIN - empty + len(Message().body))), 0))
    records = {
        int.from_bytes(record[28:36], "big"): record
        for queue in expected_of(version).values()
        for record in queue.values()
    }
    for phys, record in sorted(records.items()):
        assert phys == store.phys
        store.put_record(record)
    return store


def content(url: str) -> Queues:
    with rocketmq_tiered.open(url) as archive:
        return {
            (queue.topic, queue.queue_id): {
                message.queue_offset: bytes(message.record.data)
                for message in archive.queue(queue.topic, queue.queue_id).messages()
            }
            for queue in archive.queues(hidden=True)
        }


@pytest.mark.parametrize("version", sweep(VERSIONS, fast=["2.1"], rest="integration"))
def test_an_older_archive_is_continued_expired_and_compacted(run: Run, tmp_path: Path, version: str) -> None:
    directory = tmp_path / "archive" / archive_prefix(*NAMES)
    shutil.copytree(GOLDEN / version / "archive", directory)
    url = f"file://{tmp_path}/archive"
    expected = expected_of(version)
    assert content(url) == expected

    if version in OLD:
        for words in (
            ("expire", url, "--topic", "golden-batch", "--all"),
            ("compact", url, "--older-than", "0"),
        ):
            code, out, err = run(*words, "--apply")
            assert code == 2 and "the archive's owner writes an older format" in out + err, out + err
    assert content(url) == expected

    store = broker_store(tmp_path / "store", version)
    store.records["golden", 0] = dict(expected["golden", 0])
    for part in range(2):
        for number in range(1200):
            store.put("golden", 0, b"%d of %d" % (number, part), keys=f"late-{part}-{number}")
            store.put("late", 0, bytes(1000))
        continued(run, store, url, expected)
    assert load(PrefixedStore(FileStore(tmp_path / "archive"), archive_prefix(*NAMES))).major == CATALOG_MAJOR

    code, out, err = run("expire", url, "--topic", "golden-batch", "--all", "--apply")
    assert code == 0, err
    expected["golden-batch", 1] = {}
    old = data_objects(GOLDEN / version / "archive")
    assert old < data_objects(directory)
    code, out, err = run(
        "compact", url, "--older-than", "0", "--apply", "--spool", tmp_path / "spool", "--json"
    )
    assert code == 0 and json.loads(out)["objects"] > len(old), out + err
    assert content(url) == expected

    store.put("golden", 0, b"the last")
    continued(run, store, url, expected)
    for _ in range(2):
        assert content(url) == expected
        code, out, err = run("verify", url, "--full", "--strict")
        assert code == 0, out + err
        for key in ("key-3-2", "late-1-1199"):
            code, out, _ = run("query", url, "--key", key, "--topic", "golden", "--all-time", "--json")
            assert code == 0 and len(json.loads(out)["messages"]) == 1
        for record in (expected["golden", 0][20], expected["golden", 0][1500]):
            code, out, _ = run("query", url, "--id", (record[64:72] + record[28:36]).hex(), "--json")
            assert code == 0 and len(json.loads(out)["messages"]) == 1
        assert run("gc", url, "--apply", "--grace", "0")[0] == 0
    assert not old & data_objects(directory)


def continued(run: Run, store: WrittenStore, url: str, expected: Queues) -> None:
    """Today's uploader archives what ``store`` has more."""
    names = ("--cluster", NAMES[0], "--broker", NAMES[1])
    code, _, err = run("backfill", store.path, url, *names, *(f"--set={each}" for each in SET), "--take-over")
    assert code == 0, err
    for queue, records in store.records.items():
        expected[queue] = dict(records)
    assert content(url) == expected


def data_objects(archive: Path) -> set[str]:
    return {path.name for path in archive.rglob("*") if path.suffix in (".so", ".sso")}
