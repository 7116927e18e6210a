"""What ``tests/data/upgrade/c922a86.tar.zst`` holds."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import zstandard

ROOT = Path("/tmp/tiered-c922a86")
"""Where it was made; the path is part of what is stored."""

QUEUES = {("one", 0): [*range(10), *range(15, 25)], ("other", 1): [*range(5)], ("%LMQ%light", 0): [*range(5)]}
"""Offsets of the archive ``reading`` by topic and queue id."""

PACK = Path(__file__).parent.parent / "data" / "upgrade" / "c922a86.tar.zst"


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked directory. Copy before changing anything."""
    root = tmp_path_factory.mktemp("c922a86")
    with (
        PACK.open("rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        archive.extractall(root, filter="data")
    return root


@pytest.fixture
def left(packed: Path, tmp_path: Path) -> Path:
    """A copy of everything."""
    return Path(shutil.copytree(packed, tmp_path / "c922a86"))
