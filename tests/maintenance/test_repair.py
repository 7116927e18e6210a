"""One damaged object is never the end: a repair restores every message that something still has."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.repair.repair import apply_repair, plan_repair
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, backfill
from tests.maintenance.damage import flip
from tests.maintenance.damaged_archive import (
    BOTH,
    NOW_MS,
    Sound,
    aged_archive,
    clone,
    compacted_archive,
    empty_cycle,
    messages,
    writer_of,
)
from tests.sweeps import sweep
from tests.uploader.small_broker import SmallBroker
from tiered.archive.verify import verify_archive
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import LogCheck
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import FencedError, UnavailableError
from tiered.formats.keys import archive_prefix, catalog_key
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """Objects, compacted ones, pages, roots, deletion lists."""
    return compacted_archive(tmp_path_factory.mktemp("spool"))


@pytest.mark.parametrize(
    "kind",
    sweep(["commit", "root", "page", "list", "tail", "block"], fast=["commit", "block"], rest="integration"),
)
def test_one_flipped_bit(sound: Sound, kind: str) -> None:
    """One of the newest, another one in each run; all of them: tests/soak/test_repair.py."""
    sound.flipped_and_repaired(kind, random.choice(sound.places()[kind][-8:]))


@pytest.mark.parametrize("gone", sweep(["catalog/", "pages/", BOTH], fast=[BOTH], rest="integration"))
def test_a_catalog_that_is_gone(sound: Sound, gone: str) -> None:
    assert sound.robbed_and_repaired(gone).lost == []


@pytest.mark.parametrize("kind", ["commit", "page"])
def test_the_root_of_a_repair_is_collected_as_others_are(sound: Sound, kind: str) -> None:
    """When newer roots have taken its place the archive is sound without it, whether its chain was broken or not."""
    store = clone(sound.store)
    flip(store, *sound.places()[kind][-1])
    apply_repair(plan_repair(store, sound.names, NOW_MS, applies=True))
    writer = writer_of(store, sound.names, "next", root_every=4)
    for _ in range(20):
        writer.append(empty_cycle(writer.state))
    roots = [key for key in load(store).pending_deletions if key.startswith("pages/repair-")]
    assert roots, "it is garbage"
    store.delete(roots)
    assert verify_archive(store, depth="full").anomalies == []


@pytest.mark.integration
@pytest.mark.parametrize("gone", ["catalog/", "pages/", BOTH])
def test_an_aged_archive_whose_catalog_is_gone(gone: str, tmp_path: Path) -> None:
    """What had expired may be visible again, until it expires. Without any root, offsets that a cut of the log had
    removed are named as lost too."""
    repair = aged_archive(tmp_path).robbed_and_repaired(gone)
    assert repair.lost_messages == 0 or "pages/" in gone, repair.lost


@pytest.mark.integration
def test_entries_of_an_lmq_come_from_their_messages(tmp_path: Path) -> None:
    """An object of an LMQ has nothing but a tail."""
    aged = aged_archive(tmp_path)
    place = next(place for place in aged.places()["tail"] if "LMQ" in place[0])
    assert aged.flipped_and_repaired("tail", place).lost == []


@pytest.mark.parametrize("damaged", [-4, -1, 0], ids=["a commit below", "the one before", "the newest"])
def test_what_was_cut_before_a_commit_named_it_does_not_come_back(damaged: int) -> None:
    """An upload was left behind; the log was cut below it, and grew over its range with messages of another queue."""
    a, b = QueueKey("a", 0, 0), QueueKey("b", 0, 0)
    made, left = (ArchiveBuilder(MemoryStore(), limits=CatalogLimits(root_every=99)) for _ in range(2))
    for _ in range(4):
        for one in (made, left):
            one.commit([Sent(a), Sent(b)])
    left.commit([Sent(a, b"cut"), Sent(a, bytes(5_000)), Sent(a, b"cut, above the new end")])
    made.store.put_if_absent(left.keys[-1], [left.store.get(left.keys[-1])])
    made.restart(2)
    for _ in range(3):
        made.commit([Sent(b, bytes(700))])
    flip(made.store, catalog_key(made.state.version + damaged), 60)
    repair = plan_repair(made.store, ("cluster", "broker"), NOW_MS, applies=True)
    apply_repair(repair)
    found = messages(made.store)
    assert (list(found[a]), list(found[b])) == ([*range(4)], [*range(7)]), repair.notes


def test_an_object_that_a_cut_of_the_log_divided_is_not_in_quarantine() -> None:
    """Another damage makes a repair look for messages in all objects."""
    a, b = QueueKey("a", 0, 0), QueueKey("b", 0, 0)
    made = ArchiveBuilder(MemoryStore(), limits=CatalogLimits(root_every=3, spill_runs=6, page_runs_max=4))
    for _ in range(8):
        common = made.commit([Sent(a), Sent(b)])
    made.commit([Sent(a), Sent(b), Sent(a), Sent(b)])
    phys, above = made.truth[a].rows[-1].phys, made.state.version
    made.restart(2)
    state = made.writer.append_history(
        common_version=common.version, phys=phys, check=LogCheck(phys - 1, phys, 1), above_version=above
    )
    key = state.pages[0].key.partition(":")[0]
    flip(made.store, key, len(made.store.get(key)) // 2)
    apply_repair(plan_repair(made.store, ("cluster", "broker"), NOW_MS, applies=True))
    assert made.keys[-1] not in load(made.store).pending_deletions
    assert {queue: len(rows) for queue, rows in messages(made.store).items()} == {a: 9, b: 9}


def test_a_paused_writer_cannot_commit(sound: Sound) -> None:
    """The catalog is lost while it is paused: also if its version is beyond what anything names."""
    store = clone(sound.store)
    paused = writer_of(store, sound.names, "paused")
    for _ in range(5):
        paused.append(empty_cycle(paused.state))
    store.delete([info.key for prefix in BOTH.split() for info in store.list(prefix)])
    sound.repaired(store, paused, may_lose=False)
    with pytest.raises(FencedError):
        paused.append(empty_cycle(paused.state))


class _Ending(MemoryStore):
    """Takes so many objects, then none."""

    left = 1 << 30

    def put_if_absent(self, key, body, **options):  # type: ignore[no-untyped-def]
        if self.left == 0:
            raise UnavailableError("killed")
        self.left -= 1
        return super().put_if_absent(key, body, **options)


@pytest.mark.integration
def test_a_repair_that_was_killed_is_repeated(sound: Sound) -> None:
    """At each of its objects; what it left is garbage."""
    puts = 0
    while True:
        store = _Ending()
        for info in sound.store.list(""):
            store.put_if_absent(info.key, [sound.store.get(info.key)])
        paused = writer_of(store, sound.names, "paused")
        for key, position in sound.places()["tail"][-3:]:
            flip(store, key, position)
        store.left = puts
        try:
            apply_repair(plan_repair(store, sound.names, NOW_MS, applies=True))
            break
        except UnavailableError:
            store.left = 1 << 30
        sound.repaired(store, paused, may_lose=False, runs_dry=False)
        puts += 1
    assert puts == 3 + 2, "objects, root, commit"


@pytest.mark.parametrize("generation", [0, 1])
def test_nothing_is_saved_from_another_log(tmp_path: Path, generation: int) -> None:
    """The broker began again with an empty disk, and messages have the places of earlier ones."""
    store, settings = MemoryStore("memory://logs"), replace(SMALL, split_bytes=1)
    archive = PrefixedStore(store, archive_prefix(CLUSTER, BROKER))
    for name in ("old", "new"):
        broker = SmallBroker(tmp_path / name)
        broker.lmq = "%LMQ%one"
        broker.send(1, "first" if name == "old" else "other")
        for _ in range(4):
            broker.send(1, text=name)
            broker.restart()
        backfill(broker.path, store, settings=settings, replace_log=True)
    before, damaged = messages(archive), "/.25LMQ.25one/1/0/" if generation else "/orders/0/0/"
    (key,) = (info.key for info in archive.list("data/") if damaged in info.key)
    flip(archive, key, len(archive.get(key)) - 60 if generation else 80)
    log = None if generation else CommitLog([broker.path / "commitlog"])
    repair = plan_repair(archive, (CLUSTER, BROKER), NOW_MS, log=log, applies=True)
    apply_repair(repair)
    after = messages(archive)
    assert all(before[queue][at] == record for queue, rows in after.items() for at, record in rows.items())
    assert repair.lost_messages == sum(map(len, before.values())) - sum(map(len, after.values()))
    assert repair.lost_messages == (0 if generation else 8), "messages and entries of the LMQ"
