"""A bulk backfill ends after an outage, commits heartbeats, and cancels only tasks of its own store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.spark.jobs import backfill as backfill_module
from rocketmq_tiered.spark.jobs import backfill_driver, backfill_tasks
from rocketmq_tiered.spark.jobs.backfill import backfill
from rocketmq_tiered.spark.jobs.backfill_options import StoreToBackfill
from rocketmq_tiered.spark.jobs.backfill_tasks import PutTask, ScanTask
from tests.end_to_end.offloading import CLUSTER
from tests.end_to_end.offloading import backfill as backfill_alone
from tests.spark.jobs.backfill_runs import NO_SPARK, OPTIONS, own_archive, run, truth_of
from tests.spark.jobs.inline_tasks import InlineTasks
from tiered.catalog.catalog_reader import head_version, load
from tiered.errors import AccessDeniedError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

pytestmark = pytest.mark.integration

RealStore = Callable[[str], Path]
IMPATIENT = replace(OPTIONS, outage_limit_s=0.5)


class Refusing(FileStore):
    """Accepts ``admitted`` objects below ``folder``, then refuses them."""

    folder = "/catalog/"
    admitted = 0

    def put_if_absent(self, key: str, body: Any, *, timeout_s: float | None = None) -> None:
        if self.folder in f"/{key}":
            if type(self).admitted == 0:
                raise UnavailableError(f"no room for {key}")
            type(self).admitted -= 1
        super().put_if_absent(key, body, timeout_s=timeout_s)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """From now on archives take objects of this folder only so many times."""

    def begin(folder: str, admitted: int) -> None:
        monkeypatch.setattr(Refusing, "folder", folder)
        monkeypatch.setattr(Refusing, "admitted", admitted)
        for module in (backfill_driver, backfill_tasks):
            monkeypatch.setattr(
                module, "open_store", lambda url, options: Refusing(Path(url.removeprefix("file://")))
            )

    return begin


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "folder,admitted",
    [("/catalog/", 0), ("/catalog/", 1), ("/catalog/", 4), ("/catalog/", -1), ("/sets/", 0), ("/sets/", 1)],
)
def test_backfill_ends_when_the_store_refuses_writes_and_continues_later(
    folder: str, admitted: int, refuse: Callable[[str, int], None], real_store: RealStore, tmp_path: Path
) -> None:
    store = real_store("B") / "store"
    backfill_alone(store, FileStore(tmp_path / "single"))
    if admitted < 0:  # the last commit of all
        run(store, tmp_path / "whole")
        admitted += head_version(own_archive(tmp_path / "whole"))
    refuse(folder, admitted)
    with pytest.raises(UnavailableError, match="no room for") as caught:
        run(store, tmp_path / "bulk", options=IMPATIENT)
    assert str(caught.value).startswith("nothing stored for 0.5 s")
    assert str(caught.value).endswith("the same command continues where it stopped")
    refuse(folder, 1 << 30)
    run(store, tmp_path / "bulk")
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")


@pytest.mark.timeout(120)
def test_heartbeats_are_committed_while_tasks_run(
    monkeypatch: pytest.MonkeyPatch, real_store: RealStore, tmp_path: Path
) -> None:
    monkeypatch.setattr(backfill_driver, "HEARTBEAT_S", 0.05)
    archive = own_archive(tmp_path / "bulk")
    waited: list[type] = []

    def wait(task: object) -> None:
        if type(task) in waited:
            return
        waited.append(type(task))
        before, deadline = head_version(archive), time.monotonic() + 60
        while head_version(archive) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert head_version(archive) >= before + 2

    run(real_store("F") / "store", tmp_path / "bulk", InlineTasks(wait))
    assert waited == [ScanTask, PutTask]
    backfill_alone(real_store("F") / "store", FileStore(tmp_path / "single"))
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")


@pytest.mark.timeout(120)
def test_a_failure_of_one_store_cancels_no_task_of_another(
    monkeypatch: pytest.MonkeyPatch, real_store: RealStore, tmp_path: Path
) -> None:
    cancelled = threading.Event()

    class Tasks(InlineTasks):
        """Those of B are refused; those of K wait until B's are called off, and end if they are as well."""

        def __init__(self, spark: object) -> None:
            super().__init__(self.look)

        def look(self, task: object) -> None:
            if not isinstance(task, PutTask):
                return
            if task.source.broker == "B":
                raise AccessDeniedError("keys are refused")
            assert cancelled.wait(60)
            if self.cancelled:
                raise UnavailableError("cancelled")

        def cancel(self) -> None:
            super().cancel()
            cancelled.set()

    monkeypatch.setattr(backfill_module, "SparkTasks", Tasks)
    stores = [StoreToBackfill(str(real_store(name) / "store"), CLUSTER, name) for name in ("B", "K")]
    with pytest.raises(AccessDeniedError, match="keys are refused"):
        backfill(NO_SPARK, stores, f"file://{tmp_path / 'bulk'}", options=OPTIONS)
    backfill_alone(real_store("K") / "store", FileStore(tmp_path / "single"))
    found = PrefixedStore(FileStore(tmp_path / "bulk"), archive_prefix(CLUSTER, "K"))
    assert load(found).cursor.phys == load(own_archive(tmp_path / "single")).cursor.phys > 0
