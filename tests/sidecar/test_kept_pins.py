"""What only descriptors keep outlives a job: one ends whenever the broker restarts or settings are loaded anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.uploader_job import KeptPins, UploaderJob, Writer
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.pins import PinLimits, PinMethod
from tiered.object_store.metrics import StoreMetrics
from tiered.settings.sections import Settings


@pytest.fixture
def settings(real_store: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a sidecar that may make no links."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    shutil.copytree(real_store("F") / "store", tmp_path / "store")
    default = Settings()
    return replace(
        default,
        broker=replace(default.broker, store_path=str(tmp_path / "store")),
        archive=replace(default.archive, url=(tmp_path / "archive").as_uri(), cluster="c", broker="b"),
        pins=replace(default.pins, directory=str(tmp_path / "pins")),
    )


def job_of(settings: Settings, tmp_path: Path, kept: KeptPins) -> UploaderJob:
    writer = Writer("me", "run", False, tmp_path / "state", pins=kept)
    return UploaderJob(settings, writer, StoreMetrics())


def log_of(settings: Settings, kept: KeptPins) -> CommitLog:
    """The log as the present job reads it."""
    keeper = kept.keeper
    directory = Path(settings.broker.store_path) / "commitlog"
    return CommitLog([directory], pinned=keeper.files if keeper is not None else None)


def test_a_file_that_the_broker_deleted_is_there_for_the_next_job(settings: Settings, tmp_path: Path) -> None:
    kept = KeptPins()
    job = job_of(settings, tmp_path, kept)
    log = log_of(settings, kept)
    oldest = log.files[0]
    data = log.read(oldest.begin_phys, 4096)
    assert kept.keeper is not None
    kept.keeper.limits = PinLimits(0.999, 0.9999)
    status = kept.keeper.step(log.files, 0)
    assert {pin.method for pin in status.pins} == {PinMethod.DESCRIPTOR}
    oldest.path.unlink()
    job.close()

    job = job_of(settings, tmp_path, kept)
    assert log_of(settings, kept).read(oldest.begin_phys, 4096) == data
    job.close()

    job = job_of(replace(settings, pins=replace(settings.pins, enabled=False)), tmp_path, kept)
    assert log_of(settings, kept).read(oldest.begin_phys, 4096) == b""
    job.close()
    kept.close()
