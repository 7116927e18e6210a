"""`tiered cat` and `tiered offset` on a real broker's store: by time, by tag, by property, bodies, following.

`tiered query` as a user meets it.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rocketmq_tiered
from fetcher.io.waiting import run_sync
from fetcher.walk import Span
from rocketmq_tiered.cli import main
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.end_to_end.offloading import SMALL, backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.truth import read_lines
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

Run = Callable[..., tuple[int, str, str]]
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def batch_store(real_store: Callable[[str], Path]) -> Path:
    """Store K: tags, properties, a BatchCQ topic."""
    return real_store("K")


@pytest.fixture(scope="module")
def archive(batch_store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """K, archived once."""
    url = f"file://{tmp_path_factory.mktemp('archive')}"
    assert (
        main(["backfill", str(batch_store / "store"), url, "--cluster", "c", "--broker", "b", "--json"]) == 0
    )
    return url


@pytest.fixture(scope="module")
def truth(batch_store: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """What a Java client pulled, by queue."""
    queues: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in read_lines(batch_store / "truth" / "messages.jsonl.zst"):
        queues.setdefault((line["topic"], line["queueId"]), []).append(line)
    return queues


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_offset_prints_what_the_broker_answered(run: Run, archive: str, batch_store: Path) -> None:
    asked = [
        line
        for line in read_lines(batch_store / "truth" / "search_offset.jsonl.zst")
        if (line["topic"], line["queueId"]) in (("t_one", 0), ("t_bcq", 0))
    ]
    assert len(asked) > 20
    for line in asked[:: len(asked) // 20]:
        place = ("offset", archive, line["topic"], "--queue", 0, "--time", line["timestamp"])
        assert run(*place) == (0, f"{line['lower']}\n", "")
        assert run(*place, "--boundary", "upper") == (0, f"{line['upper']}\n", "")


def test_offset_as_json_and_for_all_queues(run: Run, archive: str, truth: Any) -> None:
    stamp = truth["t_four", 1][3]["storeTimestamp"]
    code, out, _ = run("offset", archive, "t_four", "--time", stamp, "--json")
    document = json.loads(out)
    assert (code, document["timestamp"], document["boundary"]) == (0, stamp, "lower")
    found = {queue["queueId"]: queue for queue in document["queues"]}
    assert sorted(found) == [0, 1, 2, 3]
    first = next(line for line in truth["t_four", 1] if line["storeTimestamp"] >= stamp)
    assert (found[1]["offset"], found[1]["storeTimestamp"]) == (first["queueOffset"], first["storeTimestamp"])
    code, out, _ = run("offset", archive, "t_four", "--time", "2100-01-01T00:00:00Z", "--json", "--queue", 1)
    (queue,) = json.loads(out)["queues"]
    assert (queue["offset"], queue["storeTimestamp"]) == (queue["maxOffset"], None)
    code, out, _ = run("offset", archive, "t_four", "--time", stamp)
    assert code == 0 and len(out.splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("offset", "ARCHIVE", "absent", "--queue", "0", "--time", "0"), 3, "absent"),
        (("offset", "ARCHIVE", "t_one", "--queue", "99", "--time", "0"), 3, "99"),
        (("offset", "ARCHIVE", "absent", "--time", "0"), 3, "absent"),
        (("offset", "ARCHIVE", "t_one", "--queue", "0", "--time", "soon"), 2, "is not a time"),
        (("offset", "ARCHIVE", "t_one", "--time", "1795227708"), 2, "in seconds it is 2026-11-21T02:21:48Z"),
        (("offset", "ARCHIVE", "t_one", "--queue", "0"), 2, "--time"),
        (("cat", "ARCHIVE", "t_one", "--since", "0", "--from", "0"), 2, "--since"),
        (("cat", "ARCHIVE", "t_one", "--until", "0", "--follow"), 2, "--until"),
        (("cat", "ARCHIVE", "t_one", "--tag", " || "), 2, "no tag"),
        (("cat", "ARCHIVE", "t_one", "--where", "a >"), 2, "a >"),
        (("cat", "ARCHIVE", "t_one", "--tag", "a", "--where", "a IS NULL"), 2, "--where"),
        (("cat", "ARCHIVE", "t_one", "--format", "raw", "--body", "hex"), 2, "--body"),
    ],
)
def test_failures_are_said_with_the_right_code(
    run: Run, archive: str, arguments: tuple[str, ...], code: int, text: str
) -> None:
    found, out, error = run(*(argument.replace("ARCHIVE", archive) for argument in arguments))
    assert (found, out) == (code, "")
    assert text in error.splitlines()[-1]


def test_cat_begins_and_ends_at_a_time(run: Run, archive: str, truth: Any) -> None:
    queue = truth["t_one", 0]
    stamp, later = (queue[len(queue) * share // 4]["storeTimestamp"] for share in (2, 3))
    for until, arguments in ((2**62, ()), (later, ("--until", later)), (stamp, ("--until", stamp))):
        code, out, _ = run("cat", archive, "t_one", "--queue", 0, "--since", stamp, *arguments)
        expected = [line["queueOffset"] for line in queue if stamp <= line["storeTimestamp"] < until]
        assert code == 0 and [line["queueOffset"] for line in lines(out)] == expected
    assert run("cat", archive, "t_one", "--since", "2100-01-01")[1] == ""


def test_cat_keeps_messages_with_a_tag(run: Run, archive: str, truth: Any) -> None:
    tagged = [line for key, queue in sorted(truth.items()) if key[0] == "t_tags" for line in queue]
    wanted = {"Aa", "TagA"} & {line["tags"] for line in tagged}
    assert wanted
    code, out, _ = run("cat", archive, "t_tags", "--tag", " || ".join(sorted(wanted)))
    expected = [(line["queueId"], line["queueOffset"]) for line in tagged if line["tags"] in wanted]
    assert code == 0 and [(line["queueId"], line["queueOffset"]) for line in lines(out)] == expected


def test_cat_counts_only_what_it_prints(run: Run, archive: str, truth: Any) -> None:
    queue = truth["t_tags", 0]
    tag = queue[-1]["tags"]
    expected = [line["queueOffset"] for line in queue if line["tags"] == tag][:2]
    code, out, _ = run("cat", archive, "t_tags", "--queue", 0, "--tag", tag, "--limit", 2)
    assert code == 0 and [line["queueOffset"] for line in lines(out)] == expected


def test_cat_keeps_messages_whose_properties_fit(run: Run, archive: str, truth: Any) -> None:
    every = [line for key, queue in sorted(truth.items()) if key[0] == "t_tags" for line in queue]
    tag = every[0]["tags"]
    code, out, _ = run("cat", archive, "t_tags", "--where", f"TAGS = '{tag}' OR absent IS NOT NULL")
    expected = [(line["queueId"], line["queueOffset"]) for line in every if line["tags"] == tag]
    assert code == 0 and [(line["queueId"], line["queueOffset"]) for line in lines(out)] == expected


def test_bodies_are_those_the_client_saw(run: Run, archive: str, truth: Any) -> None:
    code, out, _ = run("cat", archive, "t_one", "--limit", 5, "--body", "hex")
    assert code == 0
    for line in lines(out):
        assert hashlib.sha256(bytes.fromhex(line["body"])).hexdigest() == line["bodySha256"]
    code, out, _ = run("cat", archive, "t_bcq", "--limit", 3, "--body", "hex")
    inner = [item for line in lines(out) for item in line.get("inner", ())]
    assert code == 0 and inner
    for item in inner:
        assert hashlib.sha256(bytes.fromhex(item["body"])).hexdigest() == item["bodySha256"]


class Follower:
    """`tiered cat --follow` as a process, its lines collected as they come."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-c", "import sys; from rocketmq_tiered.cli import main; sys.exit(main())"]
        self._process = subprocess.Popen(
            [*command, "cat", *arguments, "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.lines: list[bytes] = []
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)

    def wait_for(self, count: int) -> None:
        """Until so many lines came."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.lines) < count:
            assert time.monotonic() < deadline and self._process.poll() is None, len(self.lines)
            time.sleep(0.05)

    def interrupt(self) -> tuple[int, bytes]:
        """Ctrl-C: (exit code, stderr)."""
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(TIMEOUT_S)
        self._thread.join()
        assert self._process.stderr is not None
        error = self._process.stderr.read()
        self._process.stderr.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code, error


def test_follow_prints_what_comes_and_ends_cleanly(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    """An archive of the first commitlog file grows by the others while it is followed."""
    directory = real_store("F")
    part = tmp_path / "part"
    shutil.copytree(directory / "store", part)
    later = sorted((part / "commitlog").iterdir())[1:]
    for path in later:
        os.rename(path, tmp_path / path.name)
    url = f"file://{tmp_path}/archive"
    names = ["--cluster", "c", "--broker", "b"]
    assert main(["backfill", str(part), url, *names]) == 1, "the consume queues name what is to come"
    expected = [
        (line["queueId"], line["queueOffset"])
        for line in read_lines(directory / "truth" / "messages.jsonl.zst")
        if line["topic"] == "t_k_one"
    ]
    follower = Follower(url, "t_k_one")
    follower.wait_for(100)
    for path in later:
        os.rename(tmp_path / path.name, path)
    assert main(["backfill", str(part), url, *names]) == 0
    follower.wait_for(len(expected))
    code, error = follower.interrupt()
    assert (code, error) == (0, b"")
    printed = [json.loads(line) for line in follower.lines]
    assert [(line["queueId"], line["queueOffset"]) for line in printed] == expected


@pytest.mark.parametrize(("begin", "rest"), [(0, 30), (40, 0)])
def test_follow_prints_the_rest_of_a_deleted_topic_and_then_its_new_generation_from_the_first_message(
    tmp_path: Path, begin: int, rest: int
) -> None:
    store = WrittenStore(tmp_path / "store")
    url, names = f"file://{tmp_path}/archive", ["--cluster", "c", "--broker", "b"]

    def put(count: int) -> None:
        for number in range(count):
            store.put("t", 0, b"%d" % number)

    put(50)
    assert main(["backfill", str(store.path), url, *names]) == 0
    follower = Follower(url, "t", "--from", str(begin))
    follower.wait_for(50 - begin)
    put(rest)
    store.records.clear()
    shutil.rmtree(store.path / "consumequeue" / "t")
    put(20)
    assert main(["backfill", str(store.path), url, *names]) == 0
    follower.wait_for(50 - begin + rest + 20)
    assert follower.interrupt() == (0, b"")
    offsets = [*range(begin, 50 + rest), *range(20)]
    assert [json.loads(line)["queueOffset"] for line in follower.lines] == offsets


def test_a_walk_beyond_the_end_says_so_once(archive: str, caplog: pytest.LogCaptureFixture) -> None:
    with rocketmq_tiered.open(archive) as opened:
        walk = opened.queue("t_one", 0).walk(Span(1 << 40))
        for _ in range(3):
            assert run_sync(walk.next_batch()) is None
    (record,) = [one for one in caplog.records if one.name == "fetcher.walk"]
    assert "ends at" in record.getMessage() and str(1 << 40) in record.getMessage()


@pytest.mark.parametrize("damage", ["missing", "a flipped byte"])
def test_cat_prints_what_is_readable_and_names_what_is_not(run: Run, tmp_path: Path, damage: str) -> None:
    store = WrittenStore(tmp_path / "store")
    url = f"file://{tmp_path}/archive"
    for first in range(0, 60, 20):
        for number in range(first, first + 20):
            store.put("t", 0, b"%d" % number)
        assert run("backfill", store.path, url, "--cluster", "c", "--broker", "b")[0] == 0
    objects = sorted((tmp_path / "archive").rglob("*.s*o"), key=lambda path: path.stat().st_mtime_ns)
    assert len(objects) == 3
    if damage == "missing":
        objects[1].unlink()
    else:
        data = bytearray(objects[1].read_bytes())
        data[100] ^= 1
        objects[1].write_bytes(data)
    code, out, error = run("cat", url, "t")
    assert [line["queueOffset"] for line in lines(out)] == [*range(20), *range(40, 60)]
    (line,) = (line for line in error.splitlines() if "cannot be read" in line)
    assert code == 1 and "t queue 0: offsets 20 to 39 cannot be read" in line and objects[1].name in line
    code, out, _ = run("cat", url, "t", "--from", "25", "--limit", "5")
    assert (code, [line["queueOffset"] for line in lines(out)]) == (1, [*range(40, 45)])
    assert run("cat", url, "t", "--limit", "20")[::2] == (0, "")


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
        assert "t queue 0 offset 1: the body cannot be decompressed" in said


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
