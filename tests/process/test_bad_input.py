"""Damaged stores at the command line: the exit code, one line naming file and offset, everything else unharmed."""

import contextlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rocketmq_tiered.cli import main
from tests.archive.queue_reader import QueueReader, records_of
from tests.broker_store.unprivileged import run_unprivileged
from tests.object_store.sealed_scene import key_file
from tests.truth import read_lines
from tiered.archive.segment_reader import SegmentCache
from tiered.catalog.catalog_reader import load
from tiered.errors import UnavailableError
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import ObjectStoreSettings
from uploader import bounded_run
from uploader.bounded_run import OutageLimit
from uploader.cycle_upload import UploadCounters
from uploader.offload import OffloadStatus

ROOT = Path(__file__).parents[2]
TIERED = (sys.executable, "-c", "import sys; from rocketmq_tiered.cli import main; sys.exit(main())")
FILE_BYTES = 4 * 1024 * 1024
VICTIM = 5_000
"""The record in the middle of the log that is damaged."""


@dataclass
class Case:
    """One copy of store F with its truth, in log order."""

    home: Path
    truth: list[dict[str, Any]]
    key_ring: str = ""

    @property
    def url(self) -> str:
        return f"file://{self.home}/archive"

    @property
    def first_file(self) -> Path:
        return self.home / "store" / "commitlog" / f"{0:020d}"

    def patch(self, offset: int, content: bytes) -> None:
        """Overwrite bytes of the first commitlog file."""
        with self.first_file.open("r+b") as file:
            file.seek(offset)
            file.write(content)

    def flip(self, offset: int) -> None:
        """Flip one bit there."""
        with self.first_file.open("rb") as file:
            file.seek(offset)
            (byte,) = file.read(1)
        self.patch(offset, bytes([byte ^ 1]))

    def backfill(self, *arguments: str, apart: bool = False) -> subprocess.CompletedProcess[str]:
        """Archive it, with names from broker.conf."""
        conf = str(self.home / "broker.conf")
        run = process if apart else command
        ring = ("--set", f"object_store.key_ring={self.key_ring}")
        return run("backfill", str(self.home / "store"), self.url, "--broker-conf", conf, *ring, *arguments)

    def read_back(self) -> dict[tuple[str, int, int], int]:
        """CRC of every archived record by topic, queue and offset."""
        (catalog,) = (self.home / "archive").glob("*/*/catalog")
        options = StoreOptions(ObjectStoreSettings(key_ring=self.key_ring))
        archive = PrefixedStore(open_store(self.url, options), "/".join(catalog.parent.parts[-2:]))
        state, segments = load(archive), SegmentCache(archive)
        return {
            (*key[:2], offset): zlib.crc32(record)
            for key in state.visible_queues()
            for offset, _, record in records_of(QueueReader(archive, state, key, segments=segments))
        }

    def expected(self, lost: Callable[[dict[str, Any]], bool]) -> dict[tuple[str, int, int], int]:
        """The truth without what is lost."""
        return {
            (m["topic"], m["queueId"], m["queueOffset"]): m["recCrc32"] for m in self.truth if not lost(m)
        }


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One command line, here: to start a process takes longer than most of them."""
    with (
        io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) as output,
        io.StringIO() as errors,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = cast("io.BytesIO", output.buffer).getvalue().decode()
        return subprocess.CompletedProcess(arguments, code, printed, errors.getvalue())


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One command line as a process of its own: what it leaves undone ends with it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*TIERED, *arguments], capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def truth(real_store: Callable[[str], Path]) -> list[dict[str, Any]]:
    """Messages of store F in log order."""
    lines = read_lines(real_store("F") / "truth" / "messages.jsonl.zst")
    return sorted(lines, key=lambda m: int(m["commitLogOffset"]))


@pytest.fixture
def case(real_store: Callable[[str], Path], truth: list[dict[str, Any]], tmp_path: Path) -> Case:
    """A store to damage."""
    source = real_store("F")
    shutil.copytree(source / "store", tmp_path / "store")
    shutil.copy(source / "broker.conf", tmp_path / "broker.conf")
    return Case(tmp_path, truth)


def _body_at(record: dict[str, Any]) -> int:
    """Physical offset of a byte inside the body: fixed header of an IPv4 record, then the body's length."""
    return int(record["commitLogOffset"]) + 84 + 4 + record["bodyLen"] // 2


DAMAGES: dict[str, Callable[[Case, dict[str, Any]], None]] = {
    "body": lambda case, record: case.flip(_body_at(record)),
    "magic": lambda case, record: case.flip(record["commitLogOffset"] + 7),
    "queue id": lambda case, record: case.flip(record["commitLogOffset"] + 15),
    "queue offset": lambda case, record: case.flip(record["commitLogOffset"] + 27),
    "topic": lambda case, record: case.flip(record["commitLogOffset"] + 84 + 4 + record["bodyLen"] + 1),
    "size": lambda case, record: case.patch(record["commitLogOffset"], struct.pack(">i", 64 * 1024 * 1024)),
    "physical offset": lambda case, record: case.flip(record["commitLogOffset"] + 35),
    "properties length": lambda case, record: case.flip(
        record["commitLogOffset"] + 84 + 4 + record["bodyLen"] + 1 + len(record["topic"])
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_one_damaged_record_is_skipped_and_named(case: Case, damage: str) -> None:
    victim = case.truth[VICTIM]
    DAMAGES[damage](case, victim)
    done = case.backfill()
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "damaged" in line]
    assert str(case.first_file) in line and f"begin_phys={victim['commitLogOffset']}" in line
    assert case.read_back() == case.expected(lambda m: m is victim)
    assert command("verify", case.url, "--full").returncode == 0, (
        "a recorded gap is no anomaly of the archive"
    )
    assert case.backfill().returncode == 0, "what is known is not found again"


def test_ls_names_what_is_missing_for_good(case: Case) -> None:
    victim = case.truth[VICTIM]
    DAMAGES["magic"](case, victim)
    case.backfill()
    topic, queue_id, offset = victim["topic"], victim["queueId"], victim["queueOffset"]
    for queue in json.loads(command("ls", case.url, "--json").stdout)["queues"]:
        is_victim = (queue["topic"], queue["queueId"]) == (topic, queue_id)
        gap = {"beginOffset": offset, "endOffset": offset + 1, "reason": "damaged"}
        assert queue["gaps"] == ([gap] if is_victim else [])
    shown = command("ls", case.url).stdout
    assert f"{topic} {queue_id} 0 {offset:,} {offset:,} damaged" in " ".join(shown.split())
    assert shown.endswith(", 1 gap\n")


def test_a_truncated_file_loses_only_its_tail(case: Case) -> None:
    cut = case.truth[VICTIM]["commitLogOffset"] + 100
    with case.first_file.open("r+b") as file:
        file.truncate(cut)
    done = case.backfill()
    assert done.returncode == 1, done.stderr
    assert f"={case.truth[VICTIM]['commitLogOffset']}" in done.stderr
    assert case.read_back() == case.expected(
        lambda m: case.truth[VICTIM]["commitLogOffset"] <= m["commitLogOffset"] < FILE_BYTES
    )


def test_a_missing_middle_file_is_a_gap(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    source = real_store("A")
    shutil.copytree(source / "store", tmp_path / "store")
    missing = tmp_path / "store" / "commitlog" / f"{FILE_BYTES:020d}"
    missing.unlink()
    url = f"file://{tmp_path}/archive"
    conf = str(source / "broker.conf")
    done = command("backfill", str(tmp_path / "store"), url, "--broker-conf", conf)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "commitlog is missing" in line]
    assert f"begin_phys={FILE_BYTES}" in line and f"end_phys={2 * FILE_BYTES}" in line
    assert json.loads(command("status", url, "--json").stdout)["gaps"] > 0
    assert command("verify", url, "--full").returncode == 0


def test_an_unreadable_file_is_named(case: Case) -> None:
    arguments = ["backfill", str(case.home / "store"), case.url, "--cluster", "c", "--broker", "b"]
    # All code is loaded before the change of user, who may not be able to read this program's own files.
    assert main([*arguments[:2], f"{case.url}-of-root", *arguments[3:]]) == 0
    case.first_file.chmod(0o600)
    (case.home / "archive").mkdir()
    (case.home / "archive").chmod(0o777)

    def work() -> str:
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code = main(arguments)
        return f"{code} {errors.getvalue().splitlines()[-1]}"

    said = run_unprivileged(work, case.home, case.home / "archive")
    assert said.startswith("2 tiered: ") and str(case.first_file) in said


def test_tables_broken_with_their_backups_are_named_and_the_messages_are_there(case: Case) -> None:
    config = case.home / "store" / "config"
    for name in ("topics.json", "topics.json.bak"):
        (config / name).write_text('{"topicConfigTable": {')
    done = case.backfill()
    assert done.returncode == 1
    said = done.stdout.splitlines()[-1]
    assert "DAMAGED tables" in said and str(config / "topics.json") in said and "character" in said
    assert case.read_back() == case.expected(lambda m: False)


def test_a_record_larger_than_block_batch_and_budget_is_archived(case: Case) -> None:
    done = case.backfill("--set", "offload.batch_bytes=64KiB")
    assert done.returncode == 0, done.stderr
    assert case.read_back() == case.expected(lambda m: False)


def test_a_dledger_store_and_an_empty_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "store" / "dledger-n0").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name, word in (("store", "DLedger"), ("empty", "commitlog")):
        done = command(
            "backfill", str(tmp_path / name), f"file://{tmp_path}/a", "--cluster", "c", "--broker", "b"
        )
        assert done.returncode == 2
        assert done.stderr.startswith("tiered: ") and done.stderr.count("\n") == 1 and word in done.stderr


def test_an_archive_directory_that_cannot_be_written_is_named(case: Case) -> None:
    (case.home / "archive").write_text("a file where the archive should be")
    done = case.backfill(apart=True)
    assert done.returncode in (2, 4), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tiered: ") and "archive" in last


@pytest.fixture
def small_disk(case: Case) -> Iterator[Path]:
    """The archive's directory is a disk of 1 MiB."""
    directory = case.home / "archive"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.parametrize("ring_key", ["", "k1"])
def test_a_full_disk_is_exit_4_and_with_room_the_same_command_continues(
    ring_key: str, case: Case, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key, nothing is written plain."""
    case.key_ring = str(key_file(case.home / "ring", ring_key)) if ring_key else ""
    monkeypatch.setattr(bounded_run, "OUTAGE_S_MAX", 1.0)
    done = case.backfill()
    assert done.returncode == 4, done.stderr
    last = done.stderr.splitlines()[-1]
    assert (
        last.startswith("tiered: the object store has stored nothing for 1 s: ")
        and "No space left" in last
        and str(small_disk) in last
    )
    assert last.endswith("; free space or grow the file system; the same command continues where it stopped")
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    done = case.backfill(apart=True)
    assert done.returncode == 0, done.stderr
    assert case.read_back() == case.expected(lambda m: False)
    assert command("verify", case.url, "--full").returncode == 0
    data = [path for path in small_disk.rglob("*.s*o") if path.is_file()]
    assert {path.read_bytes()[-80:-72] == b"RMQTSEAL" for path in data} == {bool(ring_key)}


def test_sigterm_stops_in_time_even_when_nothing_can_be_stored(case: Case, small_disk: Path) -> None:
    arguments = ["backfill", str(case.home / "store"), case.url, "--set", "process.drain_timeout_ms=500ms"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*TIERED, *arguments], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        while "under new keys" not in process.stderr.readline():
            assert process.poll() is None
        process.terminate()
        errors = process.stderr.read()
        assert process.wait(30) == 4
    assert errors.splitlines()[-1].startswith("tiered: stopped before all uploads in flight were stored")


def test_the_outage_limit_counts_from_the_first_refusal() -> None:
    limit = OutageLimit(outage_s_max=10, drain_s_max=5)
    limit.check(None, is_stopping=False, now_s=0)
    refused = cast(
        "OffloadStatus", SimpleNamespace(counters=UploadCounters(consecutive_failures=3), last_error="503")
    )
    well = cast("OffloadStatus", SimpleNamespace(counters=UploadCounters(), last_error="503"))
    limit.check(refused, is_stopping=False, now_s=1)
    limit.check(refused, is_stopping=False, now_s=10.9)
    limit.check(well, is_stopping=False, now_s=11)
    limit.check(refused, is_stopping=False, now_s=12)
    with pytest.raises(UnavailableError, match="503"):
        limit.check(refused, is_stopping=False, now_s=22)
    limit.check(well, is_stopping=True, now_s=30)
    with pytest.raises(UnavailableError, match="stopped before"):
        limit.check(well, is_stopping=True, now_s=35)
