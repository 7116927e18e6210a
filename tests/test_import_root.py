"""One import root: the wheel's names, modules of a user's beside it, and names that load when they are used."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rocketmq_tiered
import rocketmq_tiered.spark
from rocketmq_tiered.own_packages import NAMES

ROOT = Path(__file__).parent.parent
READ = (
    "import rocketmq_tiered; rocketmq_tiered.open; from rocketmq_tiered.spark import read; print('imported')"
)


def _run(directory: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Python in ``directory``, whose modules come first."""
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r}); {code}"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_the_wheel_installs_four_names() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["tiered", "uploader", "fetcher", "rocketmq_tiered"]


def test_modules_with_common_names_do_no_harm(tmp_path: Path) -> None:
    for name in ("pipeline", "server", "maintenance", "sidecar", "process", "cli", "page", "doctor", "spark"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the user was imported')\n")
    done = _run(tmp_path, READ)
    assert done.stdout == "imported\n", done.stderr


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_module_that_hides_a_package_is_one_error(name: str, is_loaded: bool, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("")
    done = _run(tmp_path, f"import {name}; {READ}" if is_loaded else READ)
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert (
        last == f"ImportError: {tmp_path}/{name}.py hides package {name} of rocketmq-tiered: rename that file"
    )


@pytest.mark.parametrize("package", [rocketmq_tiered, rocketmq_tiered.spark])
def test_every_public_name_loads(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert len(names) >= 19
    assert all(callable(getattr(package, name)) or getattr(package, name) for name in names)
    assert set(dir(package)) >= set(names), "a shell completes them"
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        package.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_types_and_the_version_are_for_users_too() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in NAMES)
    assert rocketmq_tiered.__version__[0].isdigit()


def test_spark_commands_without_pyspark_say_what_to_install(tmp_path: Path) -> None:
    code = "sys.modules['pyspark'] = None; from rocketmq_tiered.spark.cli import main"
    done = _run(tmp_path, code)
    assert (done.returncode, done.stderr) == (
        2,
        "tiered-spark: pyspark is not installed: pip install 'rocketmq-tiered[spark]'\n",
    )


def test_importing_the_root_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = "{'numpy', 'numba', 'pyspark'}"
    code = f"import rocketmq_tiered, rocketmq_tiered.spark; print(sorted({heavy} & set(sys.modules)))"
    assert _run(tmp_path, code).stdout == "[]\n"
