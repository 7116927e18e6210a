"""Expiry of real archives: what is readable afterwards is what an oracle says, and nothing else is deleted.

A pass of expiry inside `tiered run` stops at retention.max_share.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits
from rocketmq_tiered.maintenance.compaction_round import plan_rounds, run_round
from rocketmq_tiered.maintenance.expire import (
    LIST_ENTRIES_MAX,
    TOO_MUCH,
    Erasure,
    ExpiryPass,
    ExpiryTask,
    commit_pass,
    plan_pass,
)
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.archive.queue_reader import QueueReader, records_of
from tests.catalog.collection import run_gc
from tests.catalog.drafts import Bucket
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.task import run_pass
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import read_list
from tiered.catalog.state import CatalogState, LogCheck
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import UsageError
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import GcSettings, RetentionSettings, Settings
from tiered.settings.topic_rules import TopicRule, TopicRules

HOUR_MS = 3_600_000
A, B, KEPT, LMQ = QueueKey("a", 0, 0), QueueKey("b", 0, 0), QueueKey("kept", 0, 0), QueueKey("%LMQ%x", 0, 0)
TTL_HOURS = {"a": 10, "b": 30}
SMALL_LIMITS = CatalogLimits(root_every=3, spill_runs=6, page_runs_max=4, merge_sequences=3, merge_spills=3)


def rule(topic: str) -> TopicRule:
    hours = TTL_HOURS.get(topic)
    ttl_ms = None if hours is None else hours * HOUR_MS
    return TopicRule(
        topic, ttl_ms, min(ttl_ms or 72 * HOUR_MS, 72 * HOUR_MS), "test", None, "test", "NOT_IN_DISK", "test"
    )


def built(store: Bucket, cycles: int = 12, **limits: float) -> ArchiveBuilder:
    """A cycle an hour: messages are stored by the broker, and committed, at the hour of their cycle."""
    made = ArchiveBuilder(
        store,
        limits=CatalogLimits(**({"root_every": 4, "spill_runs": 12, "page_runs_max": 8} | limits)),  # type: ignore[arg-type]
    )
    for hour in range(cycles):
        store.now_ms = NOW_MS + hour * HOUR_MS
        made.commit(
            [
                Sent(A, b"a%d" % hour, stored_ms=store.now_ms, lmq=[LMQ]),
                Sent(A, b"A%d" % hour, stored_ms=store.now_ms),
                Sent(B, b"b%d" % hour, stored_ms=store.now_ms),
                Sent(KEPT, b"k%d" % hour, stored_ms=store.now_ms),
            ],
            as_set=hour % 3 != 1,
        )
    return made


def expire(store: Bucket, *, erase: Erasure | None = None) -> tuple[ExpiryPass, CatalogState]:
    state = load(store)
    found = plan_pass(store, state, rule, clock=Clock(wall_ms=lambda: store.now_ms), erase=erase)
    return found, commit_pass(store, state, found, clock=Clock(wall_ms=lambda: store.now_ms))


def readable(store: MemoryStore, key: QueueKey, state: CatalogState | None = None) -> list[bytes]:
    return [record for _, _, record in records_of(QueueReader(store, state or load(store), key))]


def bodies(made: ArchiveBuilder, key: QueueKey, from_hour: int, each: int = 1) -> list[bytes]:
    return [row.record for row in made.truth[key].rows[from_hour * each :]]


@pytest.fixture
def store() -> Bucket:
    return Bucket()


@pytest.fixture
def made(store: Bucket) -> ArchiveBuilder:
    return built(store)


def test_messages_expire_by_the_time_to_live_of_their_topic(store: Bucket, made: ArchiveBuilder) -> None:
    store.now_ms = NOW_MS + 15 * HOUR_MS  # cycles 0 to 5 are at least ten hours old
    found, state = expire(store)
    assert found.is_committed
    assert readable(store, A) == bodies(made, A, 6, 2)
    assert len(readable(store, B)) == len(readable(store, KEPT)) == 12
    assert readable(store, LMQ) == bodies(made, LMQ, 6)
    assert {(state.key_of(int(row)).topic) for row in np.flatnonzero(state.table["flags"] & 16)} == {
        "a",
        "%LMQ%x",
    }
    assert verify_archive(store, depth="full").anomalies == []


def test_a_clock_of_the_future_keeps_no_older_messages_after_its_time_in_the_bucket(store: Bucket) -> None:
    made = ArchiveBuilder(store)
    for hour, stored_ms in (
        (0, NOW_MS),
        (1, NOW_MS + 10**12),
        (2, NOW_MS + 2 * HOUR_MS),
        (8, NOW_MS + 8 * HOUR_MS),
    ):
        store.now_ms = NOW_MS + hour * HOUR_MS
        made.commit([Sent(A, b"%d" % hour, stored_ms=stored_ms)])
    store.now_ms = NOW_MS + 10 * HOUR_MS + 1_000
    expire(store)
    assert readable(store, A) == bodies(made, A, 1), (
        "the next one stays: it is ten hours in the bucket in an hour"
    )
    store.now_ms += 2 * HOUR_MS
    expire(store)
    assert readable(store, A) == bodies(made, A, 3)


def test_nothing_expires_before_its_time_in_the_bucket(store: Bucket) -> None:
    """The broker's clock was in 1970."""
    ArchiveBuilder(store).commit([Sent(A, b"x", stored_ms=1_000)])
    store.now_ms = NOW_MS + 10 * HOUR_MS - 1_000
    assert not len(expire(store)[0].plan.floors)
    store.now_ms = NOW_MS + 10 * HOUR_MS + 1_000
    assert len(expire(store)[0].plan.floors) == 1
    assert readable(store, A) == []


@pytest.mark.parametrize("entries_max", [LIST_ENTRIES_MAX, 3])
def test_objects_without_living_messages_are_deleted_after_the_grace_period(
    entries_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketmq_tiered.maintenance.expire.LIST_ENTRIES_MAX", entries_max)
    store = Bucket()
    made = built(store)
    store.now_ms = NOW_MS + 50 * HOUR_MS
    found, state = expire(store)
    lists = [read_list(store, listed) for listed in state.deletion_lists if listed.reason == "expired"]
    gone = [key.decode() for key in found.objects]
    assert [key for listed in lists for key in sorted(listed)] == gone
    assert len(lists) == -(-len(gone) // entries_max)
    assert gone and found.object_bytes == sum(len(store.get(key)) for key in gone)
    assert found.shared_bytes > 0  # in objects with messages that are kept
    assert expire(store)[0].plan.rows == 0
    for hours, deleted in ((10, False), (80, True)):
        store.now_ms = NOW_MS + 50 * HOUR_MS + hours * HOUR_MS
        run_gc(store, load(store), apply=True, grace_ms=72 * HOUR_MS, clock=lambda: store.now_ms)
        assert deleted == (not {info.key for info in store.list("data/")} & set(gone))
    assert readable(store, KEPT) == bodies(made, KEPT, 0)
    report = verify_archive(store, depth="full")
    assert (report.anomalies, report.leftovers) == ([], [])


def test_pages_without_living_runs_leave_the_catalog(store: Bucket) -> None:
    made = ArchiveBuilder(
        store,
        limits=CatalogLimits(
            root_every=2, spill_runs=3, page_runs_max=4, merge_sequences=64, merge_spills=64
        ),
    )
    for hour in range(20):
        store.now_ms = NOW_MS + hour * HOUR_MS
        made.commit([Sent(A, b"x", stored_ms=store.now_ms)])
    store.now_ms = NOW_MS + 40 * HOUR_MS
    found, state = expire(store)
    assert found.dead_pages and not state.pages
    made.writer.refresh()
    made.commit([Sent(A, b"new", stored_ms=store.now_ms)])
    assert readable(store, A) == bodies(made, A, 20)


def test_a_pass_that_another_one_overtook_changes_nothing(store: Bucket) -> None:
    built(store)
    store.now_ms = NOW_MS + 15 * HOUR_MS
    state = load(store)
    stale = plan_pass(store, state, rule, clock=Clock(wall_ms=lambda: store.now_ms))
    expire(store)
    version = load(store).version
    commit_pass(store, state, stale, clock=Clock(wall_ms=lambda: store.now_ms))
    assert not stale.is_committed and load(store).version == version


def test_a_pass_during_a_compaction_changes_nothing(
    store: Bucket, made: ArchiveBuilder, tmp_path: Path
) -> None:
    """Runs that the pass counted were joined with younger ones."""
    made.writer.release()
    store.now_ms = NOW_MS + 15 * HOUR_MS
    state = load(store)
    found = plan_pass(store, state, rule, clock=Clock(wall_ms=lambda: store.now_ms))
    limits = CompactionLimits(split_bytes=1 << 20)
    (planned, *_) = plan_rounds(store, state, limits, before_version=state.version + 1)
    assert run_round(
        store, state, planned, RewriteOptions(tmp_path, 1 << 24), clock=Clock(wall_ms=lambda: store.now_ms)
    )
    commit_pass(store, state, found, clock=Clock(wall_ms=lambda: store.now_ms))
    assert not found.is_committed
    again, _ = expire(store)
    assert again.is_committed or not len(again.plan.floors)
    assert readable(store, KEPT) == bodies(made, KEPT, 0)
    assert verify_archive(store, depth="full").anomalies == []


@pytest.mark.parametrize("generation", [None, 0])
def test_a_topic_is_erased_whatever_its_age(
    store: Bucket, made: ArchiveBuilder, generation: int | None
) -> None:
    found, _ = expire(store, erase=Erasure("kept", generation))
    assert readable(store, KEPT) == [] and found.plan.rows == 12
    assert readable(store, A) == bodies(made, A, 0, 2)
    with pytest.raises(UsageError, match="has no topic unknown"):
        expire(store, erase=Erasure("unknown"))


def test_a_log_that_was_truncated_below_the_floor_starts_at_its_end(store: Bucket) -> None:
    """Its next messages have the offsets of expired ones, and are young."""
    made = built(store, 3)
    common, phys, truth = made.state, made._phys, made.truth[B]
    end, end_byte = truth.end, truth.end_byte
    made.commit([Sent(B, b"lost", stored_ms=store.now_ms)] * 3)
    store.now_ms += 50 * HOUR_MS
    expire(store)
    made.writer.refresh()
    assert readable(store, B) == []
    made.writer.append_history(common_version=common.version, phys=phys)
    made._phys, truth.end, truth.end_byte = phys, end, end_byte
    made.commit([Sent(B, b"young", stored_ms=store.now_ms)])
    assert readable(store, B) == [truth.rows[-1].record]
    assert verify_archive(store, depth="full").anomalies == []


def test_a_pass_is_not_committed_after_another_writer_has_claimed_the_archive(
    store: Bucket, made: ArchiveBuilder
) -> None:
    """Garbage collection deletes lists of an earlier epoch that no commit names."""
    store.now_ms = NOW_MS + 50 * HOUR_MS
    state, clock = made.state, Clock(wall_ms=lambda: store.now_ms)
    found = plan_pass(store, state, rule, clock=clock)
    made.restart(2)
    assert not commit_pass(store, state, found, clock=clock).deletion_lists and not found.is_committed
    found, state = expire(store)
    assert found.is_committed and state.deletion_lists


@pytest.mark.parametrize("queue", [B, QueueKey("new", 0, 0)])
def test_a_queue_whose_messages_below_a_cut_expired_ends_where_it_did_in_the_log(
    store: Bucket, queue: QueueKey
) -> None:
    made = built(store, 3)
    common, end = made.state, made.truth[queue].end if queue in made.truth else 0
    kept, gone = Sent(KEPT, b"kept", stored_ms=store.now_ms), Sent(queue, b"gone", stored_ms=store.now_ms)
    made.commit([kept, gone, kept, gone, kept, gone, kept])
    phys = made.truth[KEPT].rows[-2].phys
    row = made.state.queue(queue)
    assert row is not None
    draft = CommitDraft(
        CommitKind.MAINTENANCE, queues=[queue], floors=np.zeros(1, FLOOR_DTYPE), created_ms=NOW_MS
    )
    draft.floors[0] = (0, row["end_queue_offset"], row["row_count"])
    made.writer.append(draft)
    check, above = LogCheck(phys - 1, phys, 1), common.version + 1
    after = made.writer.append_history(
        common_version=common.version, phys=phys, check=check, above_version=above
    ).queue(queue)
    assert after is not None and after["min_queue_offset"] == after["end_queue_offset"] == end + 2


@pytest.mark.parametrize(("max_share", "stopped"), [(0.2, True), (1.0, False)])
def test_a_pass_says_whether_it_was_stopped(max_share: float, stopped: bool) -> None:
    now_ms = [NOW_MS]
    store = MemoryStore(clock=Clock(wall_ms=lambda: now_ms[0]))
    ArchiveBuilder(store).commit([Sent(QueueKey("a", 0, 0), b"message", stored_ms=NOW_MS)])
    now_ms[0] += 500 * HOUR_MS
    settings = replace(Settings(), retention=RetentionSettings(ttl="1h", max_share=max_share))
    before = load(store)
    rules = TopicRules.of(settings)
    task = ExpiryTask(
        store,
        settings,
        lambda _state: lambda topic: rules.of_topic(topic, {}),
        clock=Clock(wall_ms=lambda: now_ms[0]),
    )
    assert run_pass(task, lambda: before)
    assert (task.problem == TOO_MUCH) is stopped
    assert (load(store).version == before.version) is stopped


def task_of(store: MemoryStore, now_ms: list[int], ttl: str) -> ExpiryTask:
    settings = replace(
        Settings(), retention=RetentionSettings(ttl=ttl, max_share=0.2), gc=GcSettings(every_ms=HOUR_MS)
    )
    rules = TopicRules.of(settings)
    return ExpiryTask(
        store,
        settings,
        lambda _state: lambda topic: rules.of_topic(topic, {}),
        clock=Clock(wall_ms=lambda: now_ms[0]),
    )


def test_an_outage_does_not_stop_the_pass_after_it() -> None:
    """A commit an hour, each a twentieth of the archive; then no pass for five hours."""
    now_ms, topic = [NOW_MS], QueueKey("a", 0, 0)
    store = MemoryStore(clock=Clock(wall_ms=lambda: now_ms[0]))
    made = ArchiveBuilder(store)
    for hour in range(20):
        now_ms[0] = NOW_MS + hour * HOUR_MS
        made.commit([Sent(topic, b"message", stored_ms=now_ms[0])])
    task = task_of(store, now_ms, "20h")
    for hour, first in ((20.5, 1), (21.5, 2), (26.5, 7)):
        now_ms[0] = NOW_MS + int(hour * HOUR_MS)
        assert run_pass(task, lambda: load(store))
        queue = load(store).queue(topic)
        assert queue is not None and (task.problem, int(queue["min_queue_offset"])) == ("", first)
    fresh = task_of(store, now_ms, "20h")
    now_ms[0] += 5 * HOUR_MS
    assert run_pass(fresh, lambda: load(store)) and fresh.problem == TOO_MUCH, "it knows of no pass"
    task._rules_of = task_of(store, now_ms, "10h")._rules_of
    assert run_pass(task, lambda: load(store)) and task.problem == TOO_MUCH, (
        "a rule that changed is no outage"
    )
