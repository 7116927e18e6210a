"""Every package is shipped: in the wheel, in the image, and checked by mypy."""

from __future__ import annotations

import tomllib
from pathlib import Path

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
