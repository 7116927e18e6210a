"""Every store a real broker wrote, archived and read back: byte-exact, counts equal, nothing left over.

A backfill leaves few sequences of pages: each is a page more to read for each queue.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.archive_check import STORES, check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.spark.jobs.backfill_runs import own_archive
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.catalog import catalog_writer
from tiered.catalog.catalog_reader import load
from tiered.catalog.page_merge import sequences_of
from tiered.catalog.writer_limits import CatalogLimits
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore


@pytest.mark.parametrize("name", sweep(STORES, fast=["C", "E", "F", "H2", "K"], rest="integration"))
def test_every_message_of_every_queue_comes_back_byte_exact(
    name: str, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = real_store(name)
    root = FileStore(tmp_path)
    first = backfill(directory / "store", root)
    assert check_against_truth(root, directory, name) > 400
    objects = [info.key for info in root.list("")]
    second = backfill(directory / "store", root)
    assert (second.messages, second.objects, second.commits) == (0, 0, 0)
    assert [info.key for info in root.list("")] == objects
    report = verify_archive(PrefixedStore(root, archive_prefix(CLUSTER, BROKER)), depth="full")
    assert report.anomalies == []
    assert report.leftovers == []
    assert first.messages > 1000


LIMITS = {"root_runs_max": 8, "spill_runs": 20, "page_runs_max": 16, "merge_sequences": 2}


def test_spills_are_merged_at_the_end(
    real_store: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_writer, "CatalogLimits", partial(CatalogLimits, merge_spills=1000, **LIMITS))
    backfill(real_store("A") / "store", FileStore(tmp_path))
    archive = own_archive(tmp_path)
    assert len(sequences_of(load(archive).pages)) == 1
    assert verify_archive(archive, depth="full").anomalies == []
