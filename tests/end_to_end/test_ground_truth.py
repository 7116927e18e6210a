"""Every store a real broker wrote, archived and read back: byte-exact, counts equal, nothing left over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.archive_check import STORES, check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
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
