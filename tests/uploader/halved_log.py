"""A store of which a part of the log is missing, and a process that holds its lock."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered.broker_store.commit_log import CommitLog

HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""


class StartedBroker:
    """Takes the store's lock and writes ``appended`` behind its log, once; other threads wait for that."""

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
