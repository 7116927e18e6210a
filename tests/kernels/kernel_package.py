"""A small package of kernels, and code that runs in a process of its own with a given cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CALL = "from tiered.kernels.caller import twice; print(twice(1))"
HITS = "; print(sum(twice.wrapped().stats.cache_hits.values()))"


def run(code: str, *, cwd: Path, cache: Path, **environment: str) -> str:
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(cwd), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=variables, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    """A package of two kernels, one of which calls the other in another file."""
    kernels = tmp_path / "tiered" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "__init__.py").touch()
    (kernels.parent / "__init__.py").touch()
    for name in ("kernels/jit.py", "errors.py", "private_directory.py"):
        shutil.copy(ROOT / "tiered" / name, tmp_path / "tiered" / name)
    (kernels / "callee.py").write_text(
        "from tiered.kernels.jit import kernel\n@kernel\ndef one(x):\n    return x + 1\n"
    )
    (kernels / "caller.py").write_text(
        "from tiered.kernels.jit import kernel\nfrom tiered.kernels.callee import one\n"
        "@kernel\ndef twice(x):\n    return one(one(x))\n"
    )
    return tmp_path
