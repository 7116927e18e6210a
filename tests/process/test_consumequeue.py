"""`tiered consumequeue` on real stores: what it writes equals what the broker wrote; kills, refusals, damage."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.process.consume_queues import (
    WORK_NAME,
    QueueCheck,
    Written,
    build,
    check_queues,
    convert,
    plan_of,
)
from tests.broker_store.lock_holder import HOLDER
from tests.broker_store.opened_store import consume_queues_of
from tests.broker_store.record_bytes import log_file, records
from tests.process.killed_rewrite import kill_at
from tests.sweeps import sweep
from tiered.broker_store.conf import read_broker_conf
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.consume_queue.store import StoreKind
from tiered.errors import UnavailableError, UsageError
from tiered.model.tables import Table

STORES = ("A", "B", "C", "D", "E", "F", "G", "K")
ROCKSDB = ("C", "D")
FILE_TO_ROCKSDB = {StoreKind.FILE: StoreKind.ROCKSDB, StoreKind.ROCKSDB: StoreKind.FILE}
F_UNDISPATCHED = 2
"""Records that the killed broker of F has no units of on disk."""
COMPARED = ("phys", "size", "tags_code", "queue_offset", "inner_num")
Queues = dict[tuple[str, int], tuple[int, int, Table]]


def opened(path: Path, *, conf: bool = True) -> BrokerStore:
    return open_broker_store(path / "store", conf=read_broker_conf(path / "broker.conf") if conf else None)


def written(path: Path, kind: StoreKind, write: Callable[..., Written], observe: Any = None) -> Written:
    with opened(path) as store:
        return write(plan_of(store, kind), observe or (lambda done, total: None))


def checked(path: Path) -> QueueCheck:
    with opened(path) as store:
        return check_queues(store, lambda done, total: None)


def queues_of(path: Path, *, but: tuple[str, ...] = ()) -> Queues:
    """Minimum, maximum and living units of all queues that have any offset."""
    found = {}
    with opened(path) as store:
        index = consume_queues_of(store)
        for queue in index.queues():
            first, end = index.min_offset(*queue[:2]), index.max_offset(*queue[:2])
            if end and queue.topic not in but:
                found[queue[:2]] = first, end, index.units(*queue[:2], first, end - first)
    return found


def assert_equal(found: Queues, expected: Queues) -> None:
    assert found.keys() == expected.keys()
    for key, (first, end, units) in expected.items():
        assert found[key][:2] == (first, end), key
        for name in COMPARED:
            assert found[key][2][name].tolist() == units[name].tolist(), (key, name)
        both = (units["store_timestamp"] != 0) & (found[key][2]["store_timestamp"] != 0)
        assert (units["store_timestamp"] == found[key][2]["store_timestamp"])[both].all(), key


@pytest.fixture
def copied(real_store: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(real_store(name), target, ignore=shutil.ignore_patterns("truth"))
        return target

    return copy


@pytest.mark.parametrize("name", sweep(STORES, fast=("D", "K"), rest="integration"))
def test_written_queues_equal_the_brokers_in_both_kinds(copied: Callable[[str], Path], name: str) -> None:
    path = copied(name)
    own, batches = queues_of(path), ("t_bcq",)
    assert checked(path).is_good
    for kind, other in FILE_TO_ROCKSDB.items():
        result = written(path, kind, build)
        assert not result.damaged
        assert not result.unknown_ends
        assert not (path / "store" / WORK_NAME).exists()
        but = batches if kind is StoreKind.ROCKSDB else ()
        expected = {key: queue for key, queue in own.items() if key[0] not in but}
        found = queues_of(path)
        if name == "F":
            assert sum(len(queue[2]) for queue in found.values()) == F_UNDISPATCHED + sum(
                len(queue[2]) for queue in own.values()
            )
        else:
            assert_equal(found, expected)
        after = checked(path)
        assert (after.is_good, after.undispatched) == (True, 0)
        written(path, other, convert)
        assert_equal(queues_of(path), {key: queue for key, queue in found.items() if key[0] not in batches})
        assert checked(path).is_good or name in ("A", "B", "G", "K")  # without BatchCQ, files miss those


def test_both_kinds_are_written_in_one_pass_and_equal_also_after_a_kill(
    copied: Callable[[str], Path],
) -> None:
    """A broker with rocksdbCQDoubleWriteEnable may go back to either."""
    path = copied("K")
    own = queues_of(path)
    kill_at(path, "build", StoreKind.BOTH, event="report", at=2)
    written(path, StoreKind.BOTH, build)
    assert_equal(queues_of(path), own)
    with (path / "broker.conf").open("a") as conf:
        conf.write("\nstoreType=defaultRocksDB\n")
    assert_equal(queues_of(path, but=("t_bcq",)), {key: own[key] for key in own if key[0] != "t_bcq"})


@pytest.mark.parametrize(
    ("action", "kind", "at"),
    [
        ("build", StoreKind.FILE, 4),
        ("build", StoreKind.ROCKSDB, 7),
        ("convert", StoreKind.FILE, 60),
        ("convert", StoreKind.ROCKSDB, 5),
    ],
)
def test_a_killed_run_is_continued(
    copied: Callable[[str], Path], action: str, kind: StoreKind, at: int
) -> None:
    path = copied("D")
    own = queues_of(path)
    if action == "convert" and kind is StoreKind.ROCKSDB:
        written(path, StoreKind.FILE, convert)
    kill_at(path, action, kind, event="report", at=at)
    before = json.loads((path / "store" / WORK_NAME / "progress.json").read_bytes())
    assert before["phys"] > 0 or before["after_queue"]
    totals: list[int] = []
    written(
        path, kind, {"build": build, "convert": convert}[action], lambda done, total: totals.append(total)
    )
    if action == "convert":
        assert totals[0] < 20 * sum(len(queue[2]) for queue in own.values())
    assert_equal(queues_of(path), own)
    assert checked(path).is_good


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_kill_between_renames_is_completed(copied: Callable[[str], Path], at: int) -> None:
    path = copied("K")
    own = queues_of(path)
    kill_at(path, "build", StoreKind.FILE, event="rename", at=at)
    written(path, StoreKind.FILE, build)
    assert_equal(queues_of(path), own)
    assert not (path / "store" / WORK_NAME).exists()


def test_another_task_or_a_start_of_the_broker_discards_what_was_begun(copied: Callable[[str], Path]) -> None:
    path = copied("D")
    own = queues_of(path)
    kill_at(path, "build", StoreKind.ROCKSDB, event="report", at=2)
    os.utime(path / "store" / "lock")
    kill_at(path, "build", StoreKind.ROCKSDB, event="report", at=1)
    written(path, StoreKind.FILE, build)
    assert_equal(queues_of(path), own)


@pytest.fixture
def broker_runs(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    holders = []

    def hold(store: Path) -> None:
        (store / "lock").write_text("lock")
        command = [sys.executable, "-c", HOLDER, str(store / "lock")]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "locked"

    yield hold
    for holder in holders:
        holder.communicate("")


def small_store(path: Path, count: int = 30) -> Path:
    """A store in which topic t has ``count`` messages in one queue."""
    log_file(path / "commitlog", 0, records(0, [b"body"] * count), 1 << 16)
    (path / "lock").write_text("lock")
    return path


Run = Callable[..., tuple[int, str, str]]


def test_a_running_broker_is_refused(run: Run, tmp_path: Path, broker_runs: Callable[[Path], None]) -> None:
    store = small_store(tmp_path / "store")
    broker_runs(store)
    for arguments in (("build", "--to", "file"), ("verify",)):
        code, _, error = run("consumequeue", arguments[0], str(store), *arguments[1:])
        assert code == 4
        assert "broker" in error
        assert "stop the broker" in error
    assert not (store / WORK_NAME).exists()


def test_a_broker_cannot_start_while_queues_are_written(
    tmp_path: Path, broker_runs: Callable[[Path], None]
) -> None:
    path = small_store(tmp_path / "store")
    seen = []

    def observe(done: int, total: int) -> None:
        with pytest.raises(AssertionError):
            broker_runs(path)
        seen.append(done)

    with open_broker_store(path) as store:
        build(plan_of(store, StoreKind.FILE), observe)
    assert seen


def test_verify_names_missing_wrong_and_extra_units(run: Run, tmp_path: Path) -> None:
    store = small_store(tmp_path / "store")
    assert run("consumequeue", "build", str(store), "--to", "file")[:2] == (
        0,
        f"{store}: 30 units of 1 consume queue written, storeType=default\n",
    )
    good = f"{store}: 1 consume queue as in the commitlog, 30 units\n"
    assert run("consumequeue", "verify", str(store))[:2] == (0, good)
    path = store / "consumequeue" / "t" / "0" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[8:12] = b"\0\0\0\xff"  # the first size
    data[100:120] = bytes(20)  # no unit
    data[600:640] = data[560:600]  # two more
    path.write_bytes(data)
    code, out, _ = run("consumequeue", "verify", str(store))
    assert code == 1
    assert "t/0: 1 missing, 1 wrong, 2 extra\n" in out
    code, out, _ = run("consumequeue", "verify", str(store), "--json")
    assert (code, json.loads(out)["problems"][0]["missing"]) == (1, 1)
    assert run("consumequeue", "build", str(store), "--to", "rocksdb")[0] == 0
    assert run("consumequeue", "verify", str(store))[:2] == (0, good)
    assert run("consumequeue", "convert", str(store), "--to", "file")[0] == 0
    assert run("consumequeue", "verify", str(store))[:2] == (0, good)


def test_damage_of_the_log_is_reported_and_the_rest_is_written(run: Run, tmp_path: Path) -> None:
    store = small_store(tmp_path / "store")
    data = records(0, [b"body"] * 30)
    size = len(data) // 30
    log_file(store / "commitlog", 1 << 16, records(1 << 16, [b"more"]), 1 << 16)
    with (store / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.write(data[: 5 * size + 20] + b"\xff\xff" + data[5 * size + 22 :])
        file.seek(30 * size)
        file.write(((1 << 16) - 30 * size).to_bytes(4, "big") + 0xCBD43194.to_bytes(4, "big"))
    code, out, _ = run("consumequeue", "build", str(store), "--to", "rocksdb", "--json")
    assert code == 1
    assert json.loads(out)["damaged"] == [[5 * size, 6 * size]]
    # The second file creates the topic again. Without it there is a gap.
    (store / "commitlog" / f"{1 << 16:020d}").unlink()
    log_file(store / "commitlog", 1 << 16, records(1 << 16, [b"more"], topic="u"), 1 << 16)
    for kind in ("rocksdb", "file"):
        assert run("consumequeue", "build", str(store), "--to", kind)[0] == 1
        with open_broker_store(store) as again:
            index = consume_queues_of(again)
            assert index.max_offset("t", 0) == 30
            assert index.units("t", 0, 5, 1)[["phys", "size"]].tolist() == [((1 << 16) - 1, 2)]
        code, out, _ = run("consumequeue", "verify", str(store))
        assert (code, out.count("damaged")) == (1, 1)
        assert "2 consume queues as in the commitlog, 30 units" in out


def test_a_queue_without_a_message_in_the_log_continues_at_its_end(run: Run, tmp_path: Path) -> None:
    store = small_store(tmp_path / "store")
    log_file(store / "commitlog", 1 << 16, records(1 << 16, [b"more"]), 1 << 16)
    (store / "commitlog" / f"{0:020d}").unlink()
    old = store / "consumequeue" / "gone" / "3"
    log_file(old, 0, b"\0\0\0\0\0\0\0\1\0\0\0\x64" + bytes(8), 20 * 50)
    for kind in ("rocksdb", "file"):
        assert run("consumequeue", "build", str(store), "--to", kind)[0] == 0
        with open_broker_store(store) as again:
            index = consume_queues_of(again)
            assert (index.min_offset("gone", 3), index.max_offset("gone", 3)) == (1, 1)
    assert next((store / "consumequeue/gone/3").iterdir()).stat().st_size == 6_000_000


def test_wrong_calls_are_one_line(run: Run, tmp_path: Path) -> None:
    store = small_store(tmp_path / "store")
    assert run("consumequeue", "build", str(store))[::2] == (
        2,
        "tiered: consumequeue build requires --to; --to file, rocksdb or both chooses what build and convert write\n",
    )
    assert run("consumequeue", "verify", str(store), "--to", "file")[0] == 2
    assert run("consumequeue", "build", str(store), "--to", "file")[0] == 0
    code, _, error = run("consumequeue", "convert", str(store), "--to", "file")
    assert code == 2
    assert "in file already" in error


def test_a_running_broker_in_rocksdb_is_unavailable(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store")
    (store / "lock").unlink()
    (store / "abort").write_text("1")
    with open_broker_store(store) as opened_store, pytest.raises(UnavailableError):
        check_queues(opened_store, lambda done, total: None)


def test_holes_of_lmqs_do_not_go_into_files(tmp_path: Path) -> None:
    path = small_store(tmp_path / "store")
    with open_broker_store(path) as store:
        build(plan_of(store, StoreKind.ROCKSDB), lambda done, total: None)
    from rocksdict import Options, Rdict, WriteBatch

    database = Rdict(str(path / "consumequeue"), Options(raw_mode=True))
    batch = WriteBatch(raw_mode=True)
    batch.delete(b"\0\0\0\1\1t\1\0\0\0\0\1" + (7).to_bytes(8, "big"))
    database.write(batch)
    database.flush()
    database.close()
    with open_broker_store(path) as store, pytest.raises(UsageError, match="consumequeue build"):
        convert(plan_of(store, StoreKind.FILE), lambda done, total: None)
