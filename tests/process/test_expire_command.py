"""`tiered expire` on a real store's archive: dry run, the brake, erasing a topic, and what readers find afterwards."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rocketmq_tiered
from rocketmq_tiered.cli import main
from tests.end_to_end.offloading import SMALL, backfill
from tiered.object_store.file import FileStore

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url(real_store: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Store F, archived."""
    store = real_store("F")
    target = f"file://{tmp_path}/archive"
    assert (
        main(
            ["backfill", str(store / "store"), target, "--broker-conf", str(store / "broker.conf"), "--json"]
        )
        == 0
    )
    capsys.readouterr()
    return target


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def execute(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return execute


def queues(run: Run, url: str) -> dict[tuple[str, int], tuple[int, int]]:
    listed = json.loads(run("ls", url, "--json", "--hidden")[1])["queues"]
    return {(found["topic"], found["queueId"]): (found["minOffset"], found["maxOffset"]) for found in listed}


def data_objects(url: str) -> list[Path]:
    # Not rglob, which fails where another process removes a directory.
    found = os.walk(url.removeprefix("file://"))
    return [Path(at, name) for at, _, names in found for name in names if name.endswith((".so", ".sso"))]


def test_a_pass_is_a_dry_run_and_stops_at_a_large_share(run: Run, url: str) -> None:
    code, out, _ = run("expire", url)
    assert code == 0 and "nothing expires" in out  # forever is the default
    rules = ("--set", "retention.ttl=1h", "--set", "retention.min_archived=1ms")
    before = queues(run, url)
    code, out, error = run("expire", url, *rules, "--apply")
    assert code == 2 and "100% of the archive expires, more than retention.max_share (20%)" in error, error
    assert queues(run, url) == before
    code, out, _ = run("expire", url, *rules, "--yes")
    assert code == 0 and "dry run, add --apply to expire: 18,004 messages" in out
    assert queues(run, url) == before
    code, out, _ = run("expire", url, *rules, "--yes", "--apply", "--json")
    document = json.loads(out)
    assert code == 0 and document["applied"] and document["rows"] == 18_004
    assert all(begin == end for begin, end in queues(run, url).values())
    assert run("verify", url, "--full")[0] == 0
    version = document["version"]
    assert run("gc", url, "--apply", "--grace", "0")[0] == 0
    code, _, error = run("cat", url, "--all", "--at-version", version)
    assert code == 3 and f"version {version} of the archive is no longer whole" in error
    code, out, _ = run("verify", url, "--full", "--strict")
    assert code == 0 and "messages 0" in out
    assert not data_objects(url)


def test_a_topic_is_erased_and_the_others_stay(run: Run, url: str) -> None:
    before = queues(run, url)
    code, out, error = run("expire", url, "--topic", "t_k_one")
    assert code == 2 and "it requires --all" in error
    code, erased, _ = run("expire", url, "--topic", "t_k_one", "--all", "--apply")
    assert code == 0 and "stay in objects with living messages" in erased
    after = queues(run, url)
    for queue, (begin, end) in before.items():
        assert after[queue] == ((end, end) if queue[0] == "t_k_one" else (begin, end))
    code, out, _ = run("cat", url, "t_k_one")
    assert code == 0 and not out
    assert run("verify", url, "--full")[0] == 0
    version = int(re.search(r"--at-version (\d+)", erased)[1])  # type: ignore[index]
    code, out, _ = run("cat", url, "t_k_one", "--at-version", version)
    assert code == 0 and len(out.splitlines()) == sum(
        end - begin for (topic, _), (begin, end) in before.items() if topic == "t_k_one"
    )
    code, _, error = run("expire", url, "--topic", "unknown", "--all")
    assert code == 2 and "has no topic unknown" in error


def test_ls_shows_what_is_due_and_what_is_left(
    run: Run, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    backfill(real_store("F") / "store", FileStore(tmp_path / "archive"))
    url = f"file://{tmp_path}/archive"
    rules = ("--set", 'topics.rules=[{"pattern": "t_k_*", "max_bytes": "200KiB"}]')

    def listed(*options: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(run("ls", url, *rules, *options, "--json")[1])["queues"]
        return found

    due = {(row["topic"], row["queueId"]): row for row in listed("--due")}
    expired = json.loads(run("expire", url, *rules, "--yes", "--apply", "--json")[1])
    assert 0 < expired["bytes"] == sum(row["dueBytes"] for row in due.values())
    assert {(row["topic"], row["queueId"]): row["rows"] for row in expired["queues"]} == {
        queue: row["dueMessages"] for queue, row in due.items() if row["dueMessages"]
    }
    parts, due_after = 0, {}
    with rocketmq_tiered.open(url) as archive:
        for row in listed("--due"):
            before = due[row["topic"], row["queueId"]]
            left = list(archive.queue(row["topic"], row["queueId"]).messages())
            # Of the run that a limit divides, the share of its rows counts.
            assert row["bytes"] == pytest.approx(sum(len(message.record.data) for message in left), rel=0.05)
            assert row["messages"] == len(left)
            if not before["dueMessages"]:
                assert row["bytes"] == before["bytes"]
            stored_ms = [message.record.store_timestamp for message in left]
            if stored_ms and before["dueMessages"]:  # that of the run which the limit divides
                assert row["oldestStoreTimestamp"] <= min(stored_ms)
            else:
                assert row["oldestStoreTimestamp"] == min(stored_ms, default=None)
            due_after[row["topic"], row["queueId"]] = row["oldestStoreTimestamp"]
            parts += bool(left) and before["dueMessages"] > 0
    assert parts > 0
    asked, all_topics = listed("--topic", "t_k_*"), listed()
    assert asked and all(
        row["oldestStoreTimestamp"] == due_after[row["topic"], row["queueId"]] for row in asked
    )
    assert not any("oldestStoreTimestamp" in row for row in all_topics)
    by_topic = json.loads(run("ls", url, "--by-topic", "--due", "--json")[1])["topics"]
    assert sum(row["messages"] for row in by_topic) == sum(row["messages"] for row in listed())
    assert {row["nextDueMs"] for row in by_topic} == {None} and not any(row["dueBytes"] for row in by_topic)
    assert "due bytes" in run("ls", url, "--by-topic", "--due")[1].splitlines()[0]


def test_readers_say_what_expired(run: Run, real_store: Callable[[str], Path], tmp_path: Path) -> None:
    backfill(real_store("F") / "store", FileStore(tmp_path / "archive"), settings=SMALL)
    url = f"file://{tmp_path}/archive"
    first = json.loads(run("cat", url, "t_k_four", "--queue", "0", "--limit", "1")[1])
    rules = ("--set", 'topics.rules=[{"pattern": "t_k_four", "max_bytes": "100KiB"}]')
    assert run("expire", url, *rules, "--yes", "--apply")[0] == 0
    floor = queues(run, url)["t_k_four", 0][0]
    assert floor > 1
    at, stored = ("t_k_four", "--queue", "0"), str(first["storeTimestamp"])

    code, _, error = run("cat", url, *at, "--from", "1", "--limit", "1")
    assert code == 0 and f"t_k_four queue 0: offsets 1 to {floor - 1} have expired" in error
    code, _, error = run("cat", url, *at, "--since", stored, "--limit", "1")
    assert code == 0 and f"t_k_four queue 0: messages before offset {floor} have expired" in error
    assert run("cat", url, *at, "--limit", "1")[2] == ""

    said = f"t_k_four queue 0: messages before offset {floor:,} have expired"
    for boundary in ("lower", "upper"):
        code, out, error = run("offset", url, *at, "--time", stored, "--boundary", boundary)
        assert (code, out.strip()) == (0, str(floor)) and said in error
        (row,) = json.loads(run("offset", url, *at, "--time", stored, "--boundary", boundary, "--json")[1])[
            "queues"
        ]
        assert row["expired"] is True
    assert "expired" not in run("offset", url, *at, "--time", "2100-01-01")[2]

    wanted = (
        ("--topic", "t_k_four", "--unique-key", first["uniqKey"]),
        ("--id", f"7F00000100005B1E{first['commitLogOffset']:016X}"),
    )
    for arguments in wanted:
        code, _, error = run("query", url, *arguments)
        assert code == 3 and "; it may have expired; " in error
    code, _, error = run("query", url, "--topic", "t_k_one", "--key", "none")
    assert code == 3 and "may have expired" not in error


def test_expiry_and_collection_repeat_until_they_are_stopped(run: Run, url: str) -> None:
    assert data_objects(url)
    code, _, error = run("expire", url, "--every", "1h")
    assert code == 2 and "--every requires --apply" in error
    code, _, error = run("expire", url, "--every", "soon", "--apply")
    assert code == 2 and "--every soon is not a duration" in error
    expire = ("expire", "--set", "retention.max_share=1", "--set", "retention.min_archived=1ms")
    commands = ((*expire, "--set", "retention.ttl=1h"), ("gc", "--grace", "0s"))
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "rocketmq_tiered.cli", *command, url, "--apply", "--every", "200ms"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for command in commands
    ]
    try:
        deadline_s = time.monotonic() + 60
        while data_objects(url):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    finally:
        for child in children:
            child.terminate()
    passes, collections = (child.communicate(timeout=30)[0] for child in children)
    assert [child.returncode for child in children] == [0, 0]
    assert "expired 18,004 messages" in passes and "deleted" in collections
    assert all(begin == end for begin, end in queues(run, url).values())


def test_the_owners_rules_count_without_its_settings(
    run: Run, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    store, url, other = real_store("F"), f"file://{tmp_path}/archive", tmp_path / "other.toml"
    rules = '[{"pattern": "t_k_one", "ttl": "forever"}]'
    set_rules = (
        "--set",
        "retention.ttl=1h",
        "--set",
        "retention.min_archived=1ms",
        "--set",
        f"topics.rules={rules}",
    )
    place = (store / "store", url, "--broker-conf", store / "broker.conf")
    done = run("backfill", *place, *set_rules)
    assert done[0] == 0, done
    expiring = {found["topic"] for found in json.loads(run("expire", url, "--json", "--yes")[1])["queues"]}
    assert "t_k_keys" in expiring and "t_k_one" not in expiring
    code, _, error = run("expire", url, "--apply", "--yes", "--set", "topics.rules=[]")
    assert code == 2 and "[pattern=t_k_one ttl=forever] in the archive" in error
    assert run("expire", url, "--yes", *set_rules)[0] == 0
    other.write_text('[retention]\nttl = "forever"\n')
    assert "nothing expires" in run("expire", url, "--rules", other)[1]
    checked = ("config", "check", "--topic", "t_k_one", "--url", url, "--set", "retention.ttl=9d")
    assert (
        "not in force: retention.ttl is 9d (--set retention.ttl), and 1h in the archive" in run(*checked)[1]
    )
