"""A commitlog directory whose disk is not mounted: nothing is taken for deleted or replaced."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, backfill
from tests.sweeps import sweep
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity, OffloadResult


def state_of(memory: MemoryStore) -> CatalogState:
    return load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)))


def backfill_from(store: Path, dirs: Sequence[Path], memory: MemoryStore) -> OffloadResult:
    with open_broker_store(store, commitlog_dirs=dirs) as broker_store:
        return Offloader(
            broker_store,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "backfill"),
            SMALL,
            topic_filter=FILTER,
            offsets_source=no_offsets,
        ).run(threading.Event(), follow=False)


def test_an_empty_commitlog_directory_is_no_other_log(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("B") / "store", store)
    memory = MemoryStore("memory://empty")
    backfill(store, memory)
    before = state_of(memory)
    (store / "commitlog").rename(tmp_path / "the disk")
    (store / "commitlog").mkdir()
    with pytest.raises(UnavailableError, match="commitlog contains no commitlog file"):
        backfill(store, memory)
    after = state_of(memory)
    assert after.version == before.version

    (store / "commitlog").rmdir()
    (tmp_path / "the disk").rename(store / "commitlog")
    assert backfill(store, memory).messages == 0


@pytest.mark.parametrize("is_begun", sweep([True, False], fast=[True]))
def test_one_of_two_directories_without_its_disk_makes_no_gap(
    is_begun: bool, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("A") / "store", store)
    files = sorted((store / "commitlog").iterdir())
    assert len(files) > 4
    dirs = [tmp_path / "d1", tmp_path / "d2"]
    for directory in dirs:
        directory.mkdir()
    for number, file in enumerate(files):
        file.rename(dirs[number % 2] / file.name)
    memory = MemoryStore(f"memory://two-{is_begun}")
    if is_begun:
        backfill_from(store, dirs, memory)
    dirs[1].rename(tmp_path / "the disk")
    dirs[1].mkdir()
    with pytest.raises(UnavailableError, match="d2 contains no commitlog file"):
        backfill_from(store, dirs, memory)

    dirs[1].rmdir()
    (tmp_path / "the disk").rename(dirs[1])
    result = backfill_from(store, dirs, memory)
    assert (result.lost, result.damaged) == (0, 0)
    single = MemoryStore(f"memory://single-{is_begun}")
    backfill(real_store("A") / "store", single)
    archive, expected = state_of(memory), state_of(single)
    assert archive.cursor == expected.cursor
    assert {key: row.tobytes() for key, row in archive.queues()} == {
        key: row.tobytes() for key, row in expected.queues()
    }


def test_the_directory_of_the_newest_file_alone_without_its_disk_is_no_shorter_log(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("B") / "store", store)
    newest = sorted((store / "commitlog").iterdir())[-1]
    dirs = [store / "commitlog", tmp_path / "d2"]
    dirs[1].mkdir()
    newest.rename(dirs[1] / newest.name)
    memory = MemoryStore("memory://newest")
    backfill_from(store, dirs, memory)
    version = state_of(memory).version
    (dirs[1] / newest.name).rename(tmp_path / newest.name)
    with pytest.raises(UnavailableError, match="d2 contains no commitlog file"):
        backfill_from(store, dirs, memory)
    assert state_of(memory).version == version


def test_a_missing_file_among_others_is_a_gap_all_the_same(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("A") / "store", store)
    sorted((store / "commitlog").iterdir())[2].unlink()
    assert backfill(store, MemoryStore("memory://gap")).lost == 1
