"""Backfill and export processes on Spark, killed with SIGKILL: the next run completes them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.spark.jobs.backfill_runs import own_archive, truth_of
from tests.spark.jobs.export_runs import exported
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import head_version
from tiered.object_store.file import FileStore

pytestmark = pytest.mark.soak
ROOT = Path(__file__).parents[3]
RealStore = Callable[[str], Path]


def start(*arguments: object, master: str = "local[2]") -> subprocess.Popen[bytes]:
    """A verb in a process group of its own, with its JVM and workers."""
    command = [sys.executable, "-m", "rocketmq_tiered.spark", *map(str, arguments), "--master", master]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)


def backfill_arguments(directory: Path, target: Path) -> tuple[object, ...]:
    """Small cycles, so that there are many commits to be killed between."""
    return (
        "backfill",
        directory / "store",
        f"file://{target / 'bulk'}",
        "--cluster",
        CLUSTER,
        "--broker",
        BROKER,
        "--set",
        "offload.batch_bytes=1048576",
        "--set",
        "offload.split_bytes=262144",
    )


def kill_when(process: subprocess.Popen[bytes], is_time: Callable[[], bool]) -> bool:
    """SIGKILL to the whole group once ``is_time``; False if it ended before."""
    deadline = time.monotonic() + 180
    while process.poll() is None and time.monotonic() < deadline:
        if is_time():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
            return True
        time.sleep(0.02)
    return False


def kill_workers(process: subprocess.Popen[bytes]) -> int:
    """SIGKILL to the Python workers below ``process``, not to the daemon that forks them; how many there were."""
    listing = subprocess.run(["ps", "-eo", "pid,ppid,sid,args"], capture_output=True, text=True, check=True)
    rows = [line.split(None, 3) for line in listing.stdout.splitlines()[1:]]
    mine = {
        int(row[0]): int(row[1]) for row in rows if int(row[2]) == process.pid and "pyspark.daemon" in row[3]
    }
    workers = [pid for pid, parent in mine.items() if parent in mine]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    return len(workers)


@pytest.mark.timeout(900)
def test_killed_tasks_are_repeated_without_duplicates(real_store: RealStore, tmp_path: Path) -> None:
    arguments = backfill_arguments(real_store("A"), tmp_path)
    archive = own_archive(tmp_path / "bulk")
    process = start(*arguments, master="local[2,8]")
    killed = 0
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if killed < 4 and head_version(archive) > 2 + 5 * killed:
            killed += kill_workers(process)
        time.sleep(0.05)
    assert process.wait(300) == 0
    assert killed > 0
    backfill(real_store("A") / "store", FileStore(tmp_path / "single"))
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")
    assert verify_archive(archive, depth="full").anomalies == []


@pytest.mark.timeout(900)
def test_a_backfill_killed_repeatedly_archives_its_store(real_store: RealStore, tmp_path: Path) -> None:
    directory = real_store("A")
    arguments = backfill_arguments(directory, tmp_path)
    archive = own_archive(tmp_path / "bulk")
    kills = 0
    for more in (1, 6, 11):
        wanted = head_version(archive) + more
        kills += kill_when(start(*arguments), lambda wanted=wanted: head_version(archive) >= wanted)  # type: ignore[misc]
    assert kills >= 2
    assert start(*arguments).wait(300) == 0
    backfill(directory / "store", FileStore(tmp_path / "single"))
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")
    assert check_against_truth(FileStore(tmp_path / "bulk"), directory, "A") > 100_000
    assert verify_archive(archive, depth="full").anomalies == []


@pytest.mark.timeout(900)
def test_an_export_killed_repeatedly_has_every_row_once(real_store: RealStore, tmp_path: Path) -> None:
    backfill(real_store("A") / "store", FileStore(tmp_path / "archive"))
    arguments = (
        "export",
        f"file://{tmp_path / 'archive'}",
        f"file://{tmp_path / 'table'}",
        "--partition-bytes",
        1 << 20,
    )
    kills = 0
    for files in (1, 30):
        kills += kill_when(
            start(*arguments),
            lambda files=files: len(list((tmp_path / "table").rglob("*.parquet"))) >= files,  # type: ignore[misc]
        )
    assert kills >= 1
    assert start(*arguments).wait(300) == 0
    rows = exported(tmp_path / "table")
    assert set(rows.values()) == {1}
    assert start("export", arguments[1], f"file://{tmp_path / 'whole'}").wait(300) == 0
    assert exported(tmp_path / "whole") == rows


@pytest.mark.timeout(900)
def test_killed_export_tasks_are_repeated_without_duplicates(real_store: RealStore, tmp_path: Path) -> None:
    backfill(real_store("A") / "store", FileStore(tmp_path / "archive"))
    table = tmp_path / "table"
    arguments = ("export", f"file://{tmp_path / 'archive'}", f"file://{table}", "--partition-bytes", 1 << 20)
    process = start(*arguments, master="local[2,8]")
    killed = 0
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if killed < 4 and len(list(table.rglob("*.parquet"))) > 5 + 10 * killed:
            killed += kill_workers(process)
        time.sleep(0.05)
    assert process.wait(300) == 0
    assert killed > 0
    rows = exported(table)
    assert set(rows.values()) == {1}
    assert start("export", arguments[1], f"file://{tmp_path / 'whole'}").wait(300) == 0
    assert exported(tmp_path / "whole") == rows


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_a_delta_table_has_every_row_once_after_a_kill(real_store: RealStore, tmp_path: Path) -> None:
    """Needs Delta's runtime, which Spark fetches by its Maven coordinates."""
    backfill(real_store("K") / "store", FileStore(tmp_path / "archive"))
    table = tmp_path / "table"
    arguments = ("export", f"file://{tmp_path / 'archive'}", f"file://{table}", "--format", "delta")
    kill_when(start(*arguments), (table / "_delta_log" / f"{0:020d}.json").exists)
    done = table / "_tiered_export" / f"{1:010d}.done"
    done.unlink(missing_ok=True)  # killed after Delta's commit, before ours
    assert start(*arguments).wait(300) == 0
    assert done.exists()
    commits = list((table / "_delta_log").glob("*.json"))
    assert len(commits) == 1
    assert start("export", arguments[1], f"file://{tmp_path / 'whole'}").wait(300) == 0
    added = commits[0].read_text().count('"add"')
    assert added == len([file for file in table.rglob("*.parquet") if "_delta_log" not in str(file)])
    assert exported(table) == exported(tmp_path / "whole")
    arguments = (*arguments[:2], f"file://{tmp_path / 'both'}", *arguments[3:])
    assert [one.wait(300) for one in [start(*arguments), start(*arguments)]] == [0, 0]
    log = (tmp_path / "both" / "_delta_log").glob("*.json")
    assert sum(one.read_text().count('"add"') for one in log) == added
