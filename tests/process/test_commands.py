"""The commands on a real broker's store: what they print, and how they fail."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_tiered.cli import main
from rocketmq_tiered.process.instance import IDENTITY_FILE
from rocketmq_tiered.process.lifecycle import UploaderService
from rocketmq_tiered.process.loaded_archive import open_for_reading
from tests.process.message_counts import MESSAGES
from tests.truth import read_lines
from tests.uploader.living_broker import LivingBroker
from tests.uploader.small_broker import SmallBroker
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.clock import Clock
from tiered.errors import NotFoundError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import SECTIONS, OffloadSettings

QUEUES = 13

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def killed(real_store: Callable[[str], Path]) -> Path:
    """Store F: its broker was killed while producers wrote."""
    return real_store("F")


@pytest.fixture(scope="module")
def archive(killed: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """F, archived once for all reading tests."""
    url = f"file://{tmp_path_factory.mktemp('archive')}"
    assert (
        main(["backfill", str(killed / "store"), url, "--broker-conf", str(killed / "broker.conf"), "--json"])
        == 0
    )
    return url


def _one_line(error: str) -> str:
    assert error.startswith("tiered: ") and error.count("\n") == 1, error
    return error


def _data_files(url: str) -> list[Path]:
    return sorted(p for p in Path(url.removeprefix("file://")).rglob("*") if p.suffix in (".so", ".sso"))


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ((), "its address is unknown"),
        (("--set", "broker.address=127.0.0.1:9"), "it does not answer at 127.0.0.1:9 "),
    ],
)
def test_backfill_beside_a_broker_that_does_not_answer_is_unavailable(
    run: Run, killed: Path, tmp_path: Path, address: tuple[str, ...], cause: str
) -> None:
    store = tmp_path / "store"
    shutil.copytree(killed / "store", store)
    names = ("--cluster", "FxCluster", "--broker", "fx-a")
    broker = LivingBroker(store)
    try:
        code, out, err = run("backfill", store, f"file://{tmp_path}/archive", *names, *address)
    finally:
        broker.close()
    assert (code, out) == (4, "")
    assert f"a broker runs on {store}, and {cause}" in err
    assert "set broker.address or pass --broker-conf, or stop the broker" in err


def test_backfill_says_what_it_did_and_a_second_run_uploads_nothing(
    run: Run, killed: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/archive"
    command = ("backfill", killed / "store", url, "--broker-conf", killed / "broker.conf")
    code, out, _ = run(*command)
    assert code == 0
    assert "FxCluster/fx-a" in out and "18,004 messages" in out
    before = _data_files(url)
    code, out, _ = run(*command)
    assert (code, _data_files(url)) == (0, before)
    assert "nothing to do" in out
    code, out, _ = run(*command, "--json")
    document = json.loads(out)
    assert (document["messages"], document["interrupted"]) == (0, False)


def test_another_brokers_store_under_the_same_names_is_refused_unless_it_is_meant(
    run: Run, own_archive: tuple[str, Path], real_store: Callable[[str], Path]
) -> None:
    url, root = own_archive
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    command = ("backfill", real_store("B") / "store", url, "--cluster", "FxCluster", "--broker", "fx-a")
    code, _, error = run(*command)
    assert code == 2
    assert "another broker's" in _one_line(error) and "--replace-log" in error
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert run(*command, "--replace-log")[0] == 0
    assert "t_k_one" not in json.dumps(json.loads(run("ls", url, "--json")[1]))
    assert all(path.exists() for path in before if path.suffix in (".so", ".sso"))


def test_ls_lists_every_queue(run: Run, archive: str) -> None:
    code, out, _ = run("ls", archive)
    assert code == 0
    assert f"{QUEUES} queues, 18,004 messages" in out.splitlines()[-1]
    code, out, _ = run("ls", archive, "--json", "--topic", "t_k_one")
    (queue,) = json.loads(out)["queues"]
    assert (queue["topic"], queue["queueId"], queue["minOffset"], queue["maxOffset"]) == (
        "t_k_one",
        0,
        0,
        5958,
    )
    code, _, error = run("ls", archive, "--topic", "nothing-*")
    assert code == 3 and "nothing-*" in _one_line(error)


RULE = 'topics.rules=[{"pattern": "t_k_o*", "ttl": "7d", "read_policy": 3}]'


def test_ls_shows_the_rules_of_topics_and_what_set_them(run: Run, archive: str) -> None:
    code, out, _ = run("ls", archive, "--set", RULE)
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("t_k_")}
    assert (
        code == 0
        and "7d (rule 1: t_k_o*)" in lines["t_k_one"]
        and "FORCE (rule 1: t_k_o*)" in lines["t_k_one"]
    )
    assert lines["t_k_keys"].split()[-2:] == ["forever", "NOT_IN_DISK"]
    (queue,) = json.loads(run("ls", archive, "--json", "--topic", "t_k_one", "--set", RULE)[1])["queues"]
    assert (queue["ttlMs"], queue["ttlFrom"]) == (7 * 86_400_000, "rule 1: t_k_o*")
    assert (queue["maxBytes"], queue["maxBytesFrom"]) == (None, "default")
    assert (queue["readPolicy"], queue["readPolicyFrom"]) == ("FORCE", "rule 1: t_k_o*")


def test_config_check_explains_a_topic(run: Run, archive: str, killed: Path) -> None:
    topic = ("config", "check", "--topic", "t_k_one")
    code, out, _ = run(*topic, "--set", RULE, "--set", "retention.min_archived=1h")
    assert code == 0
    assert [
        line.split(maxsplit=2) for line in out.splitlines() if line.startswith(("ttl ", "min", "read"))
    ] == [
        ["ttl", "7d", "rule 1: t_k_o*"],
        ["minArchived", "1h", "retention.min_archived (--set retention.min_archived)"],
        ["readPolicy", "FORCE", "rule 1: t_k_o*"],
    ]
    assert "not read, because neither --store nor --url is given" in out
    for place, name in ((("--url", archive), "FxCluster/fx-a"), (("--store", killed / "store"), str(killed))):
        found = json.loads(run(*topic, *place, "--json")[1])
        assert name in found["topicTable"]
        assert found["ttl"] == {"value": "forever", "from": "retention.ttl (default)"}
        assert found["ttlClass"]["value"] == "forever"
        assert found["archived"] == {"value": "yes", "from": "topics.include"}


def test_config_check_says_why_a_topic_is_not_archived(run: Run, archive: str) -> None:
    check = (
        "config",
        "check",
        "--json",
        "--include",
        "RMQ_SYS_TRACE_TOPIC,orders",
        "--exclude",
        "t_k_*",
        "--topic",
    )
    for topic, places, archived, why in (
        ("RMQ_SYS_TRACE_TOPIC", (), "yes", "topics.include"),
        ("OFFSET_MOVED_EVENT", (), "no", "it is a system topic"),
        ("t_k_one", (), "no", "the pattern t_k_* of topics.exclude matches it"),
        ("payments", (), "no", "no pattern of topics.include matches it"),
        ("fx-a", ("--url", archive), "no", "it is a system topic"),
    ):
        found = json.loads(run(*check, topic, *places)[1])["archived"]
        assert found["value"] == archived and found["from"].startswith(why)


def test_the_attribute_of_a_topic_is_read_from_the_store(run: Run, killed: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(killed / "store" / "config", store / "config")
    path = store / "config" / "topics.json"
    document = json.loads(path.read_text())
    document["topicConfigTable"]["t_k_one"]["attributes"] = {"reserve.time": "24"}
    path.write_text(json.dumps(document))
    found = json.loads(run("config", "check", "--topic", "t_k_one", "--store", store, "--json")[1])
    assert found["ttl"] == {"value": "1d", "from": "topic attribute reserve.time"}
    assert found["minArchived"]["value"] == "1d" and found["ttlClass"]["value"] == "1d"


def test_cat_prints_the_requested_messages(run: Run, archive: str) -> None:
    code, out, _ = run("cat", archive, "t_k_keys", "--queue", 3, "--from", 100, "--limit", 2)
    messages: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(m["topic"], m["queueId"], m["queueOffset"]) for m in messages] == [
        ("t_k_keys", 3, 100),
        ("t_k_keys", 3, 101),
    ]
    code, out, _ = run("cat", archive, "t_k_keys", "--limit", 1)
    assert [json.loads(line)["queueId"] for line in out.splitlines()] == list(range(8))
    code, out, _ = run("cat", archive, "t_k_one", "--from", 5958)
    assert (code, out) == (0, "")


def test_cat_all_is_the_truth(run: Run, archive: str, killed: Path) -> None:
    code, out, _ = run("cat", archive, "--all")
    assert code == 0
    truth = read_lines(killed / "truth" / "messages.jsonl.zst")
    expected = {(m["topic"], m["queueId"], m["queueOffset"]): m for m in truth}
    read = {(m["topic"], m["queueId"], m["queueOffset"]): m for m in map(json.loads, out.splitlines())}
    assert len(out.splitlines()) == len(read) == MESSAGES
    assert read.keys() == expected.keys()
    assert all(read[place]["recCrc32"] == expected[place]["recCrc32"] for place in read)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("cat", "ARCHIVE"), 2, "--all"),
        (("cat", "ARCHIVE", "t_k_one", "--all"), 2, "--all"),
        (("cat", "ARCHIVE", "t_k_one", "--from", "-1"), 2, "negative"),
        (("cat", "ARCHIVE", "absent"), 3, "absent"),
        (("cat", "ARCHIVE", "t_k_one", "--queue", "9"), 3, "queue 9"),
        (("sing",), 2, "tiered --help"),
        (("cat",), 2, "tiered cat --help"),
        (("cat", "ARCHIVE", "t_k_one", "--since", "soon"), 2, "is not a time"),
        (("cat", "ARCHIVE", "t_k_one", "--generation", "4"), 3, "no topic t_k_one in generation 4"),
        (("cat", "ARCHIVE", "--all", "--queue", "99"), 3, "no queue 99"),
        (("cat", "ARCHIVE", "--all", "--generation", "4"), 3, "no queue in generation 4"),
        (("offset", "ARCHIVE", "t_k_one", "--time", "0", "--generation", "4"), 3, "generation 4"),
        (("query", "ARCHIVE", "--topic", "absent", "--key", "k"), 3, "ls lists the topics"),
        (("query", "ARCHIVE", "--topic", "t_k_keys", "--key", "k2-45", "--since", "2026-11-22"), 3, "T00:00"),
        (("ls", "ARCHIVE", "--broker", "other"), 3, "FxCluster/fx-a"),
        (("ls", "ARCHIVE/nothing-here"), 3, "no archive"),
        (("ls", "ftp://x/y"), 2, "file:///"),
        (("ls", "file:relative"), 2, "use file:///directory"),
        (("gc", "ARCHIVE", "--grace", "soon"), 2, "gc.grace_ms"),
        (("ls", "ARCHIVE", "--set", "offload.dictionary=x"), 2, "not supported"),
        (("backfill", "/nowhere", "ARCHIVE"), 3, "/nowhere"),
        (("backfill", "/", "file:///tmp/unused-archive"), 2, "commitlog"),
        (("status",), 3, "no tiered run"),
        (("status", "--state-dir", "/nowhere"), 3, "/nowhere"),
        (("run", "--store", "/nowhere", "--url", "ARCHIVE"), 3, "/nowhere"),
        (("run", "--store", "/nowhere"), 2, "archive.url"),
        (("run", "--url", "ARCHIVE"), 2, "--store"),
    ],
)
def test_failures_are_one_line_with_the_right_code(
    run: Run, archive: str, arguments: tuple[str, ...], code: int, text: str
) -> None:
    given = [argument.replace("ARCHIVE", archive) for argument in arguments]
    found, out, error = run(*given)
    error = "\n".join(line for line in error.splitlines() if not line.startswith("{")) + "\n"
    assert (found, out) == (code, "")
    assert text in _one_line(error)


def test_a_store_without_a_broker_name_needs_an_option(run: Run, killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed / "store", tmp_path / "store", ignore=shutil.ignore_patterns("config"))
    (tmp_path / "store" / "config").mkdir()
    code, _, error = run("backfill", tmp_path / "store", f"file://{tmp_path}/a")
    assert code == 2 and "--broker-conf" in _one_line(error)
    code, out, _ = run(
        "backfill", tmp_path / "store", f"file://{tmp_path}/a", "--cluster", "c", "--broker", "b"
    )
    assert code == 0 and out.startswith("c/b")


def test_several_archives_must_be_told_apart(run: Run, killed: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/archive"
    for broker in ("one", "two"):
        assert run("backfill", killed / "store", url, "--broker", broker, "--include", "t_k_one")[0] == 0
    code, _, error = run("cat", url, "t_k_one")
    assert (
        code == 2 and "FxCluster/one" in error and "FxCluster/two" in error and "--broker" in _one_line(error)
    )
    code, out, _ = run("ls", url, "--broker", "two")
    assert code == 0 and "5,958 messages" in out


def test_include_and_exclude(run: Run, killed: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/archive"
    assert run("backfill", killed / "store", url, "--include", "t_k_*", "--exclude", "*_keys,*_four")[0] == 0
    assert {q["topic"] for q in json.loads(run("ls", url, "--json")[1])["queues"]} == {"t_k_one"}


def test_status_from_the_archive_and_the_store(run: Run, killed: Path, archive: str) -> None:
    code, out, _ = run("status", archive, "--store", killed / "store", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["lagMessages"], report["lagBytes"], report["retentionMarginSeconds"]) == (0, 0, None)
    assert report["messages"] == MESSAGES and report["queues"] == []
    code, out, _ = run("status", archive)
    assert code == 0 and "store not read" in out and "retention   unknown" in out


def test_status_beside_another_brokers_log_has_no_figures_of_it(
    run: Run, archive: str, tmp_path: Path
) -> None:
    SmallBroker(tmp_path / "store").send(5)
    code, out, _ = run("status", archive, "--store", tmp_path / "store")
    assert code == 1 and ": diverged, epoch" in out and "why         the broker's log differs" in out
    assert "behind      unknown, unknown, unknown" in out and "next        compare archive.url" in out


def test_status_counts_what_is_not_archived(run: Run, killed: Path, tmp_path: Path) -> None:
    """An archive of the first commitlog file only: the rest is the lag, per queue."""
    part = tmp_path / "part"
    shutil.copytree(killed / "store", part)
    for file in sorted((part / "commitlog").iterdir())[1:]:
        file.unlink()
    url = f"file://{tmp_path}/archive"
    code, _, error = run("backfill", part, url, "--cluster", "c", "--broker", "b")
    assert code == 1 and "commitlog truncated" in error, "the consume queues know the rest"
    report = json.loads(run("status", url, "--store", killed / "store", "--json")[1])
    archived = sum(q["messages"] for q in json.loads(run("ls", url, "--json")[1])["queues"])
    assert 0 < archived < MESSAGES
    assert report["lagMessages"] == sum(q["lagMessages"] for q in report["queues"]) == MESSAGES - archived
    assert sum(q["lagBytes"] for q in report["queues"]) <= report["lagBytes"]
    assert report["lagSeconds"] > 0 and report["retentionMarginSeconds"] is not None
    code, out, _ = run("status", url, "--store", killed / "store")
    assert code in (0, 1), "1: within the hour before the broker deletes them"
    assert "t_k_one" in out and "until the broker deletes" in out


def test_gc_lists_and_deletes_nothing_by_default(run: Run, archive: str) -> None:
    before = sorted(Path(archive.removeprefix("file://")).rglob("*"))
    code, out, _ = run("gc", archive)
    assert code == 0 and "dry run, add --apply" in out
    assert json.loads(run("gc", archive, "--json")[1])["applied"] is False
    assert sorted(Path(archive.removeprefix("file://")).rglob("*")) == before


def test_status_says_what_gc_has_not_deleted_and_since_when(run: Run, own_archive: tuple[str, Path]) -> None:
    url, directory = own_archive
    assert "garbage" not in run("status", url)[1]
    store = FileStore(directory / archive_prefix("FxCluster", "fx-a"))
    for hours in (30, 50, 10):
        now_ms = time.time_ns() // 1_000_000 - hours * 3_600_000
        compactor = CatalogWriter(
            store,
            cluster="FxCluster",
            broker="fx-a",
            instance=f"compactor-{hours}",
            kind="maintenance",
            clock=Clock(wall_ms=int),
        )
        draft = CommitDraft(
            CommitKind.MAINTENANCE, pending_deletions=[f"sets/00/a-1-{hours}.sso"], created_ms=now_ms
        )
        compactor.maintain(lambda state, draft=draft: draft)
    report = json.loads(run("status", url, "--json")[1])
    assert report["pendingDeletions"] == 3 and 50 * 3600 <= report["oldestPendingDeletionSeconds"] < 51 * 3600
    assert "garbage     3 objects, the oldest 2d 02h old" in run("status", url)[1]
    assert run("gc", url, "--apply", "--grace", "0")[0] == 0
    assert json.loads(run("status", url, "--json")[1])["pendingDeletions"] == 0


def test_verify_says_clean_and_counts(run: Run, archive: str) -> None:
    code, out, _ = run("verify", archive, "--full")
    assert code == 0 and ": clean" in out and "messages 18,004" in out
    document = json.loads(run("verify", archive, "--full", "--json")[1])
    assert (document["ok"], document["anomalies"], document["leftovers"]) == (True, [], [])


@pytest.fixture
def own_archive(archive: str, tmp_path: Path) -> tuple[str, Path]:
    """A copy of the archive to damage: (URL, directory)."""
    shutil.copytree(archive.removeprefix("file://"), tmp_path / "archive")
    return f"file://{tmp_path}/archive", tmp_path / "archive"


def test_verify_finds_a_flipped_byte_and_cat_refuses_it(run: Run, own_archive: tuple[str, Path]) -> None:
    url, directory = own_archive
    (victim,) = _data_files(url)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(content)
    code, out, _ = run("verify", url, "--full")
    assert code == 1 and victim.name in out and "ANOMAL" in out
    assert json.loads(run("verify", url, "--full", "--json")[1])["ok"] is False
    code, out, error = run("cat", url, "--all")
    assert code == 1 and victim.name in error and "cannot be read" in error
    assert 0 < out.count("\n") < 18_004
    assert directory.is_dir()


def test_an_archive_whose_newest_root_is_damaged_is_read_named_and_healed(
    run: Run, killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class FrequentRoots(OffloadSettings):
        root_every: int = 2

    monkeypatch.setitem(SECTIONS, "offload", FrequentRoots)
    url, store = f"file://{tmp_path}/archive", tmp_path / "store"
    shutil.copytree(killed / "store", store)
    later = sorted((store / "commitlog").iterdir())[1:]
    for file in later:
        file.unlink()
    names = ("--broker-conf", killed / "broker.conf")
    command = ("backfill", store, url, *names, "--set", "offload.batch_bytes=512KiB")
    first = run(*command)
    assert first[0] == 1 and "commitlog truncated" in first[2], first
    whole = run("cat", url, "--all")
    root = load(FileStore(tmp_path / "archive" / archive_prefix("FxCluster", "fx-a"))).root
    assert root.key and whole[0] == 0
    path = tmp_path / "archive" / archive_prefix("FxCluster", "fx-a") / root.key
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    code, out, _ = run("verify", url)
    assert code == 1 and any("root" in line and root.key in line for line in out.splitlines())
    assert run("cat", url, "--all")[:2] == whole[:2]
    assert run("gc", url, "--apply")[0] == 0
    assert path.exists()
    for file in later:
        shutil.copy(killed / "store" / "commitlog" / file.name, file)
    assert run(*command)[0] == 0
    code, out, _ = run("verify", url, "--full")
    assert code == 0 and ": clean" in out and "messages 18,004" in out, out


def test_a_missing_object_is_an_anomaly_not_an_empty_answer(run: Run, own_archive: tuple[str, Path]) -> None:
    url, _ = own_archive
    (used,) = _data_files(url)
    used.unlink()
    assert run("verify", url)[0] == 1
    code, out, error = run("cat", url, "t_k_one")
    assert (code, out) == (1, "") and used.name in error and "cannot be read" in error


def test_run_archives_also_when_the_disk_of_its_state_directory_is_full(
    run: Run, killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept there after the identity is for convenience."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / IDENTITY_FILE).write_text("0123456789abcdef")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    served: list[UploaderService] = []

    def serve(service: UploaderService) -> int:
        served.append(service)
        return 0

    monkeypatch.setattr("tiered.whole_file.replace_whole", full)
    monkeypatch.setattr(UploaderService, "handle_signals", lambda _: None)
    monkeypatch.setattr(UploaderService, "serve", serve)
    code, _, error = run(
        "run",
        "--store",
        killed / "store",
        "--url",
        f"file://{tmp_path}/archive",
        "--state-dir",
        tmp_path / "state",
        "--set",
        "admin.port=0",
    )
    assert code == 0 and served
    assert "its description cannot be written" in error and "No space left" in error


def test_ls_lists_the_archives_of_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = FileStore(tmp_path)
    for names in (("c", "a"), ("c", "b"), ("d", "a")):
        store = PrefixedStore(root, archive_prefix(*names))
        CatalogWriter(
            store, cluster=names[0], broker=names[1], instance="i", kind="run", clock=Clock(wall_ms=lambda: 7)
        ).claim()
    root.close()
    url = f"file://{tmp_path}"

    def listed(*options: str) -> Any:
        assert main(["ls", url, *options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert [(one["cluster"], one["broker"]) for one in listed()["archives"]] == [
        ("c", "a"),
        ("c", "b"),
        ("d", "a"),
    ]
    assert listed()["archives"][0] | {"cluster": "", "broker": ""} == {
        "cluster": "",
        "broker": "",
        "queueCount": 0,
        "messages": 0,
        "committedMs": 7,
    }
    assert [one["broker"] for one in listed("--cluster", "c")["archives"]] == ["a", "b"]
    assert listed("--cluster", "d")["queues"] == listed("--cluster", "c", "--broker", "b")["queues"] == []
    assert main(["ls", url]) == 0 and "3 archives; --cluster and --broker" in capsys.readouterr().out
    assert (
        main(["ls", url, "--by-topic"]) == 2
        and "choose one archive with --cluster" in capsys.readouterr().err
    )
    assert main(["ls", url, "--cluster", "x"]) == 3 and "no archive of x/*" in capsys.readouterr().err


def test_watching_continues_while_no_process_answers_and_ends_in_order(
    run: Run, archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = []

    def sleep(_seconds: float) -> None:
        rounds.append(None)
        if len(rounds) == 4:
            raise KeyboardInterrupt

    def opened(*arguments: Any) -> Any:
        if len(rounds) == 1:
            raise UnavailableError("the store is away")
        if len(rounds) == 2:
            raise NotFoundError("the disk is not mounted")
        return open_for_reading(*arguments)

    # Only the command's: threads of other tests sleep too.
    monkeypatch.setattr("rocketmq_tiered.cli.status.time", SimpleNamespace(sleep=sleep, time_ns=time.time_ns))
    monkeypatch.setattr("rocketmq_tiered.cli.status.open_for_reading", opened)
    code, out, error = run("status", archive, "--watch")
    assert (code, error) == (0, "tiered: the store is away\ntiered: the disk is not mounted\n")
    assert out.count("archived    to") == 2
