"""Opening a store: where its parts are, and what is refused with one clear line.

The broker's files are opened read-only, always, and reading leaves no trace.

Every open of this process is audited while a store is read in every way there is.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker_store.opened_store import consume_queues_of
from tests.broker_store.record_bytes import log_file, queue_file, record, rocksdb_queues, unit
from tests.broker_store.unprivileged import run_unprivileged
from tiered.broker_store.conf import broker_conf, read_broker_conf
from tiered.broker_store.damage import find_next_record, proven_phys
from tiered.broker_store.liveness import Liveness, LivenessReport
from tiered.broker_store.pins import PinKeeper
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.errors import AccessDeniedError, NotFoundError, StoreLayoutError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    log_file(path / "commitlog", 0, record(0), 4096)
    return path


def test_plain_store(store: Path) -> None:
    with open_broker_store(store) as opened:
        assert opened.commit_log.dirs == (store / "commitlog",)
        assert opened.consume_queues() is not None


def test_empty_commitlog_is_a_fresh_broker(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    with open_broker_store(tmp_path) as opened:
        assert opened.commit_log.files == ()
        assert (opened.commit_log.min_phys, opened.commit_log.max_file_end) == (0, 0)


@pytest.mark.parametrize("how", ["directory", "conf", "entries"])
def test_dledger_is_refused(store: Path, how: str) -> None:
    conf = broker_conf({"enableDLegerCommitLog": "true"}) if how == "conf" else None
    if how == "directory":
        (store / "dledger-n0").mkdir()
    if how == "entries":
        log_file(store / "commitlog", 0, bytes.fromhex("00000001000000c8") + bytes(100), 4096)
    with pytest.raises(StoreLayoutError, match="DLedger") as caught:
        open_broker_store(store, conf=conf)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_unknown_log_is_refused(store: Path) -> None:
    log_file(store / "commitlog", 0, b"some other program's data " * 10, 4096)
    with pytest.raises(StoreLayoutError, match=r"0{20} contains no records of a RocketMQ commitlog"):
        open_broker_store(store)


def test_one_damaged_record_is_not_an_unknown_log(store: Path) -> None:
    first = bytearray(record(0))
    first[4] ^= 0xFF
    log_file(store / "commitlog", 0, bytes(first) + record(len(first)), 4096)
    open_broker_store(store).close()


def test_directories_that_are_no_stores_are_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreLayoutError, match="has no commitlog directory"):
        open_broker_store(tmp_path / "empty")
    with pytest.raises(
        StoreLayoutError,
        match=f"use the store directory: {store}",
    ):
        open_broker_store(store / "commitlog")
    with pytest.raises(StoreLayoutError, match="is a file"):
        open_broker_store(store / "commitlog" / f"{0:020d}")
    with pytest.raises(NotFoundError, match="nowhere does not exist"):
        open_broker_store(tmp_path / "nowhere")


def test_commitlog_elsewhere_by_conf_or_by_argument(store: Path, tmp_path: Path) -> None:
    (store / "commitlog").rename(tmp_path / "log1")
    (tmp_path / "log2").mkdir()
    conf = broker_conf({"storePathCommitLog": f"{tmp_path}/log1,{tmp_path}/log2"})
    for opened in (
        open_broker_store(store, conf=conf),
        open_broker_store(store, commitlog_dirs=[tmp_path / "log1", tmp_path / "log2"]),
    ):
        assert opened.commit_log.dirs == (tmp_path / "log1", tmp_path / "log2")
        assert opened.commit_log.max_file_end == 4096


def test_disk_that_is_not_mounted_is_an_error_not_a_gap(store: Path, tmp_path: Path) -> None:
    conf = broker_conf({"storePathCommitLog": f"{store}/commitlog,{tmp_path}/unmounted/commitlog"})
    with pytest.raises(NotFoundError, match=r"unmounted/commitlog of broker\.conf does not exist"):
        open_broker_store(store, conf=conf)


def test_copied_store_is_found_below_the_copy(store: Path) -> None:
    conf = broker_conf({"storePathRootDir": "/gone/store", "storePathCommitLog": "/gone/store/commitlog"})
    assert open_broker_store(store, conf=conf).commit_log.dirs == (store / "commitlog",)


def test_unreadable_store_is_named(store: Path) -> None:
    (store / "commitlog").chmod(0o700)
    store.chmod(0o755)

    def work() -> str:
        with pytest.raises(AccessDeniedError) as caught:
            open_broker_store(store)
        return str(caught.value)

    assert run_unprivileged(work, store.parent).startswith(f"{store}/commitlog cannot be read")


BOTH_WRITTEN = {"rocksdbCQDoubleWriteEnable": "true"}


@pytest.mark.parametrize("place", ["consumequeue", "consumequeue_rocksdb"])
@pytest.mark.parametrize(
    ("properties", "is_rocksdb"),
    [
        ({}, False),  # left of a trial
        (BOTH_WRITTEN, False),
        (BOTH_WRITTEN | {"combineCQPreferCQType": "defaultRocksDB"}, True),
        ({"storeType": "defaultRocksDB"}, True),
        (None, True),
    ],
)
def test_of_both_kinds_of_consume_queues_those_are_read_that_the_broker_reads(
    store: Path, place: str, properties: dict[str, str] | None, is_rocksdb: bool
) -> None:
    """One that has units in either is shown: a broker may write LMQs to one kind only."""
    queue_file(store, "t", 0, unit(0, 100) + unit(100, 100))
    rocksdb_queues(store / place, {("t", 0): [(0, 100)], ("%LMQ%light", 0): [(0, 100)]})
    conf = None if properties is None else broker_conf(properties)
    with open_broker_store(store, conf=conf) as opened:
        assert opened.has_rocksdb_queues == is_rocksdb
        index = consume_queues_of(opened)
        assert index.max_offset("t", 0) == (1 if is_rocksdb else 2)
        assert opened.shown_queues() == {("t", 0), ("%LMQ%light", 0)}


def test_files_are_visible_beside_a_rocksdb_that_a_running_broker_does_not_read(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue_file(store, "t", 0, unit(0, 100))
    rocksdb_queues(store / "consumequeue", {("t", 0): [(0, 100)]})
    monkeypatch.setattr(BrokerStore, "liveness", lambda _: LivenessReport(Liveness.ALIVE, 1, True, ""))
    with open_broker_store(store, conf=broker_conf(BOTH_WRITTEN)) as opened:
        assert opened.consume_queues() is not None
    with open_broker_store(store, conf=broker_conf({"storeType": "defaultRocksDB"})) as opened:
        assert opened.consume_queues() is None


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGING = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.utime",
    "fcntl.flock",
    "fcntl.lockf",
    "shutil.rmtree",
    "os.symlink",
)
_audited: list[tuple[str, tuple[Any, ...]]] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _audited is not None and (event in ("open", "os.link") or event in CHANGING):
        _audited.append((event, arguments))


sys.addaudithook(_audit)


@pytest.fixture
def audited() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    global _audited  # noqa: PLW0603 - an audit hook stays for the life of the process
    _audited = []
    try:
        yield _audited
    finally:
        _audited = None


def read_everything(store_path: Path, conf: Path, pins: Path) -> None:
    keeper = PinKeeper([pins])
    with open_broker_store(store_path, conf=read_broker_conf(conf), pinned=keeper.files) as store:
        log = store.commit_log
        buffer = bytearray(1 << 20)
        for file in log.files:
            position = file.begin_phys
            while got := log.read_into(memoryview(buffer), position):
                position += got
                if position == file.end_phys:
                    break
        keeper.step(log.files, 0)
        index = consume_queues_of(store)
        for topic, queue_id, _ in index.queues():
            index.min_offset(topic, queue_id)
            index.units(topic, queue_id, 0, 1 << 20)
        index.frontier_phys()
        index.units_between(0, 1 << 20)
        index.refresh()
        proven_phys(log, index)
        index.that_end_elsewhere({(queue.topic, queue.queue_id): 1 for queue in index.queues()})
        find_next_record(log, log.min_phys, log.max_file_end, index=index)
        store.state()
        store.names()
        store.liveness()


def traces(store: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_mode)
        for path in sorted(store.rglob("*"))
    }


@pytest.mark.parametrize("name", ["A", "C", "F", "K"])
def test_broker_files_are_opened_read_only(
    name: str,
    real_store: Callable[[str], Path],
    tmp_path: Path,
    audited: list[tuple[str, tuple[Any, ...]]],
) -> None:
    shutil.copytree(real_store(name), tmp_path / name, symlinks=True)
    store = tmp_path / name / "store"
    before = traces(store)
    audited.clear()
    read_everything(store, tmp_path / name / "broker.conf", tmp_path / "pins")
    events = list(audited)
    inside = [(event, args) for event, args in events if any(str(a).startswith(f"{store}/") for a in args)]
    opens = [args for event, args in inside if event == "open"]
    assert len(opens) > 10
    assert [args for args in opens if args[2] & WRITING] == []
    assert {event for event, _ in inside} <= {"open", "os.link", "os.symlink"}
    for event, args in inside:
        if event in ("os.link", "os.symlink"):
            assert not str(args[1]).startswith(f"{store}/"), "a link into the broker's store"
    assert traces(store) == before


def test_the_audit_sees_writing(tmp_path: Path, audited: list[tuple[str, tuple[Any, ...]]]) -> None:
    (tmp_path / "file").write_text("x")
    os.open(tmp_path / "file", os.O_RDWR)
    assert any(event == "open" and args[2] & WRITING for event, args in audited)
