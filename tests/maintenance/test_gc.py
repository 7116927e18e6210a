"""Garbage collection over stores that refuse: one object that cannot be deleted costs one object.

A store whose user yields: its share of requests and bytes, pauses, and the stop.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.gc import DELETE_BATCH, PROBE_KEY, Deletions
from rocketmq_tiered.maintenance.throttle import Load, YieldingStore
from rocketmq_tiered.process.archive_tasks import ArchiveTasks
from tests.catalog.collection import run_gc
from tests.catalog.drafts import NOW_MS, append_draft, queue, writer
from tiered.archive.task import EXPIRY, GARBAGE_COLLECTION, StoppedError
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.clock import Clock
from tiered.errors import AccessDeniedError
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import GcSettings, Settings


class Locked(MemoryStore):
    """Refuses to delete some keys, and with them the batch, as S3 does: the rest of the batch is deleted."""

    def __init__(self, locked: Sequence[str] = ()) -> None:
        self.locked = set(locked)
        self.deletes = 0
        super().__init__(clock=Clock(wall_ms=lambda: NOW_MS))

    def delete(self, keys: Sequence[str]) -> None:
        self.deletes += 1
        super().delete([key for key in keys if key not in self.locked])
        for key in keys:
            if key in self.locked:
                raise AccessDeniedError(f"{key} is locked")


def with_garbage(store: ObjectStore, count: int) -> tuple[CatalogWriter, list[str]]:
    made = writer(store)
    made.claim()
    keys = [f"sets/00/x-1-{number}.sso" for number in range(count)]
    draft = append_draft(made.state, {queue("a"): 1})
    for key in (*keys, *draft.object_keys):
        store.put_if_absent(key, [b"x"])
    made.append(draft)
    made.append(CommitDraft(CommitKind.MAINTENANCE, pending_deletions=keys, created_ms=NOW_MS))
    return made, keys


def test_one_object_that_cannot_be_deleted_costs_one_object() -> None:
    store = Locked()
    _, keys = with_garbage(store, 3_000)
    store.locked = {keys[1_234]}
    seen: list[tuple[int, int]] = []
    plan = run_gc(
        store,
        load(store),
        apply=True,
        grace_ms=0,
        clock=lambda: NOW_MS,
        deletions=Deletions(progress=lambda done, total: seen.append((done, total))),
    )
    assert list(plan.failed) == [keys[1_234]] and "is locked" in plan.failed[keys[1_234]]
    assert [info.key for info in store.list("sets/00/x-")] == [keys[1_234]]
    assert seen[0] == (0, len(plan.delete)) and seen[-1] == (len(plan.delete), len(plan.delete))
    store.locked = set()
    assert load(store).version == 4
    again = run_gc(store, load(store), apply=True, grace_ms=0, clock=lambda: NOW_MS)
    assert again.delete == [keys[1_234]], "it is tried again"
    assert not list(store.list("sets/00/x-")) and not load(store).pending_deletions


class Directory(FileStore):
    """With the clock of these tests."""

    def clock_ms(self, prefix: str = "") -> int:
        return NOW_MS


def test_links_in_a_directory_are_left_and_do_not_end_a_collection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Directory(tmp_path / "archive")
    _, keys = with_garbage(store, 3)
    for path in filter(Path.is_file, (tmp_path / "archive").rglob("*")):
        os.utime(path, times=(NOW_MS / 1000, NOW_MS / 1000))
    linked = tmp_path / "archive" / "sets" / "00" / "x-1-1.sso"
    linked.unlink()
    (tmp_path / "foreign").mkdir()
    for name in ("file", "gc-may-delete"):
        (tmp_path / "foreign" / name).write_bytes(b"not ours")
    linked.symlink_to(tmp_path / "foreign" / "file")
    (tmp_path / "archive" / "data").mkdir(exist_ok=True)
    (tmp_path / "archive" / "data" / "00").symlink_to(tmp_path / "foreign")
    (tmp_path / "archive" / "data" / "loop").symlink_to(tmp_path / "archive")
    plan = run_gc(store, load(store), apply=True, grace_ms=0, clock=lambda: NOW_MS)
    assert not plan.failed and [key for key in plan.delete if key in keys] == [keys[0], keys[2]]
    assert any(f"{keys[1]} is neither a regular file nor a directory" in line for line in caplog.messages)
    assert not list(store.list("sets/00/x-"))
    assert sorted(path.name for path in (tmp_path / "foreign").iterdir()) == ["file", "gc-may-delete"]
    assert linked.is_symlink()


def test_a_store_that_refuses_everything_is_not_tried_key_by_key() -> None:
    store = Locked()
    _, keys = with_garbage(store, 5 * DELETE_BATCH)
    store.locked = set(keys)
    plan = run_gc(store, load(store), apply=True, grace_ms=0, clock=lambda: NOW_MS)
    assert len(plan.failed) == len(keys)
    assert store.deletes < 30, "the probe, and a few keys of a few batches"
    reasons = {reason.partition(":")[0] for reason in plan.failed.values()}
    assert any("is locked" in reason for reason in reasons) and any(
        "not tried" in reason for reason in reasons
    )
    store.locked = set(plan.delete[: 2 * DELETE_BATCH])
    plan = run_gc(store, load(store), apply=True, grace_ms=0, clock=lambda: NOW_MS)
    assert plan.failed.keys() == store.locked, "batches of locked keys hold up no others"


def test_an_account_that_may_not_delete_purges_nothing() -> None:
    """A purge is final: objects that are purged and stay would be garbage that nothing finds in this epoch."""
    store = Locked([PROBE_KEY])
    with_garbage(store, 3)
    before = load(store)
    with pytest.raises(AccessDeniedError):
        run_gc(store, before, apply=True, grace_ms=0, clock=lambda: NOW_MS)
    assert load(store).version == before.version
    assert len(list(store.list("sets/00/x-"))) == 3


def test_deletion_keeps_to_its_rate_and_ends_when_stopped() -> None:
    store = MemoryStore(clock=Clock(wall_ms=lambda: NOW_MS))
    _, keys = with_garbage(store, 2_500)
    waits: list[float] = []
    run_gc(
        store,
        load(store),
        apply=True,
        grace_ms=0,
        clock=lambda: NOW_MS,
        deletions=Deletions(1_000, sleep=waits.append, is_stopped=lambda: len(waits) == 2),
    )
    assert [round(wait) for wait in waits] == [1, 1]
    assert len(list(store.list("sets/00/x-"))) == 500
    assert keys


def tasks_of(store: MemoryStore, owner: CatalogWriter, gc: GcSettings) -> ArchiveTasks:
    """Those of a process beside ``owner``."""
    return ArchiveTasks(store, owner, replace(Settings(), gc=gc), Load)


@pytest.mark.parametrize("is_fenced", [False, True])
def test_the_owner_alone_collects(is_fenced: bool) -> None:
    store = MemoryStore(clock=Clock())
    owner, _ = with_garbage(store, 3)
    if is_fenced:
        writer(store, "w2").claim(take_over=True)
    tasks = tasks_of(store, owner, GcSettings(grace_ms=0))
    collecting, expiring = tasks.loops[GARBAGE_COLLECTION], tasks.loops[EXPIRY]
    assert (collecting.status.last_ms, expiring.status.last_ms) == (None, None)
    collecting.make_pass()
    expiring.make_pass()
    assert len(list(store.list("sets/00/x-"))) == (3 if is_fenced else 0)
    assert (collecting.status.last_ms is None, expiring.status.last_ms is None) == (is_fenced, is_fenced)


def test_messages_expire_also_where_another_process_collects() -> None:
    store = MemoryStore(clock=Clock())
    owner, _ = with_garbage(store, 3)
    tasks = tasks_of(store, owner, GcSettings(grace_ms=0, every_ms=0))
    assert GARBAGE_COLLECTION not in tasks.loops
    expiring = tasks.loops[EXPIRY]
    expiring.make_pass()
    assert len(list(store.list("sets/00/x-"))) == 3
    assert expiring.status.last_ms is not None
    assert expiring.status.interval_seconds == 24 * 3_600


MIB = 1 << 20


class Time:
    """Time passes only in sleeps; ``share`` and ``stop`` change at times of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.shares: dict[float, float] = {0: 1.0}
        self.stop_s = float("inf")
        self.memory = MemoryStore()
        self.memory.put_if_absent("a", [bytes(MIB)])
        self.store = YieldingStore(
            self.memory,
            bytes_per_s=MIB,
            requests_per_s=10,
            share=self.share,
            stopping=self,  # type: ignore[arg-type]
            clock=Clock(monotonic_s=lambda: self.now_s),
        )

    def share(self) -> float:
        return self.shares[max(at for at in self.shares if at <= self.now_s)]

    def is_set(self) -> bool:
        return self.now_s >= self.stop_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def test_bytes_and_requests_take_their_time() -> None:
    clock = Time()
    for _ in range(4):
        clock.store.get_range("a", 0, MIB)
    assert clock.now_s == pytest.approx(3, abs=0.02), "a request waits for those before it"
    clock.now_s += 100
    began_s = clock.now_s
    for _ in range(31):
        clock.store.get_range("a", 0, 1)
    assert clock.now_s - began_s == pytest.approx(2, abs=0.1), "a second is saved up at most"
    clock.store.compose_if_absent("b", [bytes(MIB // 2)])
    clock.store.put_if_absent("c", [bytes(1)])
    assert clock.now_s - began_s == pytest.approx(2.6, abs=0.1)


def test_a_share_slows_down_and_none_waits() -> None:
    clock = Time()
    clock.shares = {0: 0.25, 10: 0.0, 20: 1.0}
    for _ in range(3):
        clock.store.get_range("a", 0, MIB)
    assert clock.now_s == pytest.approx(8, abs=0.3)
    clock.store.get_range("a", 0, MIB)
    assert clock.now_s == pytest.approx(20.5, abs=0.3), "it owes what was not paid before the pause"


def test_a_stop_ends_a_pause() -> None:
    clock = Time()
    clock.shares, clock.stop_s = {0: 0.0}, 7.0
    with pytest.raises(StoppedError):
        clock.store.get_range("a", 0, 1)
    assert clock.now_s == pytest.approx(7, abs=0.3)
