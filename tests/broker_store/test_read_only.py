"""The broker's files are opened read-only, always, and reading leaves no trace.

Every open of this process is audited while a store is read in every way there is.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiered.broker_store.conf import read_broker_conf
from tiered.broker_store.damage import find_next_record, proven_phys
from tiered.broker_store.pins import PinKeeper
from tiered.broker_store.store import open_broker_store

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
        index = store.consume_queues()
        assert index is not None
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
