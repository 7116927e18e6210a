"""Compilation: portable code without PCLMULQDQ, and a cache that sees changes in any kernel file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(code: str, *, cwd: Path, cache: Path, **environment: str) -> str:
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(cwd), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=variables, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


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


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    """A package of two kernels, one of which calls the other in another file."""
    kernels = tmp_path / "tiered" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "__init__.py").touch()
    (kernels.parent / "__init__.py").touch()
    shutil.copy(ROOT / "tiered" / "kernels" / "jit.py", kernels)
    (kernels / "callee.py").write_text(
        "from tiered.kernels.jit import kernel\n@kernel\ndef one(x):\n    return x + 1\n"
    )
    (kernels / "caller.py").write_text(
        "from tiered.kernels.jit import kernel\nfrom tiered.kernels.callee import one\n"
        "@kernel\ndef twice(x):\n    return one(one(x))\n"
    )
    return tmp_path


CALL = "from tiered.kernels.caller import twice; print(twice(1))"
HITS = "; print(sum(twice.wrapped().stats.cache_hits.values()))"


def test_a_change_in_another_kernel_file_voids_the_cache(package_copy: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run(CALL + HITS, cwd=package_copy, cache=cache).split() == ["3", "0"]
    assert run(CALL + HITS, cwd=package_copy, cache=cache).split() == ["3", "1"]
    callee = package_copy / "tiered" / "kernels" / "callee.py"
    callee.write_text(callee.read_text().replace("x + 1", "x + 10"))
    assert run(CALL + HITS, cwd=package_copy, cache=cache).split() == ["21", "0"]
    assert run(CALL + HITS, cwd=package_copy, cache=cache).split() == ["21", "1"]


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


def test_kernels_run_without_a_home_directory(package_copy: Path) -> None:
    no_home = "import os, pwd; os.environ.pop('HOME', None); pwd.getpwuid = lambda uid: {}[uid]; "
    for hits in "01":
        printed = run(no_home + CALL + HITS, cwd=package_copy, cache=package_copy, NUMBA_CACHE_DIR="")
        assert printed.split() == ["3", hits]


def test_the_embedding_process_keeps_its_own_cache_directory(package_copy: Path, tmp_path: Path) -> None:
    code = CALL + "; import numba; print(numba.config.CACHE_DIR)"
    assert run(code, cwd=package_copy, cache=tmp_path).split() == ["3", str(tmp_path)]
