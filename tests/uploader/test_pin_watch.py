"""A disk that fills up while no writer can start: pins go all the same.

A writer that ends leaves no pin on what is archived: it would stay until the next start.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, following
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.pins import PinKeeper, PinLimits
from tiered.broker_store.retention import DiskUse
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.clock import Clock
from tiered.errors import FencedError, StoreFullError, TieredError
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import Body, ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import OffloadSettings
from uploader import offload
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity


class FullStore(MemoryStore):
    """Can be read; takes nothing until that is allowed."""

    is_full = True

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        if self.is_full:
            raise StoreFullError("no space left")
        super().put_if_absent(key, body, timeout_s=timeout_s)


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


def offloader_of(
    store: BrokerStore, archive: ObjectStore, disk: Disk, settings: OffloadSettings = SMALL
) -> Offloader:
    return Offloader(
        store,
        archive,
        OffloadIdentity(CLUSTER, BROKER, "mine", "run"),
        settings,
        topic_filter=FILTER,
        offsets_source=no_offsets,
        pins=disk.keeper,
    )


def test_a_standby_keeps_no_pin_on_a_full_disk(store: Path, tmp_path: Path) -> None:
    memory, disk = MemoryStore("memory://standby"), Disk(tmp_path)
    CatalogWriter(
        PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)),
        cluster=CLUSTER,
        broker=BROKER,
        instance="other",
        kind="run",
        clock=Clock(wall_ms=lambda: 1),
    ).claim()
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


def test_a_claim_that_the_archive_does_not_take_holds_no_pin_on_a_full_disk(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PIN_EVERY_MS", 20)
    disk, archive, stop = Disk(tmp_path), FullStore("memory://full"), threading.Event()
    with open_broker_store(store, pinned=disk.keeper.files) as broker_store:
        disk.keeper.step(broker_store.commit_log.files, 0)
        failed: list[TieredError] = []

        def run() -> None:
            try:
                offloader_of(broker_store, archive, disk).run(stop, follow=True)
            except TieredError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert disk.pins
            disk.used_ratio = 0.73
            deadline_s = time.monotonic() + 20
            while disk.pins and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert disk.pins == []
        finally:
            stop.set()
            archive.is_full = False
            thread.join()
    assert failed == []


def test_a_drain_that_the_archive_holds_up_holds_no_pin_on_a_full_disk(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload while the object store is away drains until that is back."""
    monkeypatch.setattr(offload, "PIN_EVERY_MS", 20)

    class DataRefused(FullStore):
        def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
            if "/catalog/" in key:
                MemoryStore.put_if_absent(self, key, body, timeout_s=timeout_s)
            else:
                super().put_if_absent(key, body, timeout_s=timeout_s)

    disk, archive, stop = Disk(tmp_path), DataRefused("memory://refused"), threading.Event()
    with open_broker_store(store, pinned=disk.keeper.files) as broker_store:
        offloader = offloader_of(broker_store, archive, disk)
        thread = threading.Thread(target=offloader.run, args=(stop,), kwargs={"follow": True})
        thread.start()
        try:
            deadline_s = time.monotonic() + 30
            while (
                (status := offloader.status()) is None or status.pins is None or status.read_phys == 0
            ) and time.monotonic() < deadline_s:
                time.sleep(0.01)
            stop.set()
            assert disk.pins, "of files that are not archived"
            disk.used_ratio = 0.73
            while disk.pins and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert disk.pins == []
            assert thread.is_alive(), "it still drains"
        finally:
            stop.set()
            archive.is_full = False
            thread.join()


FILE_BYTES = 4 << 20
"""Of the store's log."""


def test_archived_files_are_let_go(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(real_store("F") / "store", tmp_path / "store")
    pins = PinKeeper([tmp_path / "pins"], PinLimits(0.999, 0.9999))
    with open_broker_store(tmp_path / "store", pinned=pins.files) as store:
        offloader = Offloader(
            store,
            MemoryStore("memory://pins-at-the-end"),
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            replace(SMALL, batch_age_ms=100),
            topic_filter=FILTER,
            offsets_source=no_offsets,
            pins=pins,
        )
        with following(offloader) as reached:
            # The first file alone may be read and committed for a moment.
            reached(lambda status: status.pins and FILE_BYTES < status.committed_phys == status.read_phys)
        status = offloader.status()
    assert status is not None and status.committed_phys > FILE_BYTES, "more than the first file is archived"
    left = [int(path.name) for path in (tmp_path / "pins").iterdir() if path.name.isdigit()]
    assert all(begin + FILE_BYTES > status.committed_phys for begin in left), left


def test_files_that_live_a_shorter_time_than_a_cycle_are_archived_without_a_gap(tmp_path: Path) -> None:
    """The broker writes 1 MiB files, and deletes them about a second later, long before the first cycle of 5 s ends."""
    written = write_store(tmp_path / "all", StoreSpec(2, 4, 250, file_bytes=1 << 20), messages=50_000)
    files = [file.path for file in CommitLog([tmp_path / "all" / "commitlog"]).files]
    live = tmp_path / "store" / "commitlog"
    live.mkdir(parents=True)
    (live.parent / "lock").write_text("lock")
    memory, disk = MemoryStore("memory://short"), Disk(tmp_path)
    settings = replace(SMALL, batch_bytes=64 << 20, batch_age_ms=5_000)

    def write(path: Path) -> None:
        data = path.read_bytes()
        with (live / path.name).open("wb") as file:
            file.truncate(len(data))
            for at in range(0, len(data), 1 << 18):
                os.pwrite(file.fileno(), data[at : at + (1 << 18)], at)
                time.sleep(0.1)

    for path in files[:2]:
        write(path)
    with open_broker_store(live.parent, pinned=disk.keeper.files) as store:
        offloader = offloader_of(store, memory, disk, settings)
        with following(offloader) as reached:
            reached(lambda status: status.pins)
            for old, path in zip(files, files[2:], strict=False):
                write(path)
                (live / old.name).unlink()
            # The last file's end is read at the next look, half a second later where no broker runs.
            reached(lambda status: status.read_phys >= written.end_phys)
    state = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)))
    assert len(files) > 15 and not len(state.gaps) and int(state.table["row_count"].sum()) == 50_000
