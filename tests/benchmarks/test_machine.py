"""What is read from outside a process: its end, its time, its memory, and the page cache."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.machine import (
    copy_and_fsync,
    drop_from_page_cache,
    log_files,
    resident_bytes,
    run_child,
    warm,
)

MIB = 1024 * 1024


def test_a_child_is_measured_whole() -> None:
    code = "import time; x = bytearray(64 << 20); time.sleep(0.2); print('bye'); raise SystemExit(3)"
    run = run_child([sys.executable, "-c", code])
    assert run.exit_code == 3
    assert run.output == "bye\n"
    assert run.wall_s >= 0.2
    assert 64 * MIB < run.peak_rss_bytes < 256 * MIB
    assert run.rss_samples


def test_the_copy_takes_the_log_and_nothing_behind_it(tmp_path: Path) -> None:
    log = tmp_path / "store" / "commitlog"
    log.mkdir(parents=True)
    (log / f"{0:020d}").write_bytes(b"a" * 3 * MIB)
    (log / f"{3 * MIB:020d}").write_bytes(b"b" * 3 * MIB)
    (log / "notes.txt").write_bytes(b"")
    assert len(log_files(tmp_path / "store")) == 2
    wall_s, cpu_s = copy_and_fsync(tmp_path / "store", tmp_path / "copy", 5 * MIB)
    assert wall_s > 0
    assert cpu_s >= 0
    assert not (tmp_path / "copy").exists()


def test_warm_pages_are_resident(tmp_path: Path) -> None:
    log = tmp_path / "store" / "commitlog"
    log.mkdir(parents=True)
    path = log / f"{0:020d}"
    path.write_bytes(b"x" * MIB)
    drop_from_page_cache([path])
    dropped = resident_bytes([path])
    warm(tmp_path / "store")
    assert resident_bytes([path]) == MIB
    assert dropped <= MIB
    empty = tmp_path / "empty"
    empty.touch()
    assert resident_bytes([empty]) == 0
