"""Asking whether the broker runs: the kernel tells, and nothing is taken."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker_store.lock_holder import HOLDER
from tests.broker_store.unprivileged import run_unprivileged
from tiered.broker_store.liveness import Liveness, ask_liveness

JAVA_HOLDER = """
import java.io.RandomAccessFile;
public class Holder {
    public static void main(String[] args) throws Exception {
        var lock = new RandomAccessFile(args[0], "rw").getChannel().tryLock(0, 1, false);
        System.out.println(lock.isValid() ? "locked" : "failed");
        System.in.read();
    }
}
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "lock").write_text("lock")
    (tmp_path / "abort").write_text("4711")
    return tmp_path


def hold(command: list[str]) -> subprocess.Popen[str]:
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == "locked"
    return holder


def release(holder: subprocess.Popen[str]) -> None:
    holder.communicate()


def test_held_lock_means_alive_and_names_the_process(store: Path) -> None:
    holder = hold([sys.executable, "-c", HOLDER, str(store / "lock")])
    try:
        report = ask_liveness(store)
        assert report.liveness is Liveness.ALIVE
        assert report.pid == holder.pid
        assert report.is_abort_present
    finally:
        release(holder)
    assert ask_liveness(store).is_dead


@pytest.mark.skipif(shutil.which("java") is None, reason="no java")
def test_a_lock_taken_as_java_takes_it_is_seen(store: Path, tmp_path: Path) -> None:
    (tmp_path / "Holder.java").write_text(JAVA_HOLDER)
    holder = hold(["java", "-Xshare:auto", "-Xmx64m", str(tmp_path / "Holder.java"), str(store / "lock")])
    try:
        assert ask_liveness(store).liveness is Liveness.ALIVE
    finally:
        release(holder)


def test_asking_takes_nothing(store: Path) -> None:
    for _ in range(3):
        assert ask_liveness(store).is_dead
    release(hold([sys.executable, "-c", HOLDER, str(store / "lock")]))


def test_a_lock_on_other_bytes_does_not_count(store: Path) -> None:
    other = HOLDER.replace("1, 0)", "1, 2)")
    holder = hold([sys.executable, "-c", other, str(store / "lock")])
    try:
        assert ask_liveness(store).is_dead
    finally:
        release(holder)


def test_copy_without_lock_file_has_no_broker(tmp_path: Path) -> None:
    assert ask_liveness(tmp_path).is_dead


def test_abort_without_lock_file_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "abort").touch()
    report = ask_liveness(tmp_path)
    assert report.liveness is Liveness.UNKNOWN
    assert not report.is_dead


def test_lock_file_that_may_not_be_opened_proves_nothing(store: Path) -> None:
    (store / "lock").chmod(0)
    store.chmod(0o755)
    assert run_unprivileged(lambda: ask_liveness(store).liveness.value, store) == "unknown"


def test_file_system_without_locks_proves_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(os.strerror(37), 37)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert ask_liveness(store).liveness is Liveness.UNKNOWN
