"""A broker that used offsets of a queue twice: what it serves is visible, whole, at the broker's offsets, whatever the
headers of records say, and everything else is counted."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.repair.repair import apply_repair, plan_repair
from tests.archive.queue_reader import QueueReader, records_of
from tests.broker_store.opened_store import consume_queues_of
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, archive_of, backfill
from tests.maintenance.damage import flip
from tests.maintenance.scrubbed import Scrubbed
from tests.uploader.small_broker import SmallBroker
from tiered.archive.verify import verify_archive
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load, read_commit
from tiered.catalog.commit import CommitKind
from tiered.catalog.hidden_history import list_histories
from tiered.catalog.pages import RunIndex
from tiered.catalog.repeated_offsets import repeated_offsets
from tiered.catalog.state import CatalogState
from tiered.errors import UnavailableError
from tiered.formats.keys import catalog_key
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from uploader.header_check import HeaderCheck
from uploader.log_batch import LogBatch

ORDERS = QueueKey("orders", 0, 0)
Step = Callable[[SmallBroker], object]
LOST_UNIT: list[Step] = [
    lambda broker: broker.send(5),
    SmallBroker.lose_unit,
    lambda broker: broker.send(4),
    SmallBroker.restart,
    lambda broker: broker.send(3, text="new"),
]
LOST_TAIL: list[Step] = [
    lambda broker: broker.send(10),
    lambda broker: broker.restart(lost_units=2),
    lambda broker: broker.send(5, text="new"),
]
TWICE = [*LOST_UNIT, *LOST_UNIT[1:]]
SETTINGS = SMALL.__class__(batch_bytes=4096, split_bytes=1024, block_bytes=1024, root_every=2)


def check(broker: SmallBroker, memory: MemoryStore, aside: int) -> CatalogState:
    """Every message that the broker serves, at its offset; every other one counted."""
    archive = archive_of(memory)
    state = load(archive)
    visible = {ORDERS, QueueKey("other", 0, 0), *([QueueKey(broker.lmq, 0, 0)] if broker.lmq else [])}
    assert {*state.visible_queues()} == visible
    with open_broker_store(broker.path) as store:
        index = consume_queues_of(store)
        for key in visible:
            units = index.units(*key[:2], index.min_offset(*key[:2]), 1000)
            served = [
                (
                    int(u["queue_offset"]),
                    int(u["phys"]),
                    store.commit_log.read(int(u["phys"]), int(u["size"])),
                )
                for u in units
            ]
            assert list(records_of(QueueReader(archive, state, key))) == served, key
    assert not len(state.gaps)
    report = verify_archive(archive, depth="full")
    assert not report.anomalies, report.anomalies
    hidden = sum(one.messages for one in list_histories(archive, state) if not one.is_current)
    assert repeated_offsets(state).get(ORDERS, 0) + hidden >= aside
    return state


def played(tmp_path: Path, story: list[Step], batch: int, every: int) -> tuple[SmallBroker, MemoryStore]:
    """A broker after ``story``, and its archive: a backfill after each ``every``-th step, and after the last."""
    broker, memory = SmallBroker(tmp_path / "store"), MemoryStore("memory://twice")
    broker.batch = batch
    for number, step in enumerate(story, 1):
        step(broker)
        broker.send(2, "other")
        if number % every == 0 or number == len(story):
            backfill(broker.path, memory, settings=SETTINGS)
    return broker, memory


STORIES = [(LOST_UNIT, 1, 0), (LOST_TAIL, 2, 0), (TWICE, 2, 0), (LOST_TAIL, 6, 3)]


@pytest.mark.parametrize(("story", "aside", "batch"), STORIES)
@pytest.mark.parametrize("every", [1, 2, 3, 99])
def test_what_the_broker_serves_is_archived_at_its_offsets(
    tmp_path: Path, story: list[Step], aside: int, batch: int, every: int
) -> None:
    broker, memory = played(tmp_path, story, batch, every)
    state = check(broker, memory, aside)
    broker.send(4)
    backfill(broker.path, memory, settings=SETTINGS)
    assert check(broker, memory, aside).cursor.history == state.cursor.history


@pytest.mark.parametrize(("story", "aside", "batch"), STORIES)
@pytest.mark.parametrize("every", [1, 2, 99])
def test_scrub_saves_lost_objects_or_names_them_where_offsets_of_records_are_not_those_served(
    tmp_path: Path, story: list[Step], aside: int, batch: int, every: int
) -> None:
    broker, memory = played(tmp_path, story, batch, every)
    archive, state = archive_of(memory), load(archive_of(memory))
    keys = {*RunIndex(archive).runs_of(state, ORDERS).object_keys}
    whole = {key: archive.get(key) for key in keys}
    archive.delete([*keys])
    scrub = Scrubbed(archive, CommitLog([broker.path / "commitlog"]))
    scrub.run()
    assert scrub.task.status.damaged < len(keys) or every > 1
    for key in {found.object_key for found in scrub.task.unreadable}:
        archive.put_if_absent(key, [whole[key]])
    check(broker, memory, aside)


def test_a_writer_that_ends_between_the_cut_and_reading_again_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, memory = SmallBroker(tmp_path / "store"), MemoryStore("memory://twice")
    for step in LOST_UNIT:
        step(broker)
        broker.send(2, "other")
        with monkeypatch.context() as patched:
            if step is LOST_UNIT[-1]:
                patched.setattr(HeaderCheck, "read_again", fails)
            with suppress(UnavailableError):
                backfill(broker.path, memory, settings=SETTINGS)
    assert load(archive_of(memory)).cursor.history == 2
    backfill(broker.path, memory, settings=SETTINGS)
    assert check(broker, memory, 1).cursor.history == 2


def test_a_log_that_is_truncated_later_keeps_what_both_have(tmp_path: Path) -> None:
    broker, memory = SmallBroker(tmp_path / "store"), MemoryStore("memory://twice")
    for step in LOST_UNIT:
        step(broker)
        broker.send(2, "other")
        backfill(broker.path, memory, settings=SETTINGS)
    shorter = broker.copy(tmp_path / "shorter")
    broker.send(5)
    broker.send(5, "other")
    backfill(broker.path, memory, settings=SETTINGS)
    shorter.send(1, "other")
    shorter.send(7, text="after the loss")
    backfill(shorter.path, memory, settings=SETTINGS, replace_log=True)
    check(shorter, memory, 1)
    backfill(broker.path, memory, settings=SETTINGS, replace_log=True)
    check(broker, memory, 1)
    for cut in (LOST_TAIL[1:], LOST_UNIT[1:]):
        first = broker.copy(tmp_path / f"{len(cut)}")
        for step in cut:
            step(broker)
            backfill(broker.path, memory, settings=SETTINGS, replace_log=True)
        check(broker, memory, 1)
        first.send(2, text="a third log")
        backfill(first.path, memory, settings=SETTINGS, replace_log=True)
        check(first, memory, 1)
        broker = first


def fails(*_: object) -> Iterator[LogBatch]:
    raise UnavailableError("killed")


def test_a_queue_that_was_shifted_before_its_archive_began_has_no_gap(tmp_path: Path) -> None:
    broker, memory = SmallBroker(tmp_path / "store"), MemoryStore("memory://twice")
    broker.send(40)
    broker.lose_unit()
    broker.send(150)
    broker.send(2, "other")
    broker.expire(1)
    backfill(broker.path, memory, settings=SETTINGS)
    broker.restart()
    broker.send(3, text="new")
    backfill(broker.path, memory, settings=SETTINGS)
    check(broker, memory, 1)


@pytest.mark.parametrize("loses_unit", [True, False])
@pytest.mark.parametrize("is_archived", [True, False])
def test_lmqs_move_with_the_queues_that_they_refer_to(
    tmp_path: Path, loses_unit: bool, is_archived: bool
) -> None:
    """A broker that had its queues in RocksDB for a while gave LMQs there the offsets that it counted; those in files,
    which are not visible until then, have other ones."""
    broker, memory = SmallBroker(tmp_path / "store"), MemoryStore("memory://twice")
    broker.lmq = "%LMQ%one"
    broker.send(5)
    broker.send(2, "other")
    backfill(broker.path, memory, settings=SETTINGS)
    if loses_unit:
        broker.lose_unit()
    broker.send(30)
    queues = broker.path / "consumequeue"
    queues.rename(tmp_path / "invisible")
    if is_archived:
        backfill(broker.path, memory, settings=SETTINGS)
    (tmp_path / "invisible").rename(queues)
    for _ in range(2):
        broker.restart()
        broker.send(2, "other")
        broker.send(3, text="new")
        backfill(broker.path, memory, settings=SETTINGS)
        check(broker, memory, int(loses_unit))
    broker.send(4)
    state = load(archive_of(memory))
    backfill(broker.path, memory, settings=SETTINGS)
    assert check(broker, memory, int(loses_unit)).cursor.history == state.cursor.history


def test_what_is_set_aside_stays_in_lmqs(tmp_path: Path) -> None:
    broker, memory = SmallBroker(tmp_path / "store"), MemoryStore("memory://twice")
    broker.lmq = "%LMQ%one"
    broker.send(5)
    broker.send(2, "other")
    backfill(broker.path, memory, settings=SETTINGS)
    broker.send(2)
    broker.restart(lost_units=1)
    broker.send(3, text="new")
    backfill(broker.path, memory, settings=SETTINGS)
    check(broker, memory, 1)


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("recreates", [True, False])
def test_what_a_repair_found_above_the_place_in_the_log_is_what_the_log_has_there(
    tmp_path: Path, batch: int, has_units: bool, is_cut: bool, recreates: bool
) -> None:
    broker, memory = SmallBroker(tmp_path / "store"), MemoryStore("memory://again")
    broker.batch = batch
    broker.send(5)
    backfill(broker.path, memory, settings=SETTINGS)
    archive, before = archive_of(memory), load(archive_of(memory))
    cut = broker.copy(tmp_path / "cut")
    broker.send(2)
    broker.send(1, "SCHEDULE_TOPIC_XXXX")  # is not archived: the repair does not know what is there
    if recreates:
        broker.recreate("orders", 0)
    broker.send(2)
    backfill(broker.path, memory, settings=SETTINGS)
    versions = range(before.version + 1, load(archive).version + 1)
    for version in (one for one in versions if read_commit(archive, one).draft.kind == CommitKind.APPEND):
        flip(archive, catalog_key(version), 40)
    apply_repair(plan_repair(archive, (CLUSTER, BROKER), 1_800_000_000_000, applies=True))
    assert load(archive).cursor.phys == before.cursor.phys
    broker = cut if is_cut else broker
    if not has_units:
        for path in broker.path.glob("*consumequeue"):
            shutil.rmtree(path)
    broker.send(1, "other")
    backfill(broker.path, memory, settings=SETTINGS)
    state = load(archive)
    orders = QueueKey("orders", 0, int(recreates and not is_cut))
    assert {*state.visible_queues()} == {orders, QueueKey("other", 0, 0)}
    count = 5 if is_cut else 2 if recreates else 9
    assert sum(1 for _ in records_of(QueueReader(archive, state, orders))) == count
    assert verify_archive(archive, depth="full").anomalies == []
