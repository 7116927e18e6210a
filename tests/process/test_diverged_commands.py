"""`tiered ls --diverged`, `cat --log-history` and `gc --keep-log-history` after a log was truncated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits
from rocketmq_tiered.maintenance.compaction_round import plan_rounds, run_round
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tiered.archive.rewrite.result import RewriteOptions
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore

Run = Callable[..., tuple[int, str, str]]
SPEC = StoreSpec(topics=1, queues_per_topic=2, body_bytes=100, file_bytes=256 << 10)
LONG, SHORT = 600, 200


def cat(run: Run, *arguments: str) -> set[tuple[int, int, int]]:
    code, out, error = run("cat", *arguments, "--all")
    assert code == 0, error
    found = [json.loads(line) for line in out.splitlines()]
    return {(item["queueId"], item["queueOffset"], item["commitLogOffset"]) for item in found}


def compact(archive: ObjectStore, spool: Path) -> None:
    """One object for all messages so far."""
    state = load(archive)
    planned = next(
        plan_rounds(archive, state, CompactionLimits(), before_version=1 << 40, is_wanted=lambda *_: True)
    )
    options = RewriteOptions(spool, 1 << 30)
    assert run_round(archive, state, planned, options, clock=archive.clock_ms) is not None


@pytest.fixture(scope="module", params=[False, True], ids=["", "compacted"])
def truncated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(an archive of the whole log, one whose log was truncated, inside an object that compaction joined or not)."""
    directory = tmp_path_factory.mktemp("diverged")
    write_store(directory / "short", SPEC, messages=SHORT)
    write_store(directory / "long", SPEC, messages=LONG)
    for archive, stores in (("whole", ["long"]), ("archive", ["short", "long", "short"])):
        for store in stores:
            backfill(directory / store, FileStore(directory / archive), replace_log=True)
            if request.param and archive == "archive" and store == "long":
                made = PrefixedStore(FileStore(directory / archive), archive_prefix(CLUSTER, BROKER))
                compact(made, directory / "spool")
    return f"file://{directory}/whole", f"file://{directory}/archive"


def test_messages_of_a_truncated_log_are_listed_read_and_kept(
    run: Run, truncated: tuple[str, str], tmp_path: Path
) -> None:
    whole, url = truncated
    code, out, error = run("ls", url, "--diverged", "--json")
    assert code == 0, error
    found: list[dict[str, Any]] = json.loads(out)["diverged"]
    assert sum(item["messages"] for item in found) == LONG - SHORT
    assert {item["logHistory"] for item in found} == {1} and all(item["deletedAfterMs"] > 0 for item in found)
    assert f"{LONG - SHORT} messages" in run("ls", url, "--diverged")[1]
    lost = cat(run, whole) - cat(run, url)
    assert len(lost) == LONG - SHORT
    assert cat(run, url, "--log-history", "1") == lost
    assert json.loads(run("status", url, "--json")[1])["divergedObjects"] > 0

    assert run("gc", url, "--keep-log-history", "2")[0] == 3
    assert run("gc", url, "--keep-log-history", "1", "--apply")[0] == 2
    code, out, error = run("gc", url, "--keep-log-history", "1")
    assert code == 0 and "gc never deletes them" in out, error
    code, out, _ = run(
        "gc", url, "--apply", "--json", "--set", "gc.grace_ms=0", "--set", "gc.diverged_grace_ms=0"
    )
    assert code == 0
    assert cat(run, url, "--log-history", "1") == lost
    assert "kept" in run("ls", url, "--diverged")[1]
    assert json.loads(run("ls", url, "--diverged", "--json")[1])["diverged"][0]["deletedAfterMs"] is None
    assert json.loads(run("status", url, "--json")[1])["divergedObjects"] == 0
    assert run("verify", url)[0] == 0


@pytest.mark.parametrize("option", ["--follow", "--at-version=1"])
def test_a_log_history_neither_grows_nor_has_versions(
    run: Run, truncated: tuple[str, str], option: str
) -> None:
    code, _, error = run("cat", truncated[1], "--all", "--log-history", "1", option)
    assert code == 2 and "--log-history excludes" in error


def test_a_log_history_that_lost_nothing_is_said(run: Run, truncated: tuple[str, str]) -> None:
    code, _, error = run("cat", truncated[1], "--all", "--log-history", "7")
    assert code == 3 and "log history 7" in error
