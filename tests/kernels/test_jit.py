"""Compilation: portable code without PCLMULQDQ, and a cache that sees changes in any kernel file."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker_store.unprivileged import run_unprivileged
from tests.kernels.kernel_package import CALL, HITS, ROOT, package_copy, run
from tiered.kernels import jit

__all__ = ["package_copy"]


def test_crc32_without_carryless_multiplication(tmp_path: Path) -> None:
    code = """
import zlib
import numpy as np
from tiered.kernels.checksums import crc32
data = bytes(range(256)) * 5
array = np.frombuffer(data, np.uint8)
assert crc32(array.ctypes.data, 3, 1200) == zlib.crc32(data[3:1203])
print("same")
"""
    environment = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert run(code, cwd=ROOT, cache=tmp_path, **environment) == "same"


@pytest.mark.integration
def test_a_change_in_another_kernel_file_voids_the_cache(package_copy: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run(CALL + HITS, cwd=package_copy, cache=cache).split() == ["3", "0"]
    assert run(CALL + HITS, cwd=package_copy, cache=cache).split() == ["3", "1"]
    callee = package_copy / "tiered" / "kernels" / "callee.py"
    callee.write_text(callee.read_text().replace("x + 1", "x + 10"))
    assert run(CALL + HITS, cwd=package_copy, cache=cache).split() == ["21", "0"]
    assert run(CALL + HITS, cwd=package_copy, cache=cache).split() == ["21", "1"]


@pytest.mark.integration
def test_a_process_whose_files_are_replaced_does_not_cache_old_code_as_new(
    package_copy: Path, tmp_path: Path
) -> None:
    """An upgrade in place: the process has imported the old files and compiles after they are replaced."""
    cache = tmp_path / "cache"
    replace = (
        "import pathlib, tiered.kernels.callee as c; path = pathlib.Path(c.__file__); "
        "path.write_text(path.read_text().replace('x + 1', 'x + 10')); "
    )
    code = f"from tiered.kernels.caller import twice; {replace} print(twice(1))"
    assert run(code, cwd=package_copy, cache=cache) == "3"
    assert run(CALL + HITS, cwd=package_copy, cache=cache).split() == ["21", "0"]


def test_kernels_run_where_no_directory_is_writable(package_copy: Path) -> None:
    code = CALL + "; print(type(twice.wrapped()._cache).__name__)"
    assert run(code, cwd=package_copy, cache=Path("/dev/null")).split() == ["3", "NullCache"]


@pytest.mark.integration
def test_kernels_run_without_a_home_directory(package_copy: Path) -> None:
    no_home = "import os, pwd; os.environ.pop('HOME', None); pwd.getpwuid = lambda uid: {}[uid]; "
    for hits in "01":
        printed = run(no_home + CALL + HITS, cwd=package_copy, cache=package_copy, NUMBA_CACHE_DIR="")
        assert printed.split() == ["3", hits]


def test_the_embedding_process_keeps_its_own_cache_directory(package_copy: Path, tmp_path: Path) -> None:
    code = CALL + "; import numba; print(numba.config.CACHE_DIR)"
    assert run(code, cwd=package_copy, cache=tmp_path).split() == ["3", str(tmp_path)]


class Planted:
    """Unpickling it makes the file ``marker``."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return open, (str(self._marker), "w")


@pytest.mark.integration
def test_compiled_code_that_another_user_has_altered_does_not_run(package_copy: Path, tmp_path: Path) -> None:
    """numba unpickles what it has cached. A directory in which every user writes is used by several services."""
    cache, marker = tmp_path / "cache", tmp_path / "marker"
    cache.mkdir()
    run(CALL, cwd=package_copy, cache=cache)
    indexes = list(cache.rglob("*.nbi"))
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)

    def work() -> str:
        for index in indexes:
            index.unlink()
            index.write_bytes(pickle.dumps(Planted(marker)))
        return "planted"

    assert run_unprivileged(work, tmp_path) == "planted"
    done = subprocess.run(
        [sys.executable, "-c", CALL],
        cwd=package_copy,
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(package_copy)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert not marker.exists() and done.stdout.split() == ["3"]
    assert "kernels are compiled in every process" in done.stderr and f"chmod 700 {cache}" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")
@pytest.mark.parametrize("how", ["made first", "file of another user", "file for all", "parent", "link"])
def test_a_cache_that_another_user_may_have_filled_is_not_used(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = jit._cache_directory.__wrapped__
    tmp_path.chmod(0o1777)  # as /tmp
    directory = Path(cached(str(tmp_path)))
    assert directory.parent == tmp_path and directory.stat().st_mode & 0o777 == 0o700
    (directory / "kernels_1").mkdir(0o755)
    (directory / "kernels_1" / "scan.nbi").touch(0o664)
    assert cached(str(tmp_path)) == str(directory) and not caplog.records
    if how == "made first":
        os.chown(directory, 65534, 65534)
    elif how == "file of another user":
        os.chown(directory / "kernels_1" / "scan.nbi", 65534, 65534)
    elif how == "file for all":
        (directory / "kernels_1" / "scan.nbi").chmod(0o666)
    elif how == "parent":
        tmp_path.chmod(0o777)
    else:
        directory.rename(tmp_path / "elsewhere")
        directory.symlink_to(tmp_path / "elsewhere")
        os.lchown(directory, 65534, 65534)
    assert cached(str(tmp_path)) == ""
    assert str(tmp_path) in caplog.text and "NUMBA_CACHE_DIR" in caplog.text
