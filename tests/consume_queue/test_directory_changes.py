"""One stat tells whether a directory must be listed again."""

from __future__ import annotations

import os
from pathlib import Path

from tiered.consume_queue.file_queues import QUIET_NS, DirectoryChanges


class Clock:
    """A wall clock moved by hand."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def test_a_quiet_directory_is_listed_once(tmp_path: Path) -> None:
    changes = DirectoryChanges(Clock(os.stat(tmp_path).st_mtime_ns + QUIET_NS))
    assert [changes.has_changed(tmp_path) for _ in range(3)] == [True, False, False]


def test_an_added_entry_is_seen(tmp_path: Path) -> None:
    clock = Clock(os.stat(tmp_path).st_mtime_ns + QUIET_NS)
    changes = DirectoryChanges(clock)
    changes.has_changed(tmp_path)
    (tmp_path / "new").mkdir()
    os.utime(tmp_path, ns=(clock.now_ns, clock.now_ns))
    clock.now_ns += QUIET_NS
    assert [changes.has_changed(tmp_path) for _ in range(2)] == [True, False]


def test_one_that_changed_just_now_may_change_again_within_the_same_tick(tmp_path: Path) -> None:
    clock = Clock(os.stat(tmp_path).st_mtime_ns + 1)
    changes = DirectoryChanges(clock)
    assert [changes.has_changed(tmp_path) for _ in range(3)] == [True, True, True]
    clock.now_ns += QUIET_NS
    assert [changes.has_changed(tmp_path) for _ in range(2)] == [True, False]


def test_one_that_comes_goes_or_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "queue"
    clock = Clock(0)
    changes = DirectoryChanges(clock)
    assert [changes.has_changed(directory) for _ in range(2)] == [True, False]
    directory.mkdir()
    stamp = os.stat(directory).st_mtime_ns
    clock.now_ns = stamp + QUIET_NS
    assert [changes.has_changed(directory) for _ in range(2)] == [True, False]
    directory.rename(tmp_path / "old")
    assert changes.has_changed(directory)
    directory.mkdir()
    os.utime(directory, ns=(stamp, stamp))
    assert changes.has_changed(directory)
