"""Blocks that c922a86 cached on disk are read from there."""

from __future__ import annotations

from pathlib import Path

import rocketmq_tiered
from fetcher.blocks.disk_cache import directory_of
from tests.upgrade.left_behind import QUEUES, ROOT
from tiered.settings.sections import FetchSettings, Settings


def test_every_block_is_read_from_the_disk(left: Path) -> None:
    root = left / "reading" / "disk" / "cluster" / "broker"
    before = directory_of(root, f"file://{ROOT}/reading/archive/cluster/broker", "")
    url = (left / "reading" / "archive").as_uri()
    files = {path.name: path.read_bytes() for path in before.iterdir()}
    assert len(files) == 6
    before.rename(directory_of(root, f"{url}/cluster/broker", ""))
    settings = Settings(fetch=FetchSettings(disk_cache_path=str(left / "reading" / "disk")))
    with rocketmq_tiered.open(url, settings=settings) as archive:
        for (topic, queue_id), offsets in QUEUES.items():
            found = [message.queue_offset for message in archive.queue(topic, queue_id).messages()]
            assert found == offsets
        counts = archive.access.source.statistics()
    assert (counts.disk_hits, counts.disk_misses, counts.corrupt_disk) == (len(files), 0, 0)


def test_files_written_today_are_the_same(left: Path, tmp_path: Path) -> None:
    """An older version may run again: it must find what is written now."""
    settings = Settings(fetch=FetchSettings(disk_cache_path=str(tmp_path / "disk")))
    url = (left / "reading" / "archive").as_uri()
    with rocketmq_tiered.open(url, settings=settings) as archive:
        for topic, queue_id in QUEUES:
            assert list(archive.queue(topic, queue_id).messages())
    new, old = (
        {path.name: path.read_bytes() for path in root.rglob("*.block")}
        for root in (tmp_path / "disk", left / "reading" / "disk")
    )
    assert new == old
