"""Compaction in a process of its own: it writes what a thread would, and its end costs a round at most."""

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.compaction_task import CompactionTask
from rocketmq_tiered.maintenance.throttle import Load, Stopping, Throttle
from rocketmq_tiered.process.compaction_process import ChildRewrite, ChildStore
from tests.archive.archive_builder import NOW_MS
from tests.maintenance.compaction_scene import Scene
from tiered.archive.task import StoppedError, TaskLoop
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.object_store.file import FileStore
from tiered.object_store.interface import StoreOptions
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.sections import CompactionSettings, OffloadSettings, Settings

pytestmark = pytest.mark.integration

SETTINGS = Settings(
    compaction=CompactionSettings(min_age_ms=0, split_bytes=20_000, object_bytes=60_000),
    offload=OffloadSettings(block_bytes=600),
)


def test_a_child_writes_the_outputs(tmp_path: Path) -> None:
    store = PrefixedStore(FileStore(tmp_path / "archive"), "cluster/broker/")
    scene, metrics, load = (
        Scene(tmp_path / "unused", store=store),
        StoreMetrics(),
        [Load(store_problem="wait")],
    )
    place = ChildStore(store.url, StoreOptions(), SETTINGS.compaction, "INFO")
    stopping, writer = Stopping(), scene.owner.writer
    task = CompactionTask(
        store,
        writer,
        SETTINGS,
        tmp_path / "spool",
        Throttle(lambda: load[0]),
        stopping,
        clock=Clock(wall_ms=lambda: NOW_MS + 1000),
        writing=lambda share: ChildRewrite(place, metrics, share),
    )
    loop = TaskLoop(task, writer.refresh)
    task._store._share = lambda: 1.0  # its own reads, of pages, do not wait
    for end, error, text in (
        (kill_child, UnavailableError, "exit code -9; "),
        (stopping.stopped.set, StoppedError, None),
    ):
        thread = threading.Thread(target=at_child, args=(end,))
        thread.start()
        with pytest.raises(error, match=text):
            loop.make_pass()
        thread.join()
        stopping.stopped.clear()
        assert not multiprocessing.active_children()
    load[0] = Load()
    loop.make_pass()
    report = replace(task.status(loop.status), idle_seconds=0.0)
    assert report.joined_objects > 5 * report.made_objects > 0
    assert metrics.snapshot()["compose"].requests >= report.made_objects
    scene.check()
    scene.collect()
    scene.check()


def at_child(end: object) -> None:
    """Call ``end`` once the child runs."""
    while not multiprocessing.active_children():
        time.sleep(0.01)
    end()  # type: ignore[operator]


def kill_child() -> None:
    """Once it runs in idle time only."""
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    while os.sched_getscheduler(child.pid) != os.SCHED_IDLE:
        assert child.is_alive()
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
