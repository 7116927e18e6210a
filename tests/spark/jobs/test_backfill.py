"""A bulk backfill makes the archive of ``tiered backfill``, even if a task dies or the object store fails."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from rocketmq_tiered.spark.jobs import backfill as backfill_module
from rocketmq_tiered.spark.jobs.backfill import BackfillOptions, BackfillTask, StoreToBackfill, backfill
from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.end_to_end.offloading import backfill as backfill_alone
from tests.spark.jobs.backfill_runs import NO_SPARK, OPTIONS, own_archive, run, truth_of
from tests.spark.jobs.inline_tasks import InlineTasks, Twice
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import head_version, load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.clock import Clock
from tiered.errors import AccessDeniedError, FencedError, NotFoundError, UnavailableError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.sealed import SealedStore

pytestmark = pytest.mark.integration

RealStore = Callable[[str], Path]
IMPATIENT = replace(OPTIONS, outage_limit_s=0.5)


def test_the_archive_equals_that_of_a_single_backfill(real_store: RealStore, tmp_path: Path) -> None:
    directory = real_store("K")
    report = run(directory / "store", tmp_path / "bulk")
    single = backfill_alone(directory / "store", FileStore(tmp_path / "single"))
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")
    assert (report.messages, report.raw_bytes, report.commits, report.hidden, report.to_phys) == (
        single.messages,
        single.raw_bytes,
        single.commits,
        single.hidden,
        single.to_phys,
    )
    assert check_against_truth(FileStore(tmp_path / "bulk"), directory, "K") > 400
    found = verify_archive(own_archive(tmp_path / "bulk"), depth="full")
    assert (found.anomalies, found.leftovers) == ([], [])
    again = run(directory / "store", tmp_path / "bulk")
    assert (again.messages, again.commits) == (0, 0)


def test_topics_settings_and_an_older_copy_follow_the_options(real_store: RealStore, tmp_path: Path) -> None:
    store, topics = real_store("L") / "store", TopicFilter(include_system=True)
    run(store, tmp_path / "bulk", options=BackfillOptions(settings=OPTIONS.settings, topics=topics))
    backfill_alone(store, FileStore(tmp_path / "single"), topic_filter=topics)
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")
    spec = StoreSpec(topics=2, queues_per_topic=2, body_bytes=200)
    for name, messages in (("now", 8_000), ("copy", 3_000)):
        write_store(tmp_path / name, spec, messages=messages)
    run(tmp_path / "now", tmp_path / "replaced")
    before = truth_of(tmp_path / "replaced")
    with pytest.raises(UsageError, match="an older copy"):
        run(tmp_path / "copy", tmp_path / "replaced")
    assert truth_of(tmp_path / "replaced") == before
    run(tmp_path / "copy", tmp_path / "replaced", options=replace(OPTIONS, replace_log=True))
    assert truth_of(tmp_path / "replaced")["cursor"][0] == 2


def test_a_repeated_task_archives_nothing_twice(real_store: RealStore, tmp_path: Path) -> None:
    """Spark repeats a task whose result was lost with its executor."""

    run(real_store("K") / "store", tmp_path / "bulk", Twice())
    backfill_alone(real_store("K") / "store", FileStore(tmp_path / "single"))
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")


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


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "folder,admitted", sweep([("/catalog/", 0), ("/catalog/", 4), ("/sets/", 1)], fast=[("/catalog/", 4)])
)
def test_a_backfill_ends_when_the_store_refuses_writes_and_continues_later(
    folder: str, admitted: int, monkeypatch: pytest.MonkeyPatch, real_store: RealStore, tmp_path: Path
) -> None:
    store = real_store("B") / "store"
    backfill_alone(store, FileStore(tmp_path / "single"))
    monkeypatch.setattr(Refusing, "folder", folder)
    monkeypatch.setattr(Refusing, "admitted", admitted)
    with monkeypatch.context() as patched:
        patched.setattr(
            backfill_module,
            "open_store",
            lambda url, options: SealedStore(Refusing(Path(url.removeprefix("file://"))), None),
        )
        with pytest.raises(UnavailableError, match="no room for") as caught:
            run(store, tmp_path / "bulk", options=IMPATIENT)
    assert str(caught.value).startswith("the object store has stored nothing for 0.5 s")
    assert str(caught.value).endswith("the same command continues where it stopped")
    run(store, tmp_path / "bulk")
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")
    assert verify_archive(own_archive(tmp_path / "bulk"), depth="full").anomalies == []


def test_a_writer_that_has_not_released_its_epoch_is_not_fenced(
    real_store: RealStore, tmp_path: Path
) -> None:
    archive = own_archive(tmp_path)
    sidecar = CatalogWriter(
        archive,
        cluster=CLUSTER,
        broker=BROKER,
        instance="sidecar",
        kind="run",
        clock=Clock(wall_ms=lambda: 1),
    )
    sidecar.claim()
    before = [info.key for info in archive.list("")]
    with pytest.raises(FencedError, match="sidecar"):
        run(real_store("B") / "store", tmp_path)
    assert [info.key for info in archive.list("")] == before, "not one object was put"
    assert run(real_store("B") / "store", tmp_path, options=replace(OPTIONS, take_over=True)).messages > 0


def test_wrong_stores_are_refused_before_any_task(real_store: RealStore, tmp_path: Path) -> None:
    def refuse(task: object) -> None:
        raise AssertionError(task)

    store, tasks = str(real_store("B") / "store"), InlineTasks(refuse)
    one = StoreToBackfill(store, CLUSTER, BROKER)
    with pytest.raises(UsageError, match="two of the store directories"):
        backfill(NO_SPARK, [one, one], f"file://{tmp_path}", tasks=tasks)
    with pytest.raises(NotFoundError):
        backfill(NO_SPARK, [str(tmp_path / "nothing")], f"file://{tmp_path}", tasks=tasks)
    shutil.copytree(store, tmp_path / "store")
    (tmp_path / "store" / "lock").unlink(missing_ok=True)
    (tmp_path / "store" / "abort").touch()
    with pytest.raises(UnavailableError, match="may run"):
        run(tmp_path / "store", tmp_path / "bulk", tasks)


def test_several_stores_at_a_time(real_store: RealStore, tmp_path: Path) -> None:
    names = ["B", "F", "K"]
    stores = [StoreToBackfill(str(real_store(name) / "store"), CLUSTER, name) for name in names]
    done: dict[str, tuple[int, int]] = {}
    reports = backfill(
        NO_SPARK,
        stores,
        f"file://{tmp_path}",
        options=OPTIONS,
        tasks=InlineTasks(),
        report=lambda path, so_far, total: done.__setitem__(path, (so_far, total)),
    )
    assert [report.broker for report in reports] == names
    assert all(so_far == total > 0 for so_far, total in done.values())
    for name, report in zip(names, reports, strict=True):
        archive = PrefixedStore(FileStore(tmp_path), archive_prefix(CLUSTER, name))
        assert verify_archive(archive).counts["messages"] == report.messages


def test_progress_is_read_from_the_catalog(
    monkeypatch: pytest.MonkeyPatch, real_store: RealStore, tmp_path: Path
) -> None:
    monkeypatch.setattr(backfill_module, "PROGRESS_S", 0.01)
    seen: list[tuple[int, int]] = []
    backfill(
        NO_SPARK,
        [StoreToBackfill(str(real_store("A") / "store"), CLUSTER, BROKER)],
        f"file://{tmp_path}",
        options=OPTIONS,
        tasks=InlineTasks(),
        report=lambda path, so_far, total: seen.append((so_far, total)),
    )
    assert len({total for _, total in seen}) == 1
    assert sorted(seen) == seen
    assert any(0 < so_far < total for so_far, total in seen)


@pytest.mark.timeout(120)
def test_a_failure_of_one_store_ends_no_other(real_store: RealStore, tmp_path: Path) -> None:
    def refuse(task: object) -> None:
        if isinstance(task, BackfillTask) and task.store.broker == "B":
            raise AccessDeniedError("keys are refused")

    stores = [StoreToBackfill(str(real_store(name) / "store"), CLUSTER, name) for name in ("B", "K")]
    with pytest.raises(AccessDeniedError, match="keys are refused"):
        backfill(NO_SPARK, stores, f"file://{tmp_path / 'bulk'}", options=OPTIONS, tasks=InlineTasks(refuse))
    backfill_alone(real_store("K") / "store", FileStore(tmp_path / "single"))
    found = PrefixedStore(FileStore(tmp_path / "bulk"), archive_prefix(CLUSTER, "K"))
    assert head_version(found) > 1
    assert load(found).cursor.phys == load(own_archive(tmp_path / "single")).cursor.phys > 0
