"""Detects whether the broker of a store runs, without taking the broker's lock.

A running broker holds an exclusive lock on byte 0 of its ``lock`` file (java.nio FileChannel.tryLock, which is
fcntl(2) on POSIX), which F_GETLK reports. Only a free lock proves a broker *dead*; if it cannot be checked, the broker
is *unknown* and treated as running. Source: DefaultMessageStore.start.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from tiered.errors import UnavailableError
from tiered.whole_file import file_error

LOCK_NAME: Final = "lock"
ABORT_NAME: Final = "abort"
_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


class Liveness(Enum):
    """State of the broker process."""

    ALIVE = "alive"
    DEAD = "dead"
    """Proven: the lock is free."""
    UNKNOWN = "unknown"
    """The lock cannot be checked; treated as alive."""


@dataclass(frozen=True)
class LivenessReport:
    """Whether a broker runs, and ``why`` that is so. ``pid``: the process that holds the lock; 0 if none does, or one
    in another PID namespace. ``is_abort_present``: there is an abort file, as while a broker runs, and after one that
    did not shut down cleanly."""

    liveness: Liveness
    pid: int
    is_abort_present: bool
    why: str

    @property
    def is_dead(self) -> bool:
        """Whether the broker is proven dead."""
        return self.liveness is Liveness.DEAD


def ask_liveness(store_path: Path) -> LivenessReport:
    """Whether a broker runs on the store, with the reason, by the lock that a running one has. Takes no lock and writes
    nothing."""
    is_abort_present = os.path.lexists(store_path / ABORT_NAME)
    lock_path = store_path / LOCK_NAME
    try:
        fd = os.open(lock_path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # The broker creates the file first and never removes it.
        if is_abort_present:
            return LivenessReport(
                Liveness.UNKNOWN, 0, True, f"{lock_path} is missing, but an abort file of a broker exists"
            )
        return LivenessReport(
            Liveness.DEAD, 0, False, f"{lock_path} does not exist: no broker runs on this copy"
        )
    except OSError as error:
        why = f"{lock_path} cannot be opened: {error.strerror}"
        return LivenessReport(Liveness.UNKNOWN, 0, is_abort_present, why)
    try:
        kind, pid = _lock_holder(fd)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "error")
        why = f"{lock_path}: file locks cannot be checked ({code})"
        return LivenessReport(Liveness.UNKNOWN, 0, is_abort_present, why)
    finally:
        os.close(fd)
    if kind == fcntl.F_UNLCK:
        return LivenessReport(Liveness.DEAD, 0, is_abort_present, f"no process holds {lock_path}")
    process = f"process {pid}" if pid > 0 else "a process outside this PID namespace"
    return LivenessReport(Liveness.ALIVE, max(pid, 0), is_abort_present, f"{process} holds {lock_path}")


@contextmanager
def broker_locked_out(store_path: Path) -> Iterator[None]:
    """Hold the lock of the store inside the block, so that no broker starts on it. Raises UnavailableError while one
    runs.

    It is a lock of the open file (F_OFD_SETLK), not of the process: ``ask_liveness`` in this process does not release
    it by closing the file, and reports a broker while it is held."""
    path = store_path / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise file_error(error, path) from error
    try:
        if os.geteuid() == 0:
            owner = os.stat(store_path)
            os.fchown(fd, owner.st_uid, owner.st_gid)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise file_error(error, path) from error
        raise UnavailableError(
            f"{path} is locked by a running broker", hint="stop the broker first"
        ) from error
    try:
        yield
    finally:
        os.close(fd)


def _lock_holder(fd: int) -> tuple[int, int]:
    """The kind of lock (F_UNLCK: none) that a process holds on the open lock file ``fd``, and that process."""
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, question))
    return int(kind), int(pid)
