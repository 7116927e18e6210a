"""Retiring a broker step by step: what it waits for, what it refuses, and that it continues where it stopped.

What pins keep outlives a job, one of which ends whenever the broker restarts or settings are reloaded; not what
made them wanted.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rocketmq_tiered.process.broker_control import GroupOffsets, Leftover
from rocketmq_tiered.process.detach import Detachment, DetachStep, LeftError
from rocketmq_tiered.process.uploader_job import ProcessPins, UploaderJob, Writer
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.pins import PinLimits, PinMethod
from tiered.broker_store.retention import DiskUse
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.sections import Settings


@dataclass
class BrokerDouble:
    """``growth``: messages for each look at the end of a queue."""

    perm: int = 6
    left: list[list[Leftover]] = field(default_factory=list)
    growth: int = 0
    end: int = 1000
    unacknowledged: list[int] = field(default_factory=list)
    set_to: list[int] = field(default_factory=list)

    def permission(self) -> int:
        return self.perm

    def set_permission(self, permission: int) -> None:
        self.perm = permission
        self.set_to.append(permission)

    def produced(self) -> dict[tuple[str, int], int]:
        self.end += self.growth
        return {("t", 0): self.end}

    def popped(self) -> list[Leftover]:
        assert self.perm == 0, "while consumers pop it never ends"
        return [Leftover("popped messages", self.unacknowledged.pop())] if self.unacknowledged else []

    def group_offsets(self) -> GroupOffsets:
        return {"t@g": {0: 5}}

    def leftovers(self) -> list[Leftover]:
        return self.left.pop(0) if len(self.left) > 1 else (self.left[0] if self.left else [])


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def detachment(broker: BrokerDouble, wait_s: float = 600) -> tuple[Detachment, list[DetachStep], Time]:
    said: list[DetachStep] = []
    clock = Time()
    found = Detachment(broker, wait_s, said.append, Clock(monotonic_s=lambda: clock.now_s, sleep=clock.sleep))  # type: ignore[arg-type]
    return found, said, clock


def test_it_closes_a_quiet_broker_in_order() -> None:
    broker = BrokerDouble()
    found, said, clock = detachment(broker)
    found.close(force=False)
    assert broker.set_to == [4, 0]
    assert [step.name for step in said] == ["read-only", "routes", "log", "left", "closed", "commits"]
    assert clock.now_s >= 30 + 10 + 10


def test_it_continues_after_each_permission() -> None:
    broker = BrokerDouble(perm=4)
    detachment(broker)[0].close(force=False)
    assert broker.set_to == [0]
    again, said, clock = detachment(broker)
    again.close(force=False)
    assert broker.set_to == [0] and said[0] == DetachStep("read-only", "done before") and clock.now_s < 15


def test_it_waits_for_what_is_left_and_names_it() -> None:
    left = [Leftover("delayed messages", 2)]
    broker = BrokerDouble(left=[left, left, []])
    found, said, _ = detachment(broker)
    found.close(force=False)
    assert DetachStep("left", "waits for 2 delayed messages") in said and broker.perm == 0
    broker = BrokerDouble(left=[[Leftover("timers", 3)]])
    with pytest.raises(LeftError, match="still holds 3 timers"):
        detachment(broker, wait_s=5)[0].close(force=False)
    assert broker.perm == 4
    detachment(broker, wait_s=5)[0].close(force=True)
    assert broker.perm == 0


def test_what_is_popped_is_waited_for_once_consumers_do_not_pop() -> None:
    broker = BrokerDouble(unacknowledged=[1, 2, 2])
    found, said, _ = detachment(broker)
    found.close(force=False)
    assert broker.set_to == [4, 0] and DetachStep("popped", "waits for 2 popped messages") in said


def test_what_consumers_gave_back_is_popped_again_before_the_broker_is_closed() -> None:
    again = [Leftover("messages to be popped again", 1)]
    broker = BrokerDouble(left=[[], again, again, []])
    found, _, _ = detachment(broker)
    found.close(force=False)
    assert broker.set_to == [4, 0, 4, 0]


def test_a_broker_that_takes_messages_is_not_closed() -> None:
    broker = BrokerDouble(growth=10)
    with pytest.raises(UnavailableError, match="producers still send to the broker"):
        detachment(broker, wait_s=20)[0].close(force=False)
    assert broker.perm == 4
    found, _, _ = detachment(broker)
    found.undo()
    assert broker.perm == 6


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
    return UploaderJob(settings, Writer("me", "run", False, tmp_path / "state", pins=kept), StoreMetrics())


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
    assert {pin.method for pin in kept.keeper.step(log.files, 0).pins} == {PinMethod.DESCRIPTOR}
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
