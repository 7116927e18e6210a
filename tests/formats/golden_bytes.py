"""Comparison of golden files with what is written today."""

from pathlib import Path

import pytest
import zstandard

GOLDEN_ZSTD = (1, 5, 7)
"""The library that compressed the golden files."""


def needs_golden_zstd() -> None:
    """Skip the test if another zstd library would compress to other bytes."""
    if zstandard.ZSTD_VERSION != GOLDEN_ZSTD:
        pytest.skip(f"golden files were compressed by zstd {GOLDEN_ZSTD}, this is {zstandard.ZSTD_VERSION}")


def assert_same_files(made: Path, golden: Path) -> None:
    """Both directories hold the same files with the same bytes."""
    new, old = bytes_below(made), bytes_below(golden)
    assert sorted(new) == sorted(old)
    assert [name for name in old if new[name] != old[name]] == []


def bytes_below(directory: Path) -> dict[str, bytes]:
    """Content of every file below ``directory`` by its relative path."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
