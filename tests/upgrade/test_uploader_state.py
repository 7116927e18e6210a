"""A sidecar killed under c922a86 continues: identity, marker of the archive, pinned files of the log."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.process.archive_marker import ArchiveMarker
from rocketmq_tiered.process.instance import StateDirectory
from rocketmq_tiered.process.uploader_job import ProcessPins, UploaderJob, Writer
from tests.archive.queue_reader import QueueReader
from tests.upgrade.left_behind import ROOT
from tiered.catalog.catalog_reader import load
from tiered.errors import FencedError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.formats.record import decode_record
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.sections import Settings

MESSAGES = 300
"""In each of the two queues; 100 were archived."""


def settings_of(root: Path) -> Settings:
    default = Settings()
    return replace(
        default,
        broker=replace(default.broker, store_path=str(root / "store")),
        offload=replace(default.offload, batch_age_ms=100),
        archive=replace(default.archive, url=(root / "archive").as_uri(), cluster="c", broker="b"),
    )


def archive_of(root: Path) -> PrefixedStore:
    return PrefixedStore(FileStore(root / "archive"), archive_prefix("c", "b"))


def run(root: Path, instance: str, state_dir: Path) -> None:
    """Archive everything that the store and the pins have."""
    writer = Writer(instance, "run", False, state_dir, pins=ProcessPins())
    UploaderJob(settings_of(root), writer, StoreMetrics()).offload(threading.Event(), follow=False)


def bodies(root: Path, queue_id: int) -> list[str]:
    store = archive_of(root)
    reader = QueueReader(store, load(store), QueueKey("t", queue_id, 0))
    offset, found = 0, []
    while offset < reader.max_offset:
        batch = reader.read(offset, max_rows=100, max_bytes=1 << 20)
        assert not batch.gap
        for start, size in zip(batch.starts.tolist(), batch.sizes.tolist(), strict=True):
            record = decode_record(batch.data[start : start + size].tobytes())
            found.append(record.body().decode().strip("x").strip())
        offset = batch.next_offset
    return found


@pytest.fixture
def root(left: Path) -> Path:
    """The sidecar's directories. The owner of the pins is moved along with the store."""
    root = left / "uploader"
    owner = root / "state" / "pins" / "OWNER"
    assert owner.read_text() == f"b in {ROOT / 'uploader' / 'store'}"
    owner.write_text(f"b in {root / 'store'}")
    return root


def test_the_same_instance_continues_in_its_epoch_and_archives_what_it_had_pinned(root: Path) -> None:
    epoch = load(archive_of(root)).epoch
    with StateDirectory(root / "state") as state:
        run(root, state.identity(), state.path)
    assert load(archive_of(root)).epoch == epoch + 1
    for queue_id in range(2):
        assert bodies(root, queue_id) == [f"message {number}" for number in range(MESSAGES)]


def test_another_instance_is_refused_while_the_epoch_is_owned(root: Path) -> None:
    with StateDirectory(root / "state") as state, pytest.raises(FencedError, match="epoch 2 belongs to run"):
        run(root, "another", state.path)


def test_pins_are_found_and_released_once_archived(root: Path) -> None:
    with StateDirectory(root / "state") as state:
        job_pins = ProcessPins()
        writer = Writer(state.identity(), "run", False, state.path, pins=job_pins)
        UploaderJob(settings_of(root), writer, StoreMetrics()).close()
        assert job_pins.keeper is not None
        assert not job_pins.keeper.problem
        assert [file.begin_phys for file in job_pins.keeper.files()] == [65536 * n for n in range(6)]
        job_pins.keeper.step([], 65536 * 6)
        assert [path.name for path in (state.path / "pins").iterdir()] == ["OWNER"]


def test_an_archive_begun_before_is_not_replaced_when_it_is_empty(root: Path) -> None:
    url = f"file://{ROOT}/uploader/archive/c/b"
    with pytest.raises(UnavailableError):
        ArchiveMarker(root / "state", url).refuse_empty()
    ArchiveMarker(root / "state", f"{url}2").refuse_empty()
