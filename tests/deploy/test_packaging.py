"""Every package is shipped: in the wheel, in the image, and checked by mypy."""

import re
import tomllib
from pathlib import Path

import pytest

import rocketmq_tiered

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]


def test_wheel_has_every_package() -> None:
    assert set(PROJECT["hatch"]["build"]["targets"]["wheel"]["packages"]) == PACKAGES


def test_mypy_and_ruff_have_every_package() -> None:
    assert set(PROJECT["mypy"]["packages"]) == PACKAGES
    assert set(PROJECT["ruff"]["lint"]["isort"]["known-first-party"]) >= PACKAGES


def test_image_has_every_package() -> None:
    context = (ROOT / ".dockerignore").read_text("utf-8").split()
    copied = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    for package in PACKAGES:
        assert f"!{package}" in context
        assert f"COPY {package} {package}" in copied


def test_public_names_exist_and_are_typed() -> None:
    assert all(hasattr(rocketmq_tiered, name) for name in rocketmq_tiered.__all__)
    assert (ROOT / "rocketmq_tiered" / "py.typed").exists()


def locked(name: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Version and hashes of each package in a lock file."""
    text = (ROOT / name).read_text("utf-8")
    entries = re.findall(r"^([\w.\[\]-]+)==([^\s;]+)((?:.|\n(?=\s))*)", text, re.MULTILINE)
    return {
        package: (version, frozenset(re.findall(r"--hash=sha256:(\w{64})", rest)))
        for package, version, rest in entries
    }


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("requirements*.lock")))
def test_every_locked_version_has_hashes(name: str) -> None:
    found = locked(name)
    assert found and all(hashes for _, hashes in found.values())


@pytest.mark.parametrize("name", ["requirements-runtime.lock", "requirements-build.lock"])
def test_small_locks_are_parts_of_the_large_one(name: str) -> None:
    """What is shipped is what is tested."""
    assert locked(name).items() <= locked("requirements.lock").items()


def test_build_backend_is_the_locked_one() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (version, _) = locked("requirements-build.lock")["hatchling"]
    assert document["build-system"]["requires"] == [f"hatchling=={version}"]
    assert document["dependency-groups"]["build"] == [f"hatchling=={version}"]


def test_nothing_is_installed_without_hashes() -> None:
    """In the image, by make, and by the package check: with hashes, or from files that are there."""
    commands = [
        line
        for name in ("Dockerfile", "Makefile", ".ci/package.py")
        for line in (ROOT / name).read_text("utf-8").splitlines()
        if re.search(r"pip\b.* (install|wheel) |run\(\*pip", line)
    ]
    assert len(commands) >= 8
    for command in commands:
        from_index = "--no-index" not in command and "--no-deps" not in command
        assert not from_index or "--require-hashes" in command, command
    image = (ROOT / "Dockerfile").read_text("utf-8")
    assert image.count("FROM ${BASE_IMAGE}") == 2
    assert re.search(r"^USER 3000:3000$", image, re.MULTILINE)
    assert "sha256:DIGEST" in image and not re.search(r"sha256:[0-9a-f]{8}", image), "digests are looked up"
