"""Is it in memory? Asked of the kernel: true answers to who may know, no answer to who may not."""

import errno
import os
import random
from pathlib import Path

import pytest

from fetcher.policy.broker_files import PageResidency, cached_pages
from fetcher.policy.read_policy import Residency
from tests.broker_store.page_cache import resident_bytes
from tests.broker_store.unprivileged import run_unprivileged
from tiered.errors import NotFoundError
from tiered.residency import PAGE_BYTES

PAGES = 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Pages 8 to 23 in the page cache, the others not."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(3).randbytes(PAGES * PAGE_BYTES))
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    if resident_bytes(path):
        pytest.skip("this file system does not let go of pages (tmpfs?)")
    os.pread(fd, 16 * PAGE_BYTES, 8 * PAGE_BYTES)
    os.close(fd)
    return path


def no_cachestat(_fd: int, _begin: int, _length: int) -> int:
    raise OSError(errno.ENOSYS, "as before Linux 6.5")


def has_cachestat(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return cached_pages(fd, 0, PAGE_BYTES) >= 0
    except OSError:
        return False
    finally:
        os.close(fd)


RANGES = [
    ([(8, 0, 24, 0)], Residency.RESIDENT),
    ([(8, 17, 23, 4000)], Residency.RESIDENT),
    ([(23, 4000, 24, 1)], Residency.COLD),
    ([(7, 4095, 8, 10)], Residency.COLD),
    ([(40, 0, 41, 0)], Residency.COLD),
    ([(9, 0, 10, 0), (12, 5, 12, 6)], Residency.RESIDENT),
    ([(9, 0, 10, 0), (30, 5, 30, 6)], Residency.COLD),
]


@pytest.mark.parametrize("is_old_kernel", [False, True])
def test_whole_ranges_are_resident_or_not(file: Path, is_old_kernel: bool) -> None:
    residency = PageResidency(no_cachestat) if is_old_kernel else PageResidency()
    for pages, expected in RANGES:
        ranges = [(a * PAGE_BYTES + b, c * PAGE_BYTES + d) for a, b, c, d in pages]
        assert residency.of(file, ranges) is expected, pages
    assert resident_bytes(file) == 16 * PAGE_BYTES, "asking loads nothing"


def test_the_kernel_is_queried_every_time(file: Path) -> None:
    residency = PageResidency()
    cold = [(40 * PAGE_BYTES, 41 * PAGE_BYTES)]
    assert residency.of(file, cold) is Residency.COLD
    with file.open("rb") as opened:
        opened.seek(40 * PAGE_BYTES)
        opened.read(PAGE_BYTES)
    assert residency.of(file, cold) is Residency.RESIDENT


@pytest.mark.parametrize("is_old_kernel", [False, True])
def test_another_user_learns_nothing_rather_than_a_lie(file: Path, is_old_kernel: bool) -> None:
    file.chmod(0o644)

    def ask() -> str:
        residency = PageResidency(no_cachestat) if is_old_kernel else PageResidency()
        answers = {residency.of(file, [(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)]) for page in (9, 40)}
        return ",".join(sorted(answer.value for answer in answers))

    answer = run_unprivileged(ask, file.parent)
    # Kernels from 6.5 to 6.13 give every user the truth by cachestat.
    assert answer == "unknown" or (not is_old_kernel and answer == "cold,resident")
    assert answer == "unknown" or has_cachestat(file)


def test_another_user_who_may_write_learns_the_truth(file: Path) -> None:
    file.chmod(0o666)

    def ask() -> str:
        residency = PageResidency(no_cachestat)
        return (
            residency.of(file, [(9 * PAGE_BYTES, 10 * PAGE_BYTES)]).value + residency.of(file, [(0, 1)]).value
        )

    assert run_unprivileged(ask, file.parent) == "residentcold"


def test_a_sandbox_that_forbids_the_call_leaves_mincore(file: Path) -> None:
    def forbidden(_fd: int, _begin: int, _length: int) -> int:
        raise OSError(errno.EPERM, "as under seccomp")

    assert PageResidency(forbidden).of(file, [(9 * PAGE_BYTES, 10 * PAGE_BYTES)]) is Residency.RESIDENT


def test_a_file_that_went_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="gone does not exist"):
        PageResidency().of(tmp_path / "gone", [(0, 1)])
