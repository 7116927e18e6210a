"""`tiered query` as a user meets it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rocketmq_tiered
from rocketmq_tiered.cli import main
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.end_to_end.offloading import SMALL, backfill
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

FIRST_ID = "7F00000100005B1E0000000000000000"
"""The first record of F."""


@pytest.fixture(scope="module")
def url(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("archive")
    backfill(real_store("F") / "store", FileStore(directory), settings=SMALL)
    return f"file://{directory}"


@pytest.fixture
def message(url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The archive's first message of a topic, as cat shows it."""
    assert main(["cat", url, "t_k_four", "--queue", "0", "--limit", "1"]) == 0
    found: dict[str, str] = json.loads(capsys.readouterr().out)
    return found


def test_a_unique_key_prints_what_cat_prints(
    url: str, message: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for topic in ([], ["--topic", message["topic"]]):
        assert main(["query", url, "--unique-key", message["uniqKey"], *topic]) == 0
        assert json.loads(capsys.readouterr().out) == message


def test_a_body_that_does_not_decompress_hides_no_other_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path), "cluster/broker"))
    # As of a producer that sets the flag and sends the body as it is.
    builder.doctor = lambda record: (
        record[:36] + (1).to_bytes(4, "big") + record[40:] if b"odd" in record else record
    )
    bodies = (b"one", b"odd", b"two")
    builder.commit([Sent(QueueKey("t", 0, 0), body, keys=["k"]) for body in bodies])
    url = f"file://{tmp_path}"
    for command in (["cat", url, "t"], ["query", url, "--topic", "t", "--key", "k"]):
        assert main(command) == 0
        printed, said = capsys.readouterr()
        lengths = {line["queueOffset"]: line["bodyLen"] for line in map(json.loads, printed.splitlines())}
        assert lengths == {0: 3, 1: None, 2: 3}
        assert "t queue 0 offset 1: body cannot be decompressed" in said


def test_an_id_prints_the_message_in_any_case_of_letters(
    url: str, message: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["query", url, "--id", message["offsetMsgId"].lower()]) == 0
    assert json.loads(capsys.readouterr().out) == message
    assert main(["query", url, "--id", message["offsetMsgId"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"messages": [message]}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--topic", "t_k_four", "--key", "no such key"], 3, "--all-time"),
        (["--topic", "t_k_four", "--key", "no", "--since", "0"], 3, "searched from 0 ms on"),
        (
            ["--topic", "t_k_four", "--key", "no", "--until", "20010101"],
            3,
            "7 days up to 2001-01-01T00:00:00Z",
        ),
        (
            ["--topic", "t_k_four", "--key", "no", "--since", "1969-12-31", "--until", "1970-01-01"],
            3,
            "searched from -86400000 ms to 0 ms:",
        ),
        (["--topic", "no such topic", "--unique-key", "x"], 3, "has no message"),
        (["--id", "7F00000100005B1E00000000FFFFFFFF"], 3, "has no message"),
        (["--id", "12"], 2, "offsetMsgId"),
        (["--key", "x"], 2, "--topic"),
        (["--topic", "t", "--key", "x", "--limit", "0"], 2, "--limit"),
        (["--topic", "t", "--key", "x", "--since", "-1d", "--until", "-2d"], 2, "is not before --until"),
        (["--topic", "t", "--key", "x", "--since", "-2d", "--all-time"], 2, "--all-time"),
    ],
)
def test_what_is_not_there_and_what_is_not_understood(
    url: str, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["query", url, *arguments]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err


def test_a_store_that_is_away_is_another_exit_code(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(*_: object) -> bytes:
        raise UnavailableError("the store is away")

    monkeypatch.setattr(FileStore, "get_range", away)
    assert main(["query", url, "--id", FIRST_ID]) == 4
    assert "away" in capsys.readouterr().err


def test_all_time_says_first_what_it_costs(
    url: str, message: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["query", url, "--topic", message["topic"], "--unique-key", message["uniqKey"], "--all-time"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert "0 index files and 7 unindexed segments: about 7 requests" in shown.err
    assert json.loads(shown.out) == message


def test_all_time_of_an_archive_without_topics_costs_nothing(
    real_store: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/archive"
    assert main(["backfill", str(real_store("F") / "store"), url, "--include", "no-such-topic"]) == 0
    capsys.readouterr()
    assert main(["query", url, "--unique-key", "x", "--all-time"]) == 3
    shown = capsys.readouterr()
    assert "about 0 requests" in shown.err and "has no message" in shown.err


def test_messages_whose_time_is_damaged_hide_no_others_and_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store timestamp is in no checksum of most records: a flipped bit makes it any."""
    queue, now_ms = QueueKey("topic", 0, 0), time.time_ns() // 1_000_000
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path), archive_prefix("cluster", "broker")))
    times = {
        "before": 1 - (1 << 63),
        "past": -5,
        "now": now_ms,
        "future": now_ms | 1 << 62,
        "end": (1 << 63) - 1,
    }
    builder.commit([Sent(queue, keys=(key,), stored_ms=stored_ms) for key, stored_ms in times.items()])
    url = f"file://{tmp_path}"
    assert main(["query", url, "--topic", "topic", "--key", "now"]) == 0
    for key, stored_ms in times.items():
        capsys.readouterr()
        assert main(["query", url, "--topic", "topic", "--key", key, "--all-time"]) == 0
        assert json.loads(capsys.readouterr().out)["storeTimestamp"] == stored_ms
    assert main(["ls", url]) == 0
    assert "9223372036854775807 ms" in capsys.readouterr().out
    for offset in range(len(times)):
        assert main(["cat", url, "topic", "--queue", "0", "--from", str(offset), "--limit", "1"]) == 0
    with rocketmq_tiered.open(url) as archive:
        assert all(len(archive.find_by_key("topic", key)) == 1 for key in times)


def test_a_recreated_topic_is_hinted_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path), "cluster/broker"))
    builder.commit([Sent(QueueKey("t", 0, 0), b"first", keys=["old"])])
    builder.commit([Sent(QueueKey("t", 0, 1), b"second", keys=["new"])])
    query = ["query", f"file://{tmp_path}", "--topic", "t", "--key"]
    assert main([*query, "new"]) == 0
    capsys.readouterr()
    assert main([*query, "old"]) == 3
    assert "--hidden also searches deleted topics and earlier generations" in capsys.readouterr().err
    assert main([*query, "old", "--hidden"]) == 0
    assert main([*query, "neither", "--hidden"]) == 3
    assert "--hidden also" not in capsys.readouterr().err
