"""A backfill leaves few sequences of pages: each is a page more to read for each queue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.offloading import backfill
from tests.spark.jobs.backfill_runs import own_archive
from tiered.archive.verify import verify_archive
from tiered.catalog import catalog_writer
from tiered.catalog.catalog_reader import load
from tiered.catalog.page_merge import sequences_of
from tiered.catalog.writer_limits import CatalogLimits
from tiered.object_store.file import FileStore

LIMITS = {"root_runs_max": 8, "spill_runs": 20, "page_runs_max": 16, "merge_sequences": 2}


def test_spills_are_merged_at_the_end(
    real_store: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_writer, "CatalogLimits", partial(CatalogLimits, merge_spills=1000, **LIMITS))
    backfill(real_store("A") / "store", FileStore(tmp_path))
    archive = own_archive(tmp_path)
    found = sequences_of(load(archive).pages)
    assert len(found) == 1
    assert verify_archive(archive, depth="full").anomalies == []
