"""A disk that fills up while no writer can start: pins go all the same."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tiered.broker_store.pins import PinKeeper, PinLimits
from tiered.broker_store.retention import DiskUse
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.errors import FencedError
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity


class Disk:
    """Its use is set by hand."""

    def __init__(self, root: Path) -> None:
        self.used_ratio = 0.1
        self.directory = root / "pins"
        self.keeper = PinKeeper([self.directory], PinLimits(), lambda _: DiskUse(self.used_ratio, 1 << 30))

    @property
    def pins(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def store(real_store: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(real_store("F") / "store", tmp_path / "store"))


def offloader_of(store: BrokerStore, archive: ObjectStore, disk: Disk) -> Offloader:
    return Offloader(
        store, archive, OffloadIdentity(CLUSTER, BROKER, "mine", "run"), SMALL,
        topic_filter=FILTER, offsets_source=no_offsets, pins=disk.keeper,
    )  # fmt: skip


def test_a_standby_keeps_no_pin_on_a_full_disk(store: Path, tmp_path: Path) -> None:
    memory, disk = MemoryStore("memory://standby"), Disk(tmp_path)
    CatalogWriter(
        PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)),
        cluster=CLUSTER, broker=BROKER, instance="other", kind="run", clock_ms=lambda: 1,
    ).claim()  # fmt: skip
    with open_broker_store(store, pinned=disk.keeper.files) as broker_store:
        disk.keeper.step(broker_store.commit_log.files, 0)
        pinned = disk.pins
        assert len(pinned) > 1
        with pytest.raises(FencedError):
            offloader_of(broker_store, memory, disk).run(threading.Event(), follow=True)
        assert disk.pins == pinned, "as long as there is room"
        disk.used_ratio = 0.73
        with pytest.raises(FencedError):
            offloader_of(broker_store, memory, disk).run(threading.Event(), follow=True)
        assert disk.pins == []
