"""Two writers, a compactor, a collector and a reader on one archive, with everything going wrong.

Seeded and single-threaded: while one actor waits for the store, others act. Requests are lost before or after
their effect, stall and land later, or are refused; processes die before and after any request; epochs are taken over;
the broker's log is replaced. In the end: no message lost, none visible twice, one linear chain, no commit of a fenced
writer, nothing named that is not there, and nothing left over that collection does not find.
"""

from __future__ import annotations

import pytest

from tests.catalog.collection import run_gc
from tests.catalog.drafts import NOW_MS
from tests.catalog.simulated_world import QUEUES, SimulatedCuts, World, archived
from tests.sweeps import sweep
from tiered.catalog import catalog_reader as reading
from tiered.catalog import catalog_writer
from tiered.catalog.catalog_reader import head_version, load, read_commit
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitKind
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState
from tiered.formats.keys import epoch_of
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore


def check_chain(store: MemoryStore) -> None:
    """One linear chain; in each epoch only its owner appends."""
    owner, epoch, put_id, named = "", 0, "", set()
    for version in range(1, head_version(store) + 1):
        commit = read_commit(store, version)
        assert commit.place.predecessor_put_id == put_id
        put_id = commit.put_id
        if commit.draft.kind == CommitKind.CLAIM:
            assert commit.draft.owner is not None
            owner, epoch = commit.draft.owner.instance, epoch + 1
        assert commit.place.epoch == epoch
        if commit.draft.kind in (CommitKind.APPEND, CommitKind.LOG_HISTORY, CommitKind.RELEASE):
            assert commit.place.actor == owner, "a fenced writer committed"
        assert all(epoch_of(key) == epoch for key in commit.draft.object_keys)
        assert not named & set(commit.draft.object_keys), "an object was committed twice"
        named |= set(commit.draft.object_keys)


def check_messages(world: World, state: CatalogState) -> None:
    """Every record of the log is visible once, at its offset."""
    for number in range(QUEUES):
        wanted = [(record.offset, record.identity) for record in world.log.records if record.queue == number]
        generation = state.current_generation(f"t{number}", 0)
        found = (
            [] if generation is None else archived(world.memory, state, QueueKey(f"t{number}", 0, generation))
        )
        if not wanted and generation is not None:
            assert QueueKey(f"t{number}", 0, generation) not in state.visible_queues() or not found
            continue
        assert found == wanted
    assert not len(state.gaps)


def check_left_over(world: World, state: CatalogState) -> None:
    """After one more epoch, collection leaves exactly what is needed."""
    closing = CatalogWriter(
        world.memory, cluster="c", broker="b", instance="master", kind="run", clock_ms=lambda: NOW_MS
    )
    closing.claim()
    for _ in range(2):  # the second one collects the first one's own list
        run_gc(world.memory, load(world.memory), apply=True, grace_ms=0, clock=lambda: NOW_MS)
    needed: set[str] = set(load(world.memory).catalog_keys())  # lists of garbage are collected too
    for key, _ in state.queues():
        needed |= set(RunIndex(world.memory).runs_of(state, key).object_keys)
    left = {info.key for info in world.memory.list("") if not info.key.startswith("catalog/")}
    tables = {key for key in left if key.startswith("state/")}
    assert left - tables == needed - tables and needed <= left
    assert not state.state_objects or tables <= needed, "the only copy of a table is kept"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads side by side would draw faults in an order no seed decides."""
    monkeypatch.setattr(reading, "READ_THREADS", 1 << 30)
    monkeypatch.setattr(catalog_writer, "RunCuts", SimulatedCuts)  # objects are JSON


def simulate(seed: int, *, replacing: bool, steps: int = 250) -> World:
    world = World(seed)
    world.run(steps, replacing=replacing)
    state = world.finish()
    check_chain(world.memory)
    check_messages(world, state)
    check_left_over(world, state)
    return world


@pytest.mark.parametrize("seed", sweep(range(10), fast=[3, 6]))
def test_two_writers_lose_nothing_and_show_nothing_twice(seed: int) -> None:
    world = simulate(seed, replacing=False)
    assert world.crashes > 3
    assert world.fenced > 3
    assert world.compactor.joined > 3


@pytest.mark.parametrize("seed", sweep(range(100, 110), fast=[101, 106, 108]))
def test_a_replaced_log_loses_nothing_and_shows_nothing_twice(seed: int) -> None:
    world = simulate(seed, replacing=True)
    assert world.lines > 0
    assert world.compactor.joined > 3


@pytest.mark.parametrize("step", sweep([1, 4], fast=[4]))
@pytest.mark.parametrize("after_effect", [False, True])
def test_a_crash_at_every_step_is_recovered(after_effect: bool, step: int) -> None:
    """The same short history, killed at its first, second, third … request."""
    for fuse in range(1, 60, step):
        world = World(1)
        world.log.grow(60)
        world.store.fuse, world.store.kill_after_effect = fuse, after_effect
        for _ in range(25):
            world.act(world.uploaders[0])
        state = world.finish()
        check_chain(world.memory)
        check_messages(world, state)
        check_left_over(world, state)
