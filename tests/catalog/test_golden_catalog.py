"""Commits of every kind, roots and pages written today have the bytes of the golden catalog, which reads back."""

from pathlib import Path

from tests.catalog.golden_catalog import DIRECTORY, write
from tests.formats.golden_bytes import assert_same_files, needs_golden_zstd
from tiered.catalog.catalog_reader import load, read_commit, refresh
from tiered.catalog.commit import describe
from tiered.catalog.state import CatalogState
from tiered.object_store.file import FileStore


def test_catalog_objects_written_today_have_the_golden_bytes(tmp_path: Path) -> None:
    needs_golden_zstd()
    write(tmp_path)
    assert_same_files(tmp_path, DIRECTORY)


def test_the_head_of_the_golden_catalog_is_the_replay_of_its_commits() -> None:
    store = FileStore(DIRECTORY)
    head = load(store)
    kinds = {read_commit(store, version).draft.kind for version in range(1, head.version + 1)}
    assert kinds == {"claim", "append", "log_history", "maintenance", "release"}
    assert describe(refresh(store, CatalogState())) == describe(head)
