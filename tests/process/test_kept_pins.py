"""What pins keep outlives a job, one of which ends whenever the broker restarts or settings are reloaded; not what
made them wanted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.process.uploader_job import ProcessPins, UploaderJob, Writer
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.pins import PinLimits, PinMethod
from tiered.broker_store.retention import DiskUse
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.sections import Settings


@pytest.fixture
def linking(real_store: Callable[[str], Path], tmp_path: Path) -> Settings:
    shutil.copytree(real_store("F") / "store", tmp_path / "store")
    default = Settings()
    return replace(
        default,
        broker=replace(default.broker, store_path=str(tmp_path / "store")),
        archive=replace(default.archive, url=(tmp_path / "archive").as_uri(), cluster="c", broker="b"),
    )


@pytest.fixture
def settings(linking: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a sidecar that may make no links."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    return replace(linking, pins=replace(linking.pins, directory=str(tmp_path / "pins")))


def job_of(settings: Settings, tmp_path: Path, kept: ProcessPins) -> UploaderJob:
    writer = Writer("me", "run", False, tmp_path / "state", pins=kept)
    return UploaderJob(settings, writer, StoreMetrics())


def log_of(settings: Settings, kept: ProcessPins) -> CommitLog:
    """The log as the present job reads it."""
    keeper = kept.keeper
    directory = Path(settings.broker.store_path) / "commitlog"
    return CommitLog([directory], pinned=keeper.files if keeper is not None else None)


def linked(settings: Settings, tmp_path: Path, kept: ProcessPins) -> set[Path]:
    """The links of a job that ends. Its broker deletes the files then: nothing else holds them."""
    (tmp_path / "state").mkdir()
    job = job_of(settings, tmp_path, kept)
    log = log_of(settings, kept)
    assert kept.keeper is not None
    kept.keeper.limits = PinLimits(0.999, 0.9999)
    status = kept.keeper.step(log.files, 0)
    assert {pin.method for pin in status.pins} == {PinMethod.LINK}
    for file in log.files[:-1]:
        file.path.unlink()
    job.close()
    return {pin.path for pin in status.pins}


def test_a_file_that_the_broker_deleted_is_there_for_the_next_job(settings: Settings, tmp_path: Path) -> None:
    kept = ProcessPins()
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


@pytest.mark.parametrize("wanted", ["disabled", "elsewhere"])
@pytest.mark.parametrize("is_same_process", [True, False])
def test_links_of_other_settings_are_not_left_behind(
    linking: Settings, tmp_path: Path, wanted: str, is_same_process: bool
) -> None:
    """They keep the broker's disk full: what it deletes is freed with the last link."""
    kept = ProcessPins()
    links = linked(linking, tmp_path, kept)
    if not is_same_process:
        kept.close()
        kept = ProcessPins()
    pins = replace(linking.pins, enabled=wanted != "disabled", directory=str(tmp_path / "elsewhere"))
    job = job_of(replace(linking, pins=pins), tmp_path, kept)
    if kept.keeper is not None:
        assert {file.path for file in kept.keeper.files()} == links
        kept.keeper.disk_use = lambda path: DiskUse(0.99, 1 << 30)
        kept.keeper.step((), 0)
    assert not [link for link in links if link.exists()]
    job.close()
    kept.close()
