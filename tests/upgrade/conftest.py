"""What processes of commit c922a86 left on disk when they were killed; see ``tests/data/upgrade/make_c922a86.py``."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import zstandard

from tests.pipeline.conftest import spark

__all__ = ["spark"]

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
