"""Reading leaves the page cache as it was: hot pages stay, cold ones go."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.broker_store.page_cache import evict, resident_bytes
from tests.broker_store.unprivileged import run_unprivileged
from tiered.errors import NotFoundError
from tiered.residency import (
    NOWAIT_STRIDE_BYTES,
    PAGE_BYTES,
    ColdReadFile,
    ResidencyProbe,
    ResidentPages,
)

PAGES = 512
SIZE = PAGES * PAGE_BYTES


@pytest.fixture
def cold_file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(random.Random(7).randbytes(SIZE))
    evict(path)
    if resident_bytes(path):
        pytest.skip("this file system does not let go of pages (tmpfs?)")
    return path


def warm(path: Path, first: int, pages: int) -> None:
    """Bring exactly these pages in, as the broker's own reading would."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, pages * PAGE_BYTES, first * PAGE_BYTES)
    os.close(fd)


def resident(path: Path) -> list[bool]:
    fd = os.open(path, os.O_RDONLY)
    pages = ResidentPages(fd, os.fstat(fd).st_size)
    found = pages.query(0, SIZE)
    pages.close()
    os.close(fd)
    return [bool(page) for page in found]


def read_through(path: Path, chunk: int, probe: ResidencyProbe | None = None) -> bytes:
    data = bytearray(path.stat().st_size)
    with ColdReadFile(path, probe=probe) as file:
        position = 0
        while position < len(data):
            position += file.read_into(memoryview(data)[position : position + chunk], position)
    return bytes(data)


@pytest.mark.parametrize("chunk", [SIZE, 64 * 1024, 10_000, 3 * PAGE_BYTES + 1])
def test_hot_pages_stay_and_cold_ones_go(cold_file: Path, chunk: int) -> None:
    for first, pages in ((0, 3), (100, 40), (300, 1), (PAGES - 2, 2)):
        warm(cold_file, first, pages)
    before = resident(cold_file)
    assert 40 < sum(before) < PAGES // 2
    assert read_through(cold_file, chunk) == random.Random(7).randbytes(SIZE)
    assert resident(cold_file) == before


def test_pages_that_the_broker_has_mapped_stay(cold_file: Path) -> None:
    mapped = np.memmap(cold_file, np.uint8, "r")
    with ColdReadFile(cold_file) as file:
        data = bytearray(SIZE)
        # The broker touches a page while we read: mapped pages are not the kernel's to drop.
        touched = int(mapped[200 * PAGE_BYTES])
        file.read_into(memoryview(data), 0)
        assert data[200 * PAGE_BYTES] == touched
    assert resident(cold_file)[200]


def test_last_page_of_an_odd_size_goes_too(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.write_bytes(b"y" * (10 * PAGE_BYTES + 123))
    evict(path)
    assert read_through(path, 5000) == b"y" * (10 * PAGE_BYTES + 123)
    assert resident_bytes(path) == 0


TRIES = 5
"""On a busy machine the kernel reclaims pages, or lets go of dropped ones late, whatever we do."""


def assert_leaves_pages(path: Path, first: int, pages: int, read: Callable[[], object]) -> None:
    """``read`` leaves exactly the warm pages warm, at the latest when nothing else touches the page cache."""
    for _ in range(TRIES):
        evict(path)
        warm(path, first, pages)
        before = resident(path)
        read()
        if resident(path) == before and sum(before) >= pages:
            return
    assert resident(path) == before


def test_without_mincore_strides_are_kept_or_dropped(cold_file: Path) -> None:
    stride = NOWAIT_STRIDE_BYTES // PAGE_BYTES

    def read() -> None:
        assert read_through(cold_file, 100_000, ResidencyProbe.NOWAIT) == random.Random(7).randbytes(SIZE)

    assert_leaves_pages(cold_file, 4 * stride, 8 * stride, read)


def test_who_does_not_own_the_file_does_not_trust_mincore(cold_file: Path) -> None:
    cold_file.chmod(0o644)
    cold_file.parent.chmod(0o755)

    def read() -> str:
        with ColdReadFile(cold_file) as file:
            probe = file.probe
        read_through(cold_file, 64 * 1024)
        return probe.value

    def read_as_another() -> None:
        assert run_unprivileged(read, cold_file.parent) == "nowait"

    assert_leaves_pages(cold_file, 64, 64, read_as_another)


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with ColdReadFile(tmp_path / "empty") as file:
        assert file.read_into(memoryview(bytearray(10)), 0) == 0


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing does not exist"):
        ColdReadFile(tmp_path / "nothing")
