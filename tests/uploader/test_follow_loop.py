"""The dispatch loop never waits for the object store.

Pacing of the dispatch loop.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, backfill, following
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tests.uploader.dispatch_bench import FILE_BYTES, Bench
from tests.uploader.living_broker import LivingBroker
from tiered.broker_store.pins import PinKeeper
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.model.tables import GapReason
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_offsets
from uploader.follow_loop import Every
from uploader.offload import Offloader, OffloadIdentity

TIMEOUT_S = 60.0


def test_messages_do_not_wait_for_the_brokers_tables(real_store: Callable[[str], Path]) -> None:
    released = threading.Event()
    memory = MemoryStore("memory://tables-stall")
    stalling = FaultStore(
        memory, [FaultRule(Fault.STALLED, keys="*/state/*")], wait=lambda _s: released.wait(TIMEOUT_S)
    )
    with open_broker_store(real_store("F") / "store") as store:
        offloader = Offloader(
            store,
            stalling,
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            SMALL,
            topic_filter=FILTER,
            offsets_source=no_offsets,
        )
        with following(offloader, TIMEOUT_S / 2) as reached:
            status = reached(lambda status: 0 < status.committed_phys == status.read_phys)
            assert not released.is_set()
            released.set()
    assert status is not None and 0 < status.committed_phys == status.read_phys, (
        "the last batch was not closed by age while a table's PUT stalled"
    )
    assert check_against_truth(memory, real_store("F"), "F") > 10_000


@pytest.fixture
def living(tmp_path: Path) -> Iterator[tuple[Path, MemoryStore, LivingBroker]]:
    """A log of two files beside a broker that runs, and an archive of the first 100 messages."""
    store = tmp_path / "store"
    (store / "commitlog").mkdir(parents=True)
    (store / "lock").touch()
    bench = Bench(store / "commitlog")
    bench.write(100)
    memory = MemoryStore("memory://living")
    backfill(store, memory)
    bench.write(250)
    assert FILE_BYTES < bench.end < 2 * FILE_BYTES
    broker = LivingBroker(store)
    broker.end_phys = bench.end
    yield store, memory, broker
    broker.close()


def follow_to_the_end(
    store: Path, memory: MemoryStore, broker: LivingBroker, *, pins: PinKeeper | None = None
) -> str:
    """Archives everything, or fails. What is said of pins."""
    with open_broker_store(store) as opened:
        offloader = Offloader(
            opened,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            replace(SMALL, batch_age_ms=100),
            topic_filter=FILTER,
            offsets_source=broker.offsets,
            pins=pins,
        )
        with following(offloader, TIMEOUT_S / 3) as reached:
            status = reached(lambda status: status.committed_phys == broker.end_phys)
    assert load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).cursor.phys == broker.end_phys
    return status.pins.problem if status is not None and status.pins is not None else ""


def test_following_continues_after_a_bound_inside_a_record(
    living: tuple[Path, MemoryStore, LivingBroker],
) -> None:
    """A broker under load counts the end of its log and the lag of its dispatch at different times."""
    _, _, broker = living
    broker.behind_bytes = 10
    timer = threading.Timer(2, setattr, (broker, "behind_bytes", 0))
    timer.start()
    try:
        follow_to_the_end(*living)
    finally:
        timer.cancel()


def test_a_file_that_was_deleted_under_the_cursor_is_passed_over(
    living: tuple[Path, MemoryStore, LivingBroker],
) -> None:
    """However little the broker has written since: a quiet broker may keep no more than that for days."""
    store, memory, _ = living
    (store / "commitlog" / f"{0:020d}").unlink()
    follow_to_the_end(*living)
    state = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)))
    assert [GapReason(int(gap["reason"])) for gap in state.gaps] == [GapReason.BROKER_DELETED]


def test_zeros_below_the_brokers_word_are_passed_over(
    living: tuple[Path, MemoryStore, LivingBroker],
) -> None:
    """A block of the disk that came back empty, exactly where reading continues."""
    store, memory, _ = living
    cursor = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).cursor.phys
    with (store / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(cursor)
        file.write(bytes(1000))
    follow_to_the_end(*living)


def test_once_per_period_and_the_first_time_at_once() -> None:
    every = Every(100)
    assert [every.is_due(now_ms) for now_ms in (50, 51, 149, 150, 151, 1000)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    """Else a restarted broker, its bound and its new files would go unseen until the old time comes again."""
    every = Every(100)
    assert every.is_due(3_600_000)
    assert every.is_due(0)
    assert not every.is_due(99)
    assert every.is_due(100)
