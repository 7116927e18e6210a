"""`tiered ls --histories` and `cat --history` after a log was truncated."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from tests.end_to_end.offloading import backfill
from tests.uploader.small_broker import SmallBroker
from tiered.object_store.file import FileStore

Run = Callable[..., tuple[int, str, str]]
SPEC = StoreSpec(topics=1, queues_per_topic=2, body_bytes=100, file_bytes=256 << 10)
LONG, SHORT = 600, 200


def cat(run: Run, *arguments: str) -> set[tuple[int, int, int]]:
    code, out, error = run("cat", *arguments, "--all")
    assert code == 0, error
    found = [json.loads(line) for line in out.splitlines()]
    return {(item["queueId"], item["queueOffset"], item["commitLogOffset"]) for item in found}


@pytest.fixture(scope="module")
def truncated(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """(an archive of the whole log, one whose log was truncated, the store with the whole log)."""
    directory = tmp_path_factory.mktemp("diverged")
    write_store(directory / "short", SPEC, messages=SHORT)
    write_store(directory / "long", SPEC, messages=LONG)
    for archive, stores in (("whole", ["long"]), ("archive", ["short", "long", "short"])):
        for store in stores:
            backfill(directory / store, FileStore(directory / archive), replace_log=True)
    return f"file://{directory}/whole", f"file://{directory}/archive", directory / "long"


def test_messages_of_a_truncated_log_are_listed_read_and_brought_back(
    run: Run, truncated: tuple[str, str, Path]
) -> None:
    whole, url, store = truncated
    code, out, error = run("ls", url, "--histories", "--json")
    assert code == 0, error
    first, current = json.loads(out)["histories"]
    assert (first["number"], first["hiddenMessages"], first["current"]) == (1, LONG - SHORT, False)
    assert first["keptUntilMs"] - first["hiddenSinceMs"] == 30 * 86_400_000
    assert (current["number"], current["hiddenMessages"], current["current"]) == (2, 0, True)
    assert first["beginPhys"] < current["beginPhys"] <= current["endPhys"] < first["endPhys"]
    assert (
        f"2 log histories; {LONG - SHORT} messages only in histories that are not current"
        in run("ls", url, "--histories")[1]
    )
    lost = cat(run, whole) - cat(run, url)
    assert len(lost) == LONG - SHORT
    assert cat(run, url, "--history", "1") == lost
    assert cat(run, url, "--history", "2") == cat(run, url)
    assert json.loads(run("status", url, "--json")[1])["hiddenMessages"] == LONG - SHORT
    assert run("verify", url)[0] == 0

    before = set(Path(url.removeprefix("file://")).rglob("*.s*o"))
    backfill(store, FileStore(Path(url.removeprefix("file://"))))
    assert cat(run, url) == cat(run, whole)
    assert set(Path(url.removeprefix("file://")).rglob("*.s*o")) == before
    histories = json.loads(run("ls", url, "--histories", "--json")[1])["histories"]
    assert [item["hiddenMessages"] for item in histories] == [0, 0, 0]
    assert json.loads(run("status", url, "--json")[1])["hiddenMessages"] == 0
    assert run("verify", url)[0] == 0


def test_status_says_what_a_log_without_common_records_has_hidden(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path / "one", SPEC, messages=LONG)
    write_store(tmp_path / "other", replace(SPEC, seed=2), messages=SHORT)
    url = f"file://{tmp_path}/archive"
    for store, hidden in (("one", 0), ("other", LONG), ("one", SHORT), ("other", LONG)):
        backfill(tmp_path / store, FileStore(tmp_path / "archive"), replace_log=True)
        assert json.loads(run("status", url, "--json")[1])["hiddenMessages"] == hidden
        line = f"{hidden} archived messages that it lacks are hidden"
        assert (line in run("status", url)[1]) == bool(hidden)


def test_status_counts_messages_once_that_were_hidden_twice(run: Run, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/archive"
    for store, messages in (("first", SHORT), ("longer", LONG)):
        write_store(tmp_path / store, SPEC, messages=messages)
    for store, hidden in (
        ("first", 0),
        ("longer", 0),
        ("first", LONG - SHORT),
        ("longer", 0),
        ("first", LONG - SHORT),
    ):
        backfill(tmp_path / store, FileStore(tmp_path / "archive"), replace_log=True)
        assert json.loads(run("status", url, "--json")[1])["hiddenMessages"] == hidden


def test_messages_set_aside_are_counted_by_queue(run: Run, tmp_path: Path) -> None:
    broker, url = SmallBroker(tmp_path / "store"), f"file://{tmp_path}/archive"
    for _ in range(2):
        broker.send(5)
        broker.lose_unit()
        broker.send(3)
        broker.restart()
    broker.send(3)
    backfill(broker.path, FileStore(tmp_path / "archive"))
    assert json.loads(run("status", url, "--json")[1])["setAsideMessages"] == 2
    assert (
        "attention   2 messages not archived (set aside): the broker used their queue offsets again"
        in run("status", url)[1]
    )
    assert [queue["setAsideMessages"] for queue in json.loads(run("ls", url, "--json")[1])["queues"]] == [2]
    assert "orders 0 0 2" in " ".join(run("ls", url)[1].partition("set aside in topic")[2].split())


@pytest.mark.parametrize("option", ["--follow", "--at-version=1"])
def test_a_log_history_neither_grows_nor_has_versions(
    run: Run, truncated: tuple[str, str, Path], option: str
) -> None:
    code, _, error = run("cat", truncated[1], "--all", "--history", "1", option)
    assert code == 2 and "--history cannot be combined with" in error


def test_a_log_history_that_does_not_exist_is_said(run: Run, truncated: tuple[str, str, Path]) -> None:
    code, _, error = run("cat", truncated[1], "--all", "--history", "7")
    assert code == 3 and "no log history 7" in error
