"""The disk cache: restarts, torn and damaged files, swapped files, bounds, a disk that refuses."""

import os
import random
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fastcrc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rocketmq_tiered
from fetcher.blocks.block_cache import BlockKey
from fetcher.blocks.disk_cache import DiskCache, directory_of
from tests.broker_store.unprivileged import UNPRIVILEGED_UID
from tests.end_to_end.offloading import SMALL, backfill
from tests.object_store.sealed_scene import ARCHIVE, key_file, sealing
from tests.sweeps import examples
from tiered.object_store.file import FileStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.sealed import LocalSeals
from tiered.settings.sections import FetchSettings, Settings

KEY = BlockKey("data/ab/topic/0/3/00000000000000000000-1-1.so", 5)
STORED = random.Random(5).randbytes(5000)


def _crc(stored: bytes) -> int:
    return int(fastcrc.crc32.iscsi(stored))


def _get(cache: DiskCache, key: BlockKey = KEY, stored: bytes = STORED) -> bytes | None:
    return cache.get(key, _crc(stored), len(stored))


def _file(directory: Path) -> Path:
    (found,) = directory.glob("*.block")
    return found


def test_what_was_put_is_there_after_a_restart(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "new" / "cache", 1 << 20)
    assert KEY not in cache and _get(cache) is None
    cache.put(KEY, memoryview(STORED))
    assert _get(cache) == STORED
    again = DiskCache(tmp_path / "new" / "cache", 1 << 20)
    assert KEY in again and _get(again) == STORED
    assert again.held_bytes == cache.held_bytes == 2 * 4096 > _file(tmp_path / "new" / "cache").stat().st_size
    assert again.counts.hits == 1 and again.counts.misses == 0


def test_blocks_of_an_encrypted_archive_are_sealed(tmp_path: Path) -> None:
    archive, ring = MemoryStore("memory://m"), key_file(tmp_path / "ring", "k1")
    sealing(archive, ring).keys(ARCHIVE).begin(())
    cache = DiskCache(tmp_path / "cache", 1 << 20, LocalSeals(sealing(archive, ring).keys(ARCHIVE)))
    cache.put(KEY, STORED)
    assert STORED[:64] not in _file(tmp_path / "cache").read_bytes()
    assert _get(cache) == STORED
    again = DiskCache(tmp_path / "cache", 1 << 20, LocalSeals(sealing(archive, ring).keys(ARCHIVE)))
    assert _get(again) == STORED and again.held_bytes == cache.held_bytes
    other = key_file(tmp_path / "other", "k1", seed=2)
    without = DiskCache(tmp_path / "cache", 1 << 20, LocalSeals(sealing(archive, other).keys(ARCHIVE)))
    assert _get(without) is None and without.counts.corrupt == 1


def test_no_other_user_reads_or_makes_blocks(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o755)
    DiskCache(tmp_path / "cache", 1 << 20).put(KEY, STORED)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert stat.S_IMODE(_file(tmp_path / "cache").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")
@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_a_block_that_another_user_may_have_written_is_dropped(tmp_path: Path, how: str) -> None:
    """Planted before the directory was closed: its checksum may be right, as anyone can compute one."""
    DiskCache(tmp_path, 1 << 20).put(KEY, STORED)
    path = _file(tmp_path)
    if how == "owner":
        os.chown(path, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
    elif how == "mode":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    cache = DiskCache(tmp_path, 1 << 20)
    assert KEY not in cache and _get(cache) is None
    assert not path.is_symlink() and not path.exists()


@pytest.mark.parametrize("keep", [0, 1, 20, 70, 71, 1000, -1])
def test_a_torn_file_is_a_miss_and_goes(tmp_path: Path, keep: int) -> None:
    DiskCache(tmp_path, 1 << 20).put(KEY, STORED)
    path = _file(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    cache = DiskCache(tmp_path, 1 << 20)
    assert _get(cache) is None
    assert cache.counts.corrupt == 1 and KEY not in cache and not path.exists()
    assert cache.held_bytes == 0
    cache.put(KEY, STORED)
    assert _get(cache) == STORED


@settings(max_examples=examples(300))
@given(st.integers(0), st.integers(1, 255))
def test_any_flipped_byte_is_found(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int
) -> None:
    directory = tmp_path_factory.mktemp("flip")
    DiskCache(directory, 1 << 20).put(KEY, STORED)
    path = _file(directory)
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= flip
    path.write_bytes(content)
    cache = DiskCache(directory, 1 << 20)
    assert _get(cache) is None and cache.counts.corrupt == 1


def test_a_longer_file_is_found(tmp_path: Path) -> None:
    DiskCache(tmp_path, 1 << 20).put(KEY, STORED)
    with _file(tmp_path).open("ab") as file:
        file.write(b"x")
    assert _get(DiskCache(tmp_path, 1 << 20)) is None


def test_files_of_two_queues_swapped_are_found_even_with_equal_bytes(tmp_path: Path) -> None:
    other = BlockKey("data/cd/other/0/0/00000000000000000000-1-2.so", 5)
    cache = DiskCache(tmp_path, 1 << 20)
    cache.put(KEY, STORED)
    (first,) = tmp_path.glob("*.block")
    cache.put(other, STORED)
    (second,) = set(tmp_path.glob("*.block")) - {first}
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    assert _get(cache) is None and _get(cache, other) is None
    assert cache.counts.corrupt == 2


def test_a_stale_file_whose_object_says_otherwise_is_found(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1 << 20)
    cache.put(KEY, STORED)
    assert cache.get(KEY, _crc(STORED) ^ 1, len(STORED)) is None
    assert cache.counts.corrupt == 1


def test_leftovers_of_a_crash_go_and_strangers_stay(tmp_path: Path) -> None:
    (tmp_path / "123-4.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    (tmp_path / "lost+found").mkdir()
    assert len(DiskCache(tmp_path, 0)) == 0
    assert sorted(os.listdir(tmp_path)) == ["lost+found", "notes.txt"]


def test_the_bound_holds_and_the_longest_unused_go_first(tmp_path: Path) -> None:
    keys = [BlockKey("data/x.so", number) for number in range(10)]
    cache = DiskCache(tmp_path, 3 * 4096 + 1)
    for key in keys[:3]:
        cache.put(key, STORED[:1000])
    assert _get(cache, keys[0], STORED[:1000]) is not None
    cache.put(keys[3], STORED[:1000])
    assert [key.block for key in keys if key in cache] == [0, 2, 3]
    assert cache.held_bytes == 3 * 4096
    assert len(os.listdir(tmp_path)) == 3
    cache = DiskCache(tmp_path, 4096)
    assert [key.block for key in keys if key in cache] == [3]
    assert len(os.listdir(tmp_path)) == 1
    cache.put(keys[5], STORED)  # larger than the whole cache
    assert keys[5] not in cache and keys[3] in cache
    assert len(DiskCache(tmp_path, 10)) == 0 and os.listdir(tmp_path) == []


def test_small_blocks_keep_to_the_bound_of_the_disk(tmp_path: Path) -> None:
    """A disk gives out whole pages: LMQs have blocks of a hundred bytes."""
    cache = DiskCache(tmp_path, 1 << 20)
    for number in range(600):
        cache.put(BlockKey("data/x.so", number), STORED[:100])
    taken_bytes = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert (1 << 20) - 4096 <= cache.held_bytes <= 1 << 20
    assert taken_bytes <= cache.held_bytes
    again = DiskCache(tmp_path, 1 << 19)
    assert (len(again), again.held_bytes) == (128, 1 << 19)


def test_a_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1 << 20)
    cache.put(KEY, STORED)
    _file(tmp_path).unlink()
    assert _get(cache) is None
    assert cache.counts.failed == 1 and KEY not in cache


def test_a_disk_that_refuses_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path, 1 << 20)

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device", source)

    monkeypatch.setattr(os, "rename", full)
    cache.put(KEY, STORED)
    assert cache.counts.failed == 1 and KEY not in cache and os.listdir(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setattr(os, "writev", lambda descriptor, pieces: 7)  # a disk that takes half
    cache.put(KEY, STORED)
    assert cache.counts.failed == 2 and KEY not in cache and os.listdir(tmp_path) == []


def test_archives_of_the_same_names_share_no_directory(
    tmp_path: Path, real_store: Callable[[str], Path]
) -> None:
    """Their keys are alike: in one directory each would push the other's blocks out."""
    settings = Settings(fetch=FetchSettings(disk_cache_path=str(tmp_path / "cache")))
    bodies = []
    for name, batch_bytes in (("one", 1 << 20), ("two", 4 << 20)):
        place = tmp_path / name
        backfill(
            real_store("F") / "store", FileStore(place), settings=replace(SMALL, batch_bytes=batch_bytes)
        )
        for url in (f"file://{place}", f"file://{place}/"):
            with rocketmq_tiered.open(url, settings=settings) as archive:
                topic = archive.topics()[0]
                bodies.append([message.body for message in archive.queue(topic, 0).messages()])
                assert archive.access.source.statistics().corrupt_disk == 0
                if url.endswith("/"):
                    assert archive.access.source.statistics().disk_hits > 0
    assert bodies[0] and all(other == bodies[0] for other in bodies)
    directories = {path.parent for path in (tmp_path / "cache").rglob("*.block")}
    assert len(directories) == 2


def test_the_directory_is_the_place_s(tmp_path: Path) -> None:
    places = [("s3://a/x", ""), ("s3://a/y", ""), ("s3://a/x", "http://127.0.0.1:9000"), ("file:///a/x", "")]
    assert len({directory_of(tmp_path, *place) for place in places}) == len(places)
    assert directory_of(tmp_path, "s3://a/x/", "http://h/") == directory_of(tmp_path, "s3://a/x", "http://h")
