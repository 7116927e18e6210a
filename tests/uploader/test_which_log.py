"""Which logs are archived, and which stop: nothing is hidden unasked, nothing uploaded twice.

Which logs continue an archive: the table of decisions, and what shows it where no bytes are left.
"""

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits
from rocketmq_tiered.maintenance.compaction_round import plan_rounds, run_round
from tests.catalog.collection import run_gc
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, backfill, state_of
from tests.uploader.small_broker import FILE_BYTES, SmallBroker
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.verify import verify_archive
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.hidden_history import list_histories
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import FencedError, LogDivergedError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_offsets
from uploader.log_rule import (
    ArchivedEnd,
    LogDecision,
    LogFacts,
    LogHead,
    LogLimits,
    LogStep,
    Shared,
    decide_log,
    misfit,
)
from uploader.offload import Environment, Offloader, OffloadIdentity

STARTED_MS = 1_700_000_000_000


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore("memory://which-log")


@pytest.fixture
def broker(tmp_path: Path) -> SmallBroker:
    made = SmallBroker(tmp_path / "own")
    made.send(200)
    return made


def follow(
    store: Path,
    memory: MemoryStore,
    limits: LogLimits | None = None,
    *,
    instance: str = "test",
    environment: Environment | None = None,
    take_over: bool = False,
) -> None:
    """What `tiered run` does until it has reached the end of the log and is stopped."""
    stop = threading.Event()
    stop.set()
    with open_broker_store(store) as opened:
        Offloader(
            opened,
            memory,
            OffloadIdentity(CLUSTER, BROKER, instance, "run"),
            SMALL,
            topic_filter=FILTER,
            offsets_source=no_offsets,
            log_limits=limits,
            environment=environment,
            take_over=take_over,
        ).run(stop, follow=True)


def shown(memory: MemoryStore) -> dict[str, int]:
    """Visible messages of each topic."""
    state = state_of(memory)
    return {
        queue.topic: int(row["row_count"])
        for queue in state.visible_queues()
        if (row := state.queue(queue)) is not None
    }


def uploaded(memory: MemoryStore) -> set[str]:
    own = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    return {info.key for prefix in ("data/", "sets/") for info in own.list(prefix)}


def refuse(store: Path, memory: MemoryStore, match: str) -> None:
    """Neither a backfill nor a run archives this log, and nothing changes."""
    before = state_of(memory).version
    for archive in (backfill, follow):
        with pytest.raises(LogDivergedError, match=match) as caught:
            archive(store, memory)
        assert caught.value.exit_code == 2 and "replace_log" in caught.value.hint
    assert state_of(memory).version == before


def test_an_emptied_store_with_one_message_stops_and_the_store_put_back_continues(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path
) -> None:
    backfill(broker.path, memory)
    keys = uploaded(memory)
    empty = SmallBroker(tmp_path / "empty", store_ms=broker.store_ms)
    empty.send(1)
    refuse(empty.path, memory, r"shares nothing with the archive.* hide 200 archived messages")
    with pytest.raises(LogDivergedError):
        follow(empty.path, memory, LogLimits(truncate_max_bytes=1))
    backfill(broker.path, memory)
    follow(broker.path, memory)
    assert uploaded(memory) == keys and shown(memory) == {"orders": 200}


@pytest.mark.parametrize("is_longer", [False, True])
def test_a_foreign_log_stops(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path, is_longer: bool
) -> None:
    backfill(broker.path, memory)
    other = SmallBroker(tmp_path / "other", port=20911)
    other.send(400 if is_longer else 50, text="other")
    refuse(other.path, memory, "shares nothing with the archive")


def test_an_older_copy_is_refused_by_a_backfill_and_bounded_in_a_run(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path
) -> None:
    backfill(broker.path, memory)
    older = broker.copy(tmp_path / "older")
    broker.send(300)
    backfill(broker.path, memory)
    with pytest.raises(LogDivergedError, match=r"older copy.* hide 300 archived messages"):
        backfill(older.path, memory)
    with pytest.raises(LogDivergedError, match=r"truncated by .*more than .* hide 300 archived messages"):
        follow(older.path, memory, LogLimits(truncate_max_bytes=100))
    assert shown(memory) == {"orders": 500}
    follow(older.path, memory, LogLimits(truncate_max_bytes=1 << 20))
    assert shown(memory) == {"orders": 200}


@pytest.mark.parametrize("is_mounted", [False, True])
def test_a_disk_that_is_not_mounted_is_waited_for(
    broker: SmallBroker, memory: MemoryStore, is_mounted: bool
) -> None:
    backfill(broker.path, memory)
    with open_broker_store(broker.path) as opened:
        shutil.rmtree(broker.path / "commitlog")
        (broker.path / "commitlog").mkdir()
        offloader = Offloader(
            opened,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            SMALL,
            topic_filter=FILTER,
            offsets_source=no_offsets,
        )
        with pytest.raises(UnavailableError, match="no commitlog file"):
            offloader.run(threading.Event(), follow=True)
    assert shown(memory) == {"orders": 200}


def test_a_sidecar_that_was_away_longer_than_the_broker_keeps_files_continues_automatically(
    broker: SmallBroker, memory: MemoryStore
) -> None:
    backfill(broker.path, memory)
    broker.send(400)
    broker.expire(broker.phys // FILE_BYTES - 2)
    follow(broker.path, memory)
    backfill(broker.path, memory)
    state = state_of(memory)
    assert len(state.log_histories) == 0 and len(state.gaps) == 1
    assert state.visible_queues() == [queue for queue, _ in state.queues()]


@pytest.mark.parametrize(
    ("port", "first_offset", "store_ms", "why"),
    [
        (20911, 700, STARTED_MS + 10**6, "its records are of 127.0.0.1:20911"),
        (10911, 100, STARTED_MS + 10**6, "offsets go back in 1 queue: orders queue 0 begins at 100"),
        (10911, 700, STARTED_MS - 10**6, "its first record is older"),
    ],
)
def test_a_log_that_begins_above_the_archives_end_must_fit(
    broker: SmallBroker,
    memory: MemoryStore,
    tmp_path: Path,
    port: int,
    first_offset: int,
    store_ms: int,
    why: str,
) -> None:
    backfill(broker.path, memory)
    other = SmallBroker(
        tmp_path / "other", port=port, start_phys=1 << 20, first_offset=first_offset, store_ms=store_ms
    )
    other.send(100, text="other")
    refuse(other.path, memory, why)
    assert shown(memory) == {"orders": 200}
    backfill(broker.path, memory)


@pytest.mark.parametrize("port", [10911, 20911])
def test_the_same_brokers_log_that_does_not_fit_continues_when_asked(
    broker: SmallBroker, memory: MemoryStore, port: int
) -> None:
    """While the sidecar was away a topic was recreated, the address changed, and all that could agree was deleted."""
    broker.send(30, "audit")
    backfill(broker.path, memory)
    keys, archived_files = uploaded(memory), broker.phys // FILE_BYTES + 1
    broker.port = port
    broker.recreate("orders", 0)
    broker.send(150, "orders")
    broker.send(40, "audit")
    broker.expire(archived_files)
    refuse(broker.path, memory, r"no bytes in common with the archive.* hide 230 archived messages")
    with pytest.raises(LogDivergedError) as caught:
        backfill(broker.path, memory)
    assert "--same-broker) continues, and hides 200 of recreated topics" in caught.value.hint
    follow(broker.path, memory, LogLimits(same_broker=True))
    backfill(broker.path, memory, same_broker=True)
    state = state_of(memory)
    assert len(state.log_histories) == 0 and uploaded(memory) > keys
    assert shown(memory)["audit"] == 70
    generations = {key: int(row["row_count"]) for key, row in state.queues() if key.topic == "orders"}
    assert generations[QueueKey("orders", 0, 0)] == 200 and generations[QueueKey("orders", 0, 1)] > 0
    broker.send(5, "audit")
    backfill(broker.path, memory)
    assert shown(memory)["audit"] == 75, "the answer is needed once"
    own = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    assert verify_archive(own, depth="full").anomalies == []


def test_stores_of_two_brokers_with_the_same_names_are_not_mixed(
    real_store: Callable[[str], Path], memory: MemoryStore
) -> None:
    backfill(real_store("F") / "store", memory)
    before = shown(memory)
    refuse(real_store("G") / "store", memory, "the broker's log")
    assert shown(memory) == before


def idle_owner(memory: MemoryStore) -> int:
    """Another sidecar claims the archive and is idle; its epoch."""
    made = CatalogWriter(
        PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)),
        cluster=CLUSTER,
        broker=BROKER,
        instance="owner",
        kind="run",
        clock=Clock(wall_ms=lambda: STARTED_MS),
    )
    return made.claim(take_over=True).epoch


def always(state: CatalogState, log_end_phys: int | None) -> bool:
    """The broker of a standby lags for ever."""
    return True


@pytest.mark.parametrize("limits", [None, LogLimits(replace_log=True)])
def test_an_idle_owner_is_not_fenced_by_a_longer_log_of_another_broker(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path, limits: LogLimits | None
) -> None:
    backfill(broker.path, memory)
    epoch = idle_owner(memory)
    other = SmallBroker(tmp_path / "other", port=20911)
    other.send(400, text="other")
    with pytest.raises(LogDivergedError, match="another broker of this name owns the archive"):
        follow(other.path, memory, limits, instance="standby", environment=Environment(may_take_over=always))
    assert state_of(memory).epoch == epoch
    if limits is None:
        with pytest.raises(LogDivergedError, match="shares nothing"):
            follow(other.path, memory, instance="standby", take_over=True)
        assert state_of(memory).epoch == epoch


def test_an_owner_that_starts_again_takes_nothing_over_from_itself(
    broker: SmallBroker, memory: MemoryStore
) -> None:
    backfill(broker.path, memory)
    epoch = idle_owner(memory)
    broker.send(50)
    asked: list[CatalogState] = []

    def may_take_over(state: CatalogState, log_end_phys: int | None) -> bool:
        asked.append(state)
        return True

    follow(broker.path, memory, instance="owner", environment=Environment(may_take_over=may_take_over))
    assert not asked and state_of(memory).epoch == epoch + 1


def test_a_standby_that_holds_the_archives_log_takes_over_after_a_fail_over(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path
) -> None:
    backfill(broker.path, memory)
    epoch = idle_owner(memory)
    slave = broker.copy(tmp_path / "slave")
    slave.port = 30911
    with pytest.raises(FencedError):
        follow(slave.path, memory, instance="standby")
    slave.send(50)
    follow(slave.path, memory, instance="standby", environment=Environment(may_take_over=always))
    backfill(slave.path, memory, instance="standby")
    assert state_of(memory).epoch > epoch and shown(memory) == {"orders": 250}
    assert len(state_of(memory).log_histories) == 0


def listed(memory: MemoryStore) -> list[int]:
    """Hidden messages of each log history."""
    own = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    return [found.messages for found in list_histories(own, load(own))]


def test_a_store_put_back_after_an_empty_one_replaced_it_is_visible_without_a_second_upload(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path
) -> None:
    backfill(broker.path, memory)
    keys = uploaded(memory)
    empty = SmallBroker(tmp_path / "empty", store_ms=broker.store_ms)
    empty.send(3)
    backfill(empty.path, memory, replace_log=True)
    assert shown(memory) == {"orders": 3} and listed(memory) == [200, 0]
    new_keys = uploaded(memory)
    backfill(broker.path, memory)
    assert shown(memory) == {"orders": 200} and listed(memory) == [0, 3, 0]
    assert uploaded(memory) == new_keys > keys
    broker.send(10)
    backfill(broker.path, memory)
    backfill(empty.path, memory)
    assert shown(memory) == {"orders": 3} and listed(memory) == [0, 0, 210, 0]
    backfill(broker.path, memory)
    assert shown(memory) == {"orders": 210} and listed(memory) == [0, 0, 0, 3, 0]
    own = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    assert verify_archive(own, depth="full").anomalies == []


def rows_uploaded(memory: MemoryStore) -> int:
    """Rows in all data objects."""
    own = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    sizes = {info.key: info.size_bytes for info in own.list("")}
    return sum(
        int(SegmentIndex(key, sizes[key], own.get_range(key, 0, sizes[key])).runs["rows"].sum())
        for key in uploaded(memory)
    )


@pytest.mark.parametrize("earlier", [0, 90])
@pytest.mark.parametrize("is_joined", [False, True])
def test_a_log_that_lost_its_tail_inside_a_commit_continues_at_the_last_common_record(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path, earlier: int, is_joined: bool
) -> None:
    """No message is uploaded twice, and the longer log can be put back."""
    if earlier:
        backfill(broker.path, memory)
        broker.send(earlier)
    broker.send(20, "audit")
    lost = broker.copy(tmp_path / "lost")
    broker.send(80)
    broker.send(5, "new")
    backfill(broker.path, memory)
    own = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    if is_joined:
        state = load(own)
        for planned in plan_rounds(own, state, CompactionLimits(), before_version=state.version + 1):
            run_round(
                own, state, planned, RewriteOptions(tmp_path, 1 << 24), clock=Clock(wall_ms=own.clock_ms)
            )
            break
    before = rows_uploaded(memory)
    with pytest.raises(LogDivergedError, match=r"older copy.* hide 85 archived messages"):
        backfill(lost.path, memory)
    lost.send(30, text="other")
    follow(lost.path, memory)
    backfill(lost.path, memory)
    assert shown(memory) == {"orders": 230 + earlier, "audit": 20}
    assert rows_uploaded(memory) == before + 30 and listed(memory)[-2:] == [85, 0]
    assert verify_archive(own, depth="full").anomalies == []
    backfill(lost.path, memory)
    assert len(state_of(memory).log_histories) == 1
    backfill(broker.path, memory)
    assert shown(memory) == {"orders": 280 + earlier, "audit": 20, "new": 5}
    assert rows_uploaded(memory) == before + 30 and listed(memory)[-2:] == [30, 0]
    assert verify_archive(own, depth="full").anomalies == []
    backfill(lost.path, memory)
    assert shown(memory) == {"orders": 230 + earlier, "audit": 20}
    run_gc(own, load(own), apply=True, grace_ms=0, diverged_grace_ms=0, clock=lambda: own.clock_ms() + 10)
    found = verify_archive(own, depth="full")
    assert (found.anomalies, found.leftovers, rows_uploaded(memory) >= 250 + earlier) == ([], [], True)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_longer_log_put_back_after_an_older_copy(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path, is_used: bool
) -> None:
    backfill(broker.path, memory)
    older = broker.copy(tmp_path / "older")
    broker.send(300)
    backfill(broker.path, memory)
    if is_used:
        older.send(20, text="other")
    backfill(older.path, memory, replace_log=True)
    used = 20 if is_used else 0
    assert shown(memory) == {"orders": 200 + used} and listed(memory) == [300, 0]
    keys = uploaded(memory)
    backfill(broker.path, memory)
    assert shown(memory) == {"orders": 500} and listed(memory) == [0, used, 0]
    assert uploaded(memory) == keys
    own = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    assert verify_archive(own, depth="full").anomalies == []


def test_after_its_grace_a_hidden_history_is_archived_again(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path
) -> None:
    backfill(broker.path, memory)
    older = broker.copy(tmp_path / "older")
    broker.send(300)
    backfill(broker.path, memory)
    backfill(older.path, memory, replace_log=True)
    own = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    run_gc(own, load(own), apply=True, grace_ms=0, diverged_grace_ms=0, clock=lambda: own.clock_ms() + 10)
    assert listed(memory) == [0, 0]
    backfill(broker.path, memory)
    assert shown(memory) == {"orders": 500}
    assert verify_archive(own, depth="full").anomalies == []


def test_a_standby_with_an_earlier_log_does_not_take_over_by_lag(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path
) -> None:
    backfill(broker.path, memory)
    other = SmallBroker(tmp_path / "other", port=20911)
    other.send(5, text="other")
    backfill(other.path, memory, replace_log=True)
    epoch = idle_owner(memory)
    broker.send(5)
    with pytest.raises(LogDivergedError, match="another broker of this name"):
        follow(broker.path, memory, instance="standby", environment=Environment(may_take_over=always))
    assert state_of(memory).epoch == epoch


def test_a_standby_whose_log_diverged_does_not_take_over_by_lag(
    broker: SmallBroker, memory: MemoryStore, tmp_path: Path
) -> None:
    """As the former master that comes back after a fail-over, and takes messages too."""
    backfill(broker.path, memory)
    former = broker.copy(tmp_path / "former")
    broker.send(50)
    backfill(broker.path, memory)
    epoch, lags = idle_owner(memory), Environment(may_take_over=always)
    with pytest.raises(FencedError):
        follow(former.path, memory, instance="standby", environment=lags)
    former.send(80, text="other")
    why = r"another writer owns .* diverged .* hide 50 archived messages"
    with pytest.raises(LogDivergedError, match=why) as caught:
        follow(former.path, memory, instance="standby", environment=lags)
    assert "--take-over" in caught.value.hint
    assert state_of(memory).epoch == epoch and shown(memory) == {"orders": 250}
    follow(former.path, memory, instance="standby", take_over=True)
    backfill(former.path, memory, instance="standby")
    assert shown(memory) == {"orders": 280} and listed(memory) == [50, 0]


RUN, BACKFILL = LogLimits(truncate_max_bytes=100), LogLimits()
END = ArchivedEnd({("a", 0): 50, ("b", 1): 7}, 1_000, frozenset({"10.0.0.1:10911"}))
HEAD = LogHead({("a", 0): 60, ("b", 1): 7}, 1_000, "10.0.0.1:10911")

TABLE = [
    (LogFacts(Shared.END), RUN, LogStep.CONTINUE, ""),
    (LogFacts(Shared.END_DELETED), RUN, LogStep.CONTINUE, ""),
    (
        LogFacts(Shared.END_DELETED, misfit="it is older"),
        RUN,
        LogStep.STOP,
        "no bytes in common with the archive, and",
    ),
    (LogFacts(Shared.END_DELETED, misfit="it is older"), BACKFILL, LogStep.STOP, "it is older"),
    (LogFacts(Shared.EARLIER, lost_bytes=100), RUN, LogStep.NEW_HISTORY, ""),
    (
        LogFacts(Shared.EARLIER, lost_bytes=101),
        RUN,
        LogStep.STOP,
        r"101 bytes, more than 100 bytes",
    ),
    (LogFacts(Shared.EARLIER, lost_bytes=101), BACKFILL, LogStep.NEW_HISTORY, ""),
    (LogFacts(Shared.EARLIER, is_older_copy=True), BACKFILL, LogStep.STOP, "an older copy"),
    (LogFacts(Shared.EARLIER_DELETED, lost_bytes=1), RUN, LogStep.NEW_HISTORY, ""),
    (LogFacts(Shared.EARLIER_DELETED, lost_bytes=101), RUN, LogStep.STOP, "more than 100 bytes"),
    (LogFacts(Shared.EARLIER_DELETED, misfit="it is older"), RUN, LogStep.STOP, "it is older"),
    (LogFacts(Shared.NOTHING), RUN, LogStep.STOP, "shares nothing"),
    (LogFacts(Shared.NOTHING), BACKFILL, LogStep.STOP, "shares nothing"),
]


@pytest.mark.parametrize(("facts", "limits", "step", "why"), TABLE)
def test_bytes_that_cannot_be_compared_prove_nothing(
    facts: LogFacts, limits: LogLimits, step: LogStep, why: str
) -> None:
    found = decide_log(facts, limits)
    assert found.step is step and why in found.why and bool(found.why) == (step is LogStep.STOP)
    same = decide_log(facts, LogLimits(False, limits.truncate_max_bytes, same_broker=True))
    assert same == decide_log(replace(facts, misfit=""), limits)
    allowed = decide_log(facts, LogLimits(True, limits.truncate_max_bytes))
    assert allowed.step is (LogStep.CONTINUE if step is LogStep.CONTINUE else LogStep.NEW_HISTORY)
    assert allowed.is_foreign == found.is_foreign


def test_a_log_is_foreign_if_nothing_shows_that_it_is_this_brokers() -> None:
    foreign = [facts for facts, limits, *_ in TABLE if decide_log(facts, limits).is_foreign]
    assert {facts.shared for facts in foreign} == {Shared.NOTHING, Shared.END_DELETED, Shared.EARLIER_DELETED}
    assert all(facts.misfit or facts.shared is Shared.NOTHING for facts in foreign)
    assert decide_log(LogFacts(Shared.END), RUN) == LogDecision(LogStep.CONTINUE)


MISFITS = [
    (HEAD, ""),
    (LogHead({("a", 0): 50, ("new", 0): 0}, 1_000, "10.0.0.1:10911"), ""),
    (LogHead(), "no record"),
    (LogHead(HEAD.begins, 999, HEAD.host), "older than the archive's newest"),
    (
        LogHead(HEAD.begins, 1_000, "10.0.0.2:10911"),
        "are of 10.0.0.2:10911, but those of the archive of 10.0.0.1",
    ),
    (LogHead({("c", 0): 0}, 1_000, HEAD.host), "none of the archive's queues"),
    (LogHead({("a", 0): 49, ("b", 1): 7}, 1_000, HEAD.host), "a queue 0 begins at 49 there, and ends at 50"),
]


@pytest.mark.parametrize(("head", "why"), MISFITS)
def test_the_rest_fits_if_offsets_times_and_the_host_do(head: LogHead, why: str) -> None:
    found = misfit(END, head)
    assert why in found and bool(found) == bool(why)


def test_an_archive_without_queues_says_nothing_about_them() -> None:
    assert misfit(ArchivedEnd({}, 0, END.hosts), HEAD) == ""
    assert "of none" in misfit(ArchivedEnd({}, 0, frozenset()), HEAD)
