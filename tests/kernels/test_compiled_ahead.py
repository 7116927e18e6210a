"""Kernels compiled into the installation: used where nothing is writable, refused where another user can write."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels.kernel_package import CALL, package_copy, run

__all__ = ["package_copy"]

AHEAD = """
from tiered.kernels import jit
with jit.compiled_ahead():
    from tiered.kernels.caller import twice
    twice(1)
"""
COMPILES = """
import numba.core.event as event
class Count(event.Listener):
    started = 0
    def on_start(self, event): self.started += 1
    def on_end(self, event): pass
count = Count()
event.register("numba:compile", count)
"""


@pytest.mark.integration
def test_no_process_compiles_what_is_compiled_ahead(package_copy: Path, tmp_path: Path) -> None:
    code = COMPILES + CALL + "; print(count.started)"
    nowhere = Path("/dev/null")
    assert run(code, cwd=package_copy, cache=nowhere).split() == ["3", "2"]
    run(AHEAD, cwd=package_copy, cache=nowhere)
    assert run(code, cwd=package_copy, cache=nowhere).split() == ["3", "0"]
    (ahead,) = (package_copy / "tiered" / "kernels" / "__pycache__").glob("ahead-*")
    modes = {path.stat().st_mode & 0o777 for path in ahead.rglob("*") if path.is_file()}
    assert modes == {0o644}, "every user may read them"
    other = run(
        code, cwd=package_copy, cache=tmp_path / "own", NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=""
    )
    assert other.split() == ["3", "2"], "another processor compiles for itself"
    other = run(
        code, cwd=package_copy, cache=tmp_path / "own", NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=""
    )
    assert other.split() == ["3", "0"], "and caches it"
    assert run(code, cwd=package_copy, cache=tmp_path / "own2").split() == ["3", "0"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")
@pytest.mark.integration
def test_kernels_that_another_user_can_write_are_not_used(package_copy: Path) -> None:
    run(AHEAD, cwd=package_copy, cache=Path("/dev/null"))
    (ahead,) = (package_copy / "tiered" / "kernels" / "__pycache__").glob("ahead-*")
    ahead.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", COMPILES + CALL + "; print(count.started)"],
        cwd=package_copy,
        env={**os.environ, "NUMBA_CACHE_DIR": "/dev/null", "PYTHONPATH": str(package_copy)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["3", "2"]
    assert "not used" in done.stderr and f"chmod 700 {ahead}" in done.stderr


@pytest.mark.integration
def test_no_verb_compiles_after_the_installation(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    archive, store, restored = f"file://{tmp_path}/a", real_store("F") / "store", tmp_path / "restored"
    name = ("--cluster", "FxCluster", "--broker", "fx-a")
    for command in (
        ("backfill", store, archive, *name),
        ("cat", archive, "--all"),
        ("export", archive, f"file://{tmp_path}/parquet"),
        ("sql", archive, "select max(body), max(keys) from t_k_one where tags = 'TagA'"),
        ("restore", archive, restored),
        ("consumequeue", "build", restored, "--to", "rocksdb"),
        ("backfill", restored, f"file://{tmp_path}/b", *name),
        ("repair", archive, "--store", store),
        ("verify", archive, "--full"),
    ):
        done = subprocess.run(
            [Path(sys.executable).parent / "tiered", *map(str, command)],
            env={**os.environ, "NUMBA_CACHE_DIR": "/dev/null"},
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "as no cache has them" not in done.stderr, command
