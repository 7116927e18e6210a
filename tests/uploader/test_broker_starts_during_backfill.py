"""A broker that is started on a store while that is back-filled: what it appends then is not taken without its word."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_offsets
from uploader.offload import Environment, Offloader, OffloadIdentity

HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""


class StartedBroker:
    """Takes the store's lock and writes ``appended`` behind its log, once; whoever comes meanwhile waits for that."""

    def __init__(self, lock: Path, file: Path, offset: int, appended: bytes) -> None:
        self._lock, self._file, self._offset, self._appended = lock, file, offset, appended
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        with self._starting:
            if self._process is None:
                self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLD_LOCK, str(self._lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"held\n"
        with self._file.open("r+b") as opened:
            opened.seek(self._offset)
            opened.write(self._appended)

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate()


@contextmanager
def halved_log(directory: Path, store: Path) -> Iterator[tuple[StartedBroker, int]]:
    """A copy, at ``store``, whose last file is written to the half: the broker that writes the rest, the log's end."""
    shutil.copytree(directory / "store", store)
    log = CommitLog([store / "commitlog"])
    for file in log.files[9:]:
        file.path.unlink()
    last = log.files[8]
    phys = last.begin_phys
    while phys < last.begin_phys + last.size_bytes // 2:
        size = log.record_size_at(phys)
        assert size is not None
        phys += size
    offset = phys - last.begin_phys
    rest = last.path.read_bytes()[offset:]
    with last.path.open("r+b") as opened:
        opened.truncate(offset)
        opened.truncate(last.size_bytes)
    broker = StartedBroker(store / "lock", last.path, offset, rest)
    try:
        yield broker, phys
    finally:
        broker.stop()


def test_a_back_fill_takes_nothing_that_a_broker_appends_meanwhile(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    memory = MemoryStore("memory://started")
    with (
        halved_log(real_store("A"), tmp_path / "store") as (broker, end_phys),
        open_broker_store(tmp_path / "store") as store,
        pytest.raises(UnavailableError, match="a broker was started"),
    ):
        Offloader(
            store, memory, OffloadIdentity(CLUSTER, BROKER, "test", "backfill"), SMALL,
            topic_filter=FILTER, offsets_source=no_offsets, environment=Environment(committed=lambda _: broker.start()),
        ).run(threading.Event(), follow=False)  # fmt: skip
    state = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)))
    assert 0 < state.cursor.phys <= end_phys
