"""Root pages are shortcuts: a damaged one stops no reader, hides no message and lets nothing be deleted."""

from dataclasses import replace

import pytest

from tests.catalog.collection import run_gc
from tests.catalog.drafts import NOW_MS, append_draft, queue, small_limits, writer
from tests.object_store.fault_store import FaultStore
from tiered.catalog import catalog_reader as reading
from tiered.catalog.catalog_reader import REPLAY_MAX, load, read_commit, refresh
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import NO_PAGES, Commit, describe
from tiered.catalog.state import CatalogState, RootRef
from tiered.clock import Clock
from tiered.errors import CorruptionError
from tiered.formats.keys import Part, catalog_key, object_of, parse_part_key
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

IN_OBJECTS = {"pack_bytes_max": 3000}
GRACE_MS = 72 * 3_600_000
READS = frozenset({"get", "get_range"})


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(clock=Clock(wall_ms=lambda: NOW_MS))


def grow(made: CatalogWriter, commits: int) -> CatalogState:
    for number in range(commits):
        names = {queue(f"q{(number + step) % 7}"): 2 for step in range(1 + number % 4)}
        made.append(append_draft(made.state, names))
    return made.state


def grown(store: MemoryStore, commits: int = 60, **limits: float) -> CatalogWriter:
    made = writer(store, limits=small_limits(**limits))
    made.claim()
    grow(made, commits)
    return made


def flip(memory: MemoryStore, key: str) -> None:
    """Change a bit in the middle of an object or page; once more, and it is what it was."""
    part = parse_part_key(key) or Part(key, 0, len(memory.get(key)))
    data = bytearray(memory.get(part.key))
    data[part.offset + part.length // 2] ^= 1
    memory.delete([part.key])
    memory.put_if_absent(part.key, [data])


def roots(store: MemoryStore, head: int) -> list[RootRef]:
    """All roots that commits name, newest first."""
    named = [read_commit(store, version).draft.pages.root for version in range(head, 0, -1)]
    return [root for root in named if root.key]


def reads(store: FaultStore) -> int:
    return sum(request.operation in READS for request in store.requests)


@pytest.mark.parametrize("limits", [{}, IN_OBJECTS])
@pytest.mark.parametrize("damaged", [1, 3, 1000])
def test_the_newest_roots_are_damaged_and_the_state_is_the_same(
    memory: MemoryStore, limits: dict[str, float], damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = grown(memory, **limits).state
    for root in roots(memory, state.version)[:damaged]:
        flip(memory, root.key)
    loaded = load(memory)
    assert describe(loaded) == describe(state)
    assert state.root.key in caplog.text and "CRC32C" in caplog.text
    assert loaded.unread_root == state.root


def test_a_damaged_root_costs_the_commits_to_the_one_before_it(memory: MemoryStore) -> None:
    flip(memory, grown(memory).state.root.key)
    store = FaultStore(memory, ())
    load(store)
    # Head, two roots, the commit at the damaged one, and as many commits as lie between three roots at most.
    assert reads(store) <= 4 + 2 * small_limits().root_every


@pytest.mark.parametrize("limits", [{}, IN_OBJECTS])
def test_what_neither_roots_nor_commits_say_is_a_typed_error_that_names_both(
    memory: MemoryStore, limits: dict[str, float]
) -> None:
    state = grown(memory, **limits).state
    for root in roots(memory, state.version):
        flip(memory, root.key)
    lost = catalog_key(3)
    memory.delete([lost])
    with pytest.raises(CorruptionError) as error:
        load(memory)
    assert state.root.key in str(error.value) and lost in str(error.value)


def test_the_commit_at_a_damaged_root_is_gone(memory: MemoryStore) -> None:
    state = grown(memory, **IN_OBJECTS).state
    flip(memory, state.root.key)
    lost = catalog_key(state.root.version)
    memory.delete([lost])
    with pytest.raises(CorruptionError) as error:
        load(memory)
    assert state.root.key in str(error.value) and lost in str(error.value)


@pytest.mark.parametrize("version", [0, 5])
def test_roots_that_name_each_other_are_damage(
    memory: MemoryStore, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not followed for ever."""
    for root in roots(memory, grown(memory).state.version):
        flip(memory, root.key)
    read = reading.read_commit

    def astray(store: ObjectStore, number: int) -> Commit:
        commit = read(store, number)
        other = RootRef("pages/other", number + version)
        return replace(
            commit, draft=replace(commit.draft, pages=NO_PAGES), place=replace(commit.place, root=other)
        )

    monkeypatch.setattr(reading, "read_commit", astray)
    with pytest.raises(CorruptionError, match="pages/other"):
        load(memory)


@pytest.mark.parametrize("limits", [{}, IN_OBJECTS])
@pytest.mark.parametrize("is_gone", [False, True])
def test_the_next_writer_makes_a_good_root_at_once(
    memory: MemoryStore, limits: dict[str, float], is_gone: bool
) -> None:
    limits = {**limits, "root_every": 50}
    made = grown(memory, 60, **limits)
    made.release()
    damaged = made.state.root
    if is_gone:
        memory.delete([object_of(damaged.key)])
    else:
        flip(memory, damaged.key)
    made = writer(memory, limits=small_limits(**limits))
    made.claim()
    grow(made, 1)
    assert made.state.root.version > damaged.version
    healed = load(memory)
    assert describe(healed) == describe(made.state) and not healed.unread_root.key
    before = made.state.root
    grow(made, 5)
    assert made.state.root == before, "one is enough"


def test_a_reader_that_follows_reads_only_what_is_new(memory: MemoryStore) -> None:
    made = grown(memory, 30)
    for root in roots(memory, made.state.version):
        flip(memory, root.key)
    store = FaultStore(memory, ())
    known = load(store)
    before = reads(store)
    assert refresh(store, known) is known
    assert reads(store) == before + 1
    grow(made, 2)
    known = refresh(store, known)
    assert describe(known) == describe(made.state) and reads(store) <= before + 5


def test_a_reader_far_behind_continues_from_its_state(memory: MemoryStore) -> None:
    made = grown(memory, 40)
    known = load(memory)
    commits = REPLAY_MAX + 40
    grow(made, commits)
    all_roots = roots(memory, made.state.version)
    for root in all_roots:
        flip(memory, root.key)
    store = FaultStore(memory, ())
    assert describe(refresh(store, known)) == describe(made.state)
    newer = sum(root.version > known.version for root in all_roots)
    assert reads(store) <= commits + 2 * newer + 10, "nothing that it knows is read again"


@pytest.mark.parametrize("limits", [{}, IN_OBJECTS])
@pytest.mark.parametrize("after", [1, 12])
def test_the_first_root_of_a_log_history_has_a_second_copy(
    memory: MemoryStore, limits: dict[str, float], after: int
) -> None:
    made = grown(memory, 20, **limits)
    common = made.state
    grow(made, 9)
    line = made.append_history(common_version=common.version, phys=common.cursor.phys)
    grow(made, after)
    flip(memory, line.root.key)
    assert describe(load(memory)) == describe(made.state)
    for root in roots(memory, made.state.version):
        if root.version != line.version:
            flip(memory, root.key)
    assert describe(load(memory)) == describe(made.state), (
        "from the copy, or the commits before the line and the copy"
    )
    assert describe(load(memory, version=line.version)) == describe(line)


def test_a_log_history_of_which_no_copy_is_left_is_a_typed_error(memory: MemoryStore) -> None:
    made = grown(memory, 20)
    common = made.state
    line = made.append_history(common_version=common.version, phys=common.cursor.phys)
    flip(memory, line.root.key)
    with pytest.raises(CorruptionError, match=line.root.key):
        load(memory)


@pytest.mark.parametrize("is_page", [False, True])
def test_gc_deletes_nothing_for_a_damaged_root_or_page(memory: MemoryStore, is_page: bool) -> None:
    made = grown(memory, **IN_OBJECTS)
    made.release()
    state = made.state
    late_ms = NOW_MS + 2 * GRACE_MS
    memory = _copied(memory, late_ms)
    due = set(run_gc(memory, load(memory), apply=False, grace_ms=GRACE_MS, clock=lambda: late_ms).delete)
    assert due, "pending deletions of the chain are still deleted"
    flip(memory, state.pages[0].key if is_page else state.root.key)
    before = {info.key for info in memory.list("")}
    if is_page:
        with pytest.raises(CorruptionError, match=object_of(state.pages[0].key)):
            run_gc(memory, load(memory), apply=True, grace_ms=GRACE_MS, clock=lambda: late_ms)
        assert {info.key for info in memory.list("")} == before
        return
    run_gc(memory, load(memory), apply=True, grace_ms=GRACE_MS, clock=lambda: late_ms)
    left = {info.key for info in memory.list("")}
    assert before - left == due
    assert object_of(state.root.key) in left
    assert {object_of(page.key) for page in state.pages} <= left


def _copied(memory: MemoryStore, now_ms: int) -> MemoryStore:
    """The same objects, some days later."""
    clock = [NOW_MS]
    copy = MemoryStore(clock=Clock(wall_ms=lambda: clock[0]))
    for info in memory.list(""):
        copy.put_if_absent(info.key, [memory.get(info.key)])
    clock[0] = now_ms
    return copy
