"""How versions are won: the rules of commits and epochs, one test each."""

import itertools
import threading
from bisect import insort
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.catalog.drafts import NOW_MS, append_draft, claim_draft, log_checks, queue, small_limits, writer
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tiered.catalog.catalog_reader import head_version, load, read_commit, refresh
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.claims import ADVANCING_MS, refusal
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind, describe
from tiered.catalog.deletions import Reason
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState, Owner
from tiered.errors import (
    AccessDeniedError,
    CorruptionError,
    FencedError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from tiered.formats.keys import Part, catalog_key, object_of, parse_part_key
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.wrapper import StoreWrapper

A, B = queue("a"), queue("b")
CATALOG = "catalog/*"
READS = frozenset({"get", "get_range"})
IN_OBJECTS = {"pack_bytes_max": 3000}
"""Pages are put besides the commits, some of them as parts of one object."""


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


def faulty(memory: MemoryStore, *rules: FaultRule) -> FaultStore:
    return FaultStore(memory, rules, wait=lambda seconds: None)


def requests(store: FaultStore, operation: str, prefix: str = "catalog/") -> list[str]:
    return [
        request.outcome
        for request in store.requests
        if request.operation == operation and request.key.startswith(prefix)
    ]


def test_an_empty_archive_is_not_found_and_a_writer_starts_it(memory: MemoryStore) -> None:
    with pytest.raises(NotFoundError):
        load(memory)
    first = writer(memory)
    assert first.load() is None
    assert not first.is_claimed
    state = first.claim()
    assert (state.version, state.epoch, state.cluster, state.broker) == (1, 1, "c", "b")
    assert first.state_or_none is None  # no state to start from yet
    first.append(append_draft(state, {A: 2}))
    assert first.state_or_none is not None
    assert describe(load(memory)) == describe(first.state)


def test_no_commit_before_the_epoch_is_won(memory: MemoryStore) -> None:
    first = writer(memory)
    with pytest.raises(FencedError, match="not claimed the archive"):
        first.append(append_draft(CatalogState(), {A: 1}))
    assert head_version(memory) == 0


def test_an_archive_of_other_names_is_refused(memory: MemoryStore) -> None:
    writer(memory).claim()
    other = writer(memory, instance="w2")
    other._broker = "other"
    with pytest.raises(UsageError, match="the archive of c/b"):
        other.load()


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.STALLED])
def test_an_unanswered_commit_is_resolved_before_other_content_is_tried(
    memory: MemoryStore, fault: Fault
) -> None:
    store = faulty(memory)
    first = writer(store)
    first.claim()
    store.add(FaultRule(fault, keys=CATALOG, times=2))
    state = first.append(append_draft(first.state, {A: 2}))
    store.land_stalled()
    assert state.version == 2
    assert describe(load(memory)) == describe(state)
    # The version is read back after each lost answer, and only ever the same bytes are put.
    assert requests(store, "get")
    state = first.append(append_draft(state, {A: 2}))
    assert state.version == head_version(memory) == 3


def test_its_own_lost_reply_is_success(memory: MemoryStore) -> None:
    store = faulty(memory)
    first = writer(store)
    first.claim()
    # The answer is lost, and so are the first looks at what came of it: then the create is refused by our own commit.
    store.add(FaultRule(Fault.LOST_AFTER, keys=CATALOG, times=1))
    store.add(FaultRule(Fault.LOST_BEFORE, READS, CATALOG, times=1))
    state = first.append(append_draft(first.state, {A: 2}))
    assert requests(store, "put")[-2:] == ["LOST_AFTER", "AlreadyExistsError"]
    assert state.version == head_version(memory) == 2


@pytest.mark.parametrize("fault", [Fault.THROTTLED, Fault.CONFLICT, Fault.FULL])
def test_a_refusal_repeats_the_same_bytes(memory: MemoryStore, fault: Fault) -> None:
    bodies = []

    class Watching(FaultStore):
        def put_if_absent(self, key: str, body, *, timeout_s=None) -> None:  # type: ignore[no-untyped-def]
            if key.startswith("catalog/"):
                bodies.append(b"".join(body))
            super().put_if_absent(key, body, timeout_s=timeout_s)

    store = Watching(memory, wait=lambda seconds: None)
    first = writer(store)
    first.claim()
    store.add(FaultRule(fault, keys=CATALOG, times=3))
    first.append(append_draft(first.state, {A: 2}))
    assert len(bodies) == 5
    assert len(set(bodies[1:])) == 1
    assert not requests(store, "get", catalog_key(2))  # a refusal is an answer: nothing to ask


@pytest.mark.parametrize("fault", [Fault.THROTTLED, Fault.LOST_BEFORE, Fault.LOST_AFTER])
def test_a_commit_that_has_to_wait_says_so(
    memory: MemoryStore, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """The store takes data and no commits: nothing else would tell why nothing becomes visible."""
    said: list[str] = []
    store = faulty(memory)
    first = writer(store, wait=lambda _seconds: said.append(first.retry_reason))
    first.claim()
    assert first.retry_reason == ""
    store.add(FaultRule(fault, keys=CATALOG, times=2))
    store.add(FaultRule(Fault.LOST_BEFORE, READS, CATALOG, times=2))
    first.append(append_draft(first.state, {A: 2}))
    assert said and all(said) and first.retry_reason == ""
    assert [record.message for record in caplog.records] == [
        "a request to the object store for the catalog failed and is tried again"
    ] * len(said)


def test_a_pending_commit_survives_a_failed_call(memory: MemoryStore) -> None:
    store = faulty(memory)
    first = writer(store)
    first.claim()
    draft = append_draft(first.state, {A: 2})
    store.add(FaultRule(Fault.LOST_AFTER, keys=CATALOG, times=1))
    store.add(FaultRule(Fault.LOST_BEFORE, READS, CATALOG, times=1))
    first.abort()
    with pytest.raises(UnavailableError):
        first.append(draft)
    assert first.state.version == 1
    store.clear()
    # Other content first settles the pending one, and is then void because it does not start at the cursor.
    with pytest.raises(CommitInvalidError, match="log is archived up to"):
        first.append(replace(draft, object_keys=["sets/00/other-1-1.sso"]))
    assert first.state.version == 2
    assert first.append(append_draft(first.state, {A: 1})).version == 3


def test_the_same_draft_after_a_failed_call_is_committed_once(memory: MemoryStore) -> None:
    store = faulty(memory)
    first = writer(store)
    first.claim()
    draft = append_draft(first.state, {A: 2})
    store.add(FaultRule(Fault.STALLED, keys=CATALOG, times=1))
    first.abort()
    with pytest.raises(UnavailableError):
        first.append(draft)
    store.land_stalled()
    assert first.append(draft).version == 2
    assert head_version(memory) == 2
    assert first.release().version == 3


@pytest.mark.parametrize("lost", ["claim", "append"])
def test_a_writers_abandoned_commit_does_not_bar_it_from_taking_over_again(
    memory: MemoryStore, lost: str
) -> None:
    """Its commit was stored, and another writer took over before it heard so."""
    store = faulty(memory)
    first = writer(store)
    if lost == "append":
        first.claim()
    store.add(FaultRule(Fault.LOST_AFTER, keys=CATALOG, times=1))
    store.add(FaultRule(Fault.LOST_BEFORE, READS, CATALOG, times=1))
    first.abort()
    with pytest.raises(UnavailableError):
        first.claim() if lost == "claim" else first.append(append_draft(first.state, {A: 2}))
    store.clear()
    epoch = writer(memory, instance="w2").claim(take_over=True).epoch
    assert first.claim(take_over=True).epoch == epoch + 1


def test_refused_by_another_actor_of_the_same_epoch_it_rebuilds(memory: MemoryStore) -> None:
    first = writer(memory)
    first.claim()
    first.append(append_draft(first.state, {A: 2, B: 1}))
    draft = append_draft(first.state, {A: 1})
    other = writer(memory, instance="compactor", kind="maintenance")
    other.load()
    other.maintain(lambda state: CommitDraft(CommitKind.MAINTENANCE, hide=[B], created_ms=NOW_MS))
    state = first.append(draft)
    assert state.version == 4
    assert state.visible_queues() == [A]
    assert read_commit(memory, 4).place.predecessor_put_id == read_commit(memory, 3).put_id


def test_maintenance_is_decided_again_when_a_writer_was_faster(memory: MemoryStore) -> None:
    first = writer(memory)
    first.claim()
    first.append(append_draft(first.state, {A: 2}))
    other = writer(memory, instance="compactor", kind="maintenance")
    seen = []

    def build(state: CatalogState) -> CommitDraft | None:
        seen.append(state.version)
        if len(seen) == 1:
            first.append(append_draft(first.state, {A: 1}))
        return CommitDraft(CommitKind.MAINTENANCE, hide=[A]) if len(seen) < 3 else None

    state = other.maintain(build)
    assert seen == [2, 3]
    assert (state.version, state.epoch) == (4, 1)
    assert first.append(append_draft(first.refresh(), {A: 1})).version == 5


def test_a_compaction_of_another_process_costs_the_owner_one_version(memory: MemoryStore) -> None:
    store = faulty(memory)
    owner = writer(store)
    owner.append(append_draft(owner.claim(), {A: 1}))
    other = writer(memory, "compact")

    def commit(**deletions: object) -> None:
        other.maintain(lambda _: CommitDraft(CommitKind.MAINTENANCE, created_ms=NOW_MS, **deletions))  # type: ignore[arg-type]

    def lost() -> int:
        return requests(store, "put").count("AlreadyExistsError")

    for number in range(3):
        key = f"sets/{number}"
        commit(pending_deletions=(key,), reason=Reason.INTENT)
        owner.append(append_draft(owner.state, {A: 1}))
        assert lost() == number + 1
        owner.append(append_draft(owner.state, {A: 1}))
        commit(restored=(key,))
        owner.append(append_draft(owner.state, {A: 1}))
        assert lost() == number + 1


def test_a_higher_epoch_is_fencing(memory: MemoryStore) -> None:
    first = writer(memory)
    first.claim()
    first.append(append_draft(first.state, {A: 2}))
    stale = append_draft(first.state, {A: 1})
    second = writer(memory, instance="w2")
    with pytest.raises(FencedError, match=r"belongs to tiered run \(w1\) on h"):
        second.claim()
    second.claim(take_over=True)
    with pytest.raises(FencedError, match="epoch 1 of this writer is over: run w2 on h has epoch 2"):
        first.append(stale)
    assert not first.is_claimed
    assert head_version(memory) == 3
    for forbidden in (first.release, lambda: first.append_history(common_version=2, phys=400)):
        with pytest.raises(FencedError):
            forbidden()
    # It may retake by the same rule.
    assert first.claim(take_over=True).epoch == 3


def test_a_fenced_writer_never_sees_an_epoch_it_could_put_data_under(memory: MemoryStore) -> None:
    first = writer(memory)
    first.claim()
    mine = first.append(append_draft(first.state, {A: 2}))
    writer(memory, instance="w2").claim(take_over=True)
    assert first.refresh().epoch == 2
    assert first.state is mine
    assert not first.is_claimed
    with pytest.raises(FencedError):
        first.append(append_draft(first.state, {A: 1}))
    assert first.state is mine


def test_of_two_claimants_one_wins_and_the_other_is_fenced(memory: MemoryStore) -> None:
    for _ in range(5):
        store = MemoryStore()
        outcomes: list[str] = []
        barrier = threading.Barrier(2)

        def compete(
            name: str,
            store: MemoryStore = store,
            barrier: threading.Barrier = barrier,
            outcomes: list[str] = outcomes,
        ) -> None:
            contender = writer(store, instance=name)
            contender.load()
            barrier.wait()
            try:
                contender.claim()
                outcomes.append("won")
            except FencedError:
                outcomes.append("fenced")

        threads = [threading.Thread(target=compete, args=(name,)) for name in ("x", "y")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["fenced", "won"]
        assert head_version(store) == 1


def test_two_that_take_over_do_not_fence_each_other_in_turns(memory: MemoryStore) -> None:
    writer(memory).claim()
    other = writer(memory, instance="w3")

    class Slow(FaultStore):
        def put_if_absent(self, key: str, body, *, timeout_s=None) -> None:  # type: ignore[no-untyped-def]
            if not other.is_claimed:
                other.claim(take_over=True)
            super().put_if_absent(key, body, timeout_s=timeout_s)

    with pytest.raises(FencedError, match="epoch 2 was claimed by run w3 on h at the same time"):
        writer(Slow(memory), instance="w2").claim(take_over=True)
    assert head_version(memory) == 2
    assert other.is_claimed


def test_a_released_epoch_is_free_for_all_writers(memory: MemoryStore) -> None:
    first = writer(memory)
    first.claim()
    first.release()
    assert not first.is_claimed
    assert writer(memory, instance="w2").claim().epoch == 2


def test_a_restarted_instance_claims_its_own_epoch_again(memory: MemoryStore) -> None:
    writer(memory).claim()
    assert writer(memory).claim().epoch == 2


def owner(instance: str, kind: str) -> Owner:
    return Owner(instance, kind, "h", NOW_MS, False)


def test_backfill_refuses_while_a_writer_advances() -> None:
    state = CatalogState(epoch=4, owner=owner("w1", "run"), advanced_ms=NOW_MS)
    late = NOW_MS + ADVANCING_MS
    filler = owner("w2", "backfill")
    assert "is archiving now" in refusal(state, filler, take_over=False, now_ms=late - 1)
    assert "is archiving now" in refusal(state, filler, take_over=True, now_ms=late - 1)
    assert "not released" in refusal(state, filler, take_over=False, now_ms=late)
    assert not refusal(state, filler, take_over=True, now_ms=late)


def test_a_dead_writer_whose_clock_was_ahead_bars_no_take_over() -> None:
    """A little ahead is what clocks of two hosts are: such a writer may well be advancing."""
    for kind in ("run", "backfill"):
        state = CatalogState(epoch=4, owner=owner("w1", kind), advanced_ms=NOW_MS)
        for claimant in (owner("w2", "run"), owner("w2", "backfill")):
            for ahead_ms in (ADVANCING_MS, 30 * 86_400_000):
                assert refusal(state, claimant, take_over=False, now_ms=NOW_MS - ahead_ms)
                assert not refusal(state, claimant, take_over=True, now_ms=NOW_MS - ahead_ms)
        late = NOW_MS - ADVANCING_MS + 1
        assert "is archiving now" in refusal(state, owner("w2", "backfill"), take_over=True, now_ms=late)


def test_an_idle_writer_is_not_taken_for_dead() -> None:
    state = CatalogState(epoch=4, owner=owner("w1", "run"), advanced_ms=NOW_MS)
    much_later = NOW_MS + 1000 * ADVANCING_MS
    assert "not released" in refusal(state, owner("w2", "run"), take_over=False, now_ms=much_later)
    assert not refusal(state, owner("w2", "run"), take_over=True, now_ms=NOW_MS)


def test_a_backfill_that_died_is_no_obstacle() -> None:
    state = CatalogState(epoch=4, owner=owner("w1", "backfill"), advanced_ms=NOW_MS)
    for kind in ("run", "backfill"):
        assert refusal(state, owner("w2", kind), take_over=False, now_ms=NOW_MS + 1)
        assert not refusal(state, owner("w2", kind), take_over=False, now_ms=NOW_MS + ADVANCING_MS)


def test_maintenance_never_takes_the_writers_epoch(memory: MemoryStore) -> None:
    first = writer(memory)
    first.claim()
    other = writer(memory, instance="compactor", kind="maintenance")
    other.maintain(lambda state: CommitDraft(CommitKind.MAINTENANCE, pending_deletions=["sets/00/a-1-1.sso"]))
    assert other.state.epoch == 1
    assert other.state.owner == first.state.owner
    with pytest.raises(FencedError):
        other.append(append_draft(other.state, {A: 1}))


def test_a_commit_that_does_not_follow_is_refused_locally(memory: MemoryStore) -> None:
    store = faulty(memory)
    first = writer(store)
    first.claim()
    puts = len(store.requests)
    draft = append_draft(first.state, {A: 2})
    with pytest.raises(CommitInvalidError):
        first.append(replace(draft, to_phys=10))
    assert len(store.requests) == puts


def test_errors_that_repeating_cannot_help_are_raised_at_once(memory: MemoryStore) -> None:
    class Denying(MemoryStore):
        denied = False

        def put_if_absent(self, key: str, body, *, timeout_s=None) -> None:  # type: ignore[no-untyped-def]
            if self.denied:
                raise AccessDeniedError("no")
            super().put_if_absent(key, body, timeout_s=timeout_s)

    store = Denying()
    first = writer(store)
    first.claim()
    store.denied = True
    draft = append_draft(first.state, {A: 1})
    with pytest.raises(AccessDeniedError):
        first.append(draft)
    store.denied = False
    assert first.append(draft).version == 2


# -- roots, pages, reading ------------------------------------------------------------------------------------


def grown(store: MemoryStore | FaultStore, commits: int = 60, **limits: float):  # type: ignore[no-untyped-def]
    first = writer(store, limits=small_limits(**limits))
    first.claim()
    for number in range(commits):
        first.append(
            append_draft(first.state, {queue(f"q{(number + step) % 7}"): 2 for step in range(1 + number % 4)})
        )
    return first


def flip(memory: MemoryStore, key: str) -> None:
    """Change a bit in the middle of a page, or near the end of an object, where of a commit nothing is that it carries;
    once more, and it is what it was."""
    data = bytearray(memory.get(object_of(key)))
    part = parse_part_key(key) or Part(key, len(data) - 60, 40)
    data[part.offset + part.length // 2] ^= 1
    memory.delete([part.key])
    memory.put_if_absent(part.key, [data])


def runs_everywhere(store: MemoryStore, state: CatalogState) -> dict[object, list[tuple[int, int, str]]]:
    index = RunIndex(store)
    result = {}
    for key, _ in state.queues():
        chunk = index.runs_of(state, key)
        result[key] = [
            (
                int(r["base_queue_offset"]),
                int(r["end_queue_offset"]),
                chunk.object_keys[chunk.objects["key"][r["object"]]],
            )
            for r in chunk.runs
        ]
    return result


@pytest.mark.parametrize("limits", [{}, IN_OBJECTS])
def test_every_kth_commit_names_a_fresh_root_and_a_reader_starts_there(
    memory: MemoryStore, limits: dict[str, float]
) -> None:
    first = grown(memory, **limits)
    assert first.state.version - first.state.root.version <= 2 * small_limits().root_every
    store = faulty(memory)
    assert describe(load(store)) == describe(first.state)
    assert len(requests(store, "list")) == 1
    assert len(requests(store, "get")) <= 2 * small_limits().root_every
    assert len(requests(store, "get", "pages/")) == 1
    assert not requests(store, "get_range", "")


@pytest.mark.parametrize("in_objects", [{}, IN_OBJECTS])
def test_old_runs_spill_into_pages_and_stay_findable(
    memory: MemoryStore, in_objects: dict[str, float]
) -> None:
    state = grown(memory, **in_objects).state
    limits = small_limits()
    assert state.memory_runs < limits.spill_runs + 4
    assert max(page.level for page in state.pages) >= 2
    levels: dict[int, set[tuple[int, int]]] = {}
    for page in state.pages:
        levels.setdefault(page.level, set()).add((page.from_version, page.to_version))
    assert all(len(sequences) < limits.merge_sequences + 1 for sequences in levels.values())
    for key, runs in runs_everywhere(memory, state).items():
        row = state.queue(key)  # type: ignore[arg-type]
        assert row is not None
        assert runs[0][0] == row["min_queue_offset"]
        assert runs[-1][1] == row["end_queue_offset"]
        assert all(before[1] == after[0] for before, after in itertools.pairwise(runs))


def test_any_version_can_be_read_even_when_its_root_is_gone(memory: MemoryStore) -> None:
    first = grown(memory)
    wanted = load(memory, version=30)
    assert wanted.version == 30
    roots = {wanted.root.key} - {first.state.root.key}
    assert roots
    memory.delete([object_of(key) for key in roots])
    assert describe(load(memory, version=30)) == describe(wanted)
    with pytest.raises(NotFoundError):
        load(memory, version=first.state.version + 1)


def test_a_reader_that_follows_sees_what_a_fresh_one_sees(memory: MemoryStore) -> None:
    first = writer(memory)
    first.claim()
    follower = load(memory)
    for number in range(60):
        first.append(append_draft(first.state, {queue(f"q{number % 5}"): 1, queue(f"p{number % 3}"): 2}))
        if number % 13 == 0:
            follower = refresh(memory, follower)
            assert describe(follower) == describe(first.state)
    follower = refresh(memory, follower)
    assert describe(follower) == describe(first.state) == describe(load(memory))
    assert refresh(memory, follower) is follower


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.STALLED, Fault.THROTTLED])
def test_a_page_that_cannot_be_written_does_not_hold_up_commits(memory: MemoryStore, fault: Fault) -> None:
    store = faulty(memory, FaultRule(fault, keys="pages/*", probability=0.6))
    first = grown(store, 80, **IN_OBJECTS)
    store.land_stalled()
    state = load(memory)
    assert describe(state) == describe(first.state)
    first.release()
    state = first.state
    needed, garbage = state.catalog_keys(), set(state.pending_deletions)
    assert not needed & garbage
    existing = {info.key for info in memory.list("pages/")}
    # Every attempt is either named or a pending deletion: no object is unaccounted for.
    assert existing <= needed | garbage
    runs_everywhere(memory, state)


def test_page_keys_refused_before_any_effect_are_no_garbage(memory: MemoryStore) -> None:
    store = faulty(memory, FaultRule(Fault.THROTTLED, keys="pages/*"))
    first = grown(store, 40, **IN_OBJECTS)
    assert any(request.key.startswith("pages/") for request in store.requests)
    assert not first.state.pending_deletions
    assert not first._pages.garbage


@pytest.mark.parametrize("limits", [{}, IN_OBJECTS])
def test_damaged_commits_and_pages_are_typed_errors(memory: MemoryStore, limits: dict[str, float]) -> None:
    first = grown(memory, **limits)
    head = catalog_key(first.state.version)
    for key in (head, first.state.pages[0].key):  # a root that is damaged: test_roots.py
        flip(memory, key)
        with pytest.raises(CorruptionError, match=key):
            runs_everywhere(memory, load(memory))
        flip(memory, key)


@pytest.mark.parametrize(("limits", "is_gone"), [({}, False), (IN_OBJECTS, False), (IN_OBJECTS, True)])
def test_an_older_page_that_is_damaged_or_gone_does_not_hold_up_commits(
    memory: MemoryStore, limits: dict[str, float], is_gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = grown(memory, 10, **limits)
    first.release()
    key = first.state.pages[0].key
    first = writer(memory, limits=small_limits(**limits))  # one that has read no page yet
    first.claim()
    if is_gone:
        memory.delete([object_of(key)])
    else:
        flip(memory, key)
    for number in range(60):
        first.append(append_draft(first.state, {queue(f"q{number % 7}"): 2}))
    assert describe(load(memory)) == describe(first.state)
    assert any("could not be merged" in message and object_of(key) in message for message in caplog.messages)


def test_a_cycle_is_one_catalog_put_but_for_roots_and_pages(memory: MemoryStore) -> None:
    store = faulty(memory)
    first = grown(store, 80)
    assert max(page.level for page in first.state.pages) >= 2
    assert first.state.root.version > 60
    others = [info.key for info in memory.list("pages/")]
    assert len(requests(store, "put", "")) == first.state.version + len(others)
    assert first.state.version == 81 and len(others) < 81 / 2
    assert {key.split("-")[0] for key in others} == {"pages/root", "pages/runs"}
    assert not first.state.catalog_keys() & {info.key for info in memory.list("catalog/")}
    assert not any(key.startswith("catalog/") for key in first.state.pending_deletions)
    assert describe(load(memory)) == describe(first.state)


def test_pages_of_a_change_are_one_object(memory: MemoryStore) -> None:
    first = grown(faulty(memory), 60)
    objects = {object_of(page.key) for page in first.state.pages}
    assert len(objects) < len(first.state.pages)
    assert all(key.startswith("pages/runs-") for key in objects)
    assert {object_of(page.key) for page in load(memory).pages} == objects
    # Merged pages become pending deletions with their objects, and only when none of an object is needed any more.
    existing = {info.key for info in memory.list("pages/")}
    assert existing == (first.state.catalog_keys() | first.state.pending_deletions.keys()) & existing
    assert objects <= existing - first.state.pending_deletions.keys()


def test_a_reader_of_many_maintenance_commits_starts_at_a_root(memory: MemoryStore) -> None:
    first = writer(memory)
    first.claim()
    first.append(append_draft(first.state, {A: 1, B: 1}))
    for number in range(40):
        first.maintain(
            lambda state, hidden=number % 2: CommitDraft(  # type: ignore[misc]
                CommitKind.MAINTENANCE, created_ms=NOW_MS, **{"unhide" if hidden else "hide": [A]}
            )
        )
    limits = small_limits()
    store = faulty(memory)
    assert describe(load(store)) == describe(first.state)
    assert len(requests(store, "get")) <= 2 * limits.root_every + 2


def unnamed_objects(store: MemoryStore, made: CatalogWriter) -> set[str]:
    """Objects of pages that neither the catalog nor its pending deletions name."""
    state = made.state
    return {info.key for info in store.list("pages/")} - state.catalog_keys() - state.pending_deletions.keys()


def test_a_merge_that_no_commit_named_is_garbage_of_the_release(memory: MemoryStore) -> None:
    """The writer left between putting merged pages and naming them; the next epoch's are its own."""
    first = grown(memory, 20)
    for _ in range(100):
        if unnamed_objects(memory, first):
            break
        first.append(append_draft(first.state, {A: 1, B: 1}))
    (waiting,) = unnamed_objects(memory, first)
    first.release()
    assert waiting in first.state.pending_deletions
    first.claim()
    for _ in range(12):
        first.append(append_draft(first.state, {A: 1, B: 1}))
    assert waiting not in first.state.catalog_keys()
    assert not first.state.catalog_keys() & first.state.pending_deletions.keys()
    runs_everywhere(memory, load(memory))


class BlockedReads(StoreWrapper):
    """Reads of ``thread`` wait until ``may_continue`` is set."""

    thread: threading.Thread | None = None

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.has_begun, self.may_continue = threading.Event(), threading.Event()

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if threading.current_thread() is self.thread:
            self.has_begun.set()
            assert self.may_continue.wait(30)
        return super().get_range(key, offset, length)


class InThread:
    """Runs the work given to it in a thread, one at a time; returns once it reads or has ended."""

    def __init__(self, store: BlockedReads) -> None:
        self.store = store

    def __call__(self, work: Callable[[], None]) -> None:
        if self.store.thread is None or not self.store.thread.is_alive():
            self.store.thread = threading.Thread(target=work)
            self.store.thread.start()
            while self.store.thread.is_alive() and not self.store.has_begun.wait(0.01):
                pass


def test_commits_proceed_during_a_merge_and_one_of_them_names_its_result(memory: MemoryStore) -> None:
    store = BlockedReads(memory)
    first = writer(store, limits=small_limits(), background=InThread(store))
    first.claim()
    while not store.has_begun.is_set():
        first.append(append_draft(first.state, {A: 1, B: 1}))
    assert max(page.level for page in first.state.pages) == 0
    for _ in range(30):
        first.append(append_draft(first.state, {A: 1, B: 1}))
    assert max(page.level for page in first.state.pages) == 0
    store.may_continue.set()
    assert store.thread is not None
    store.thread.join(10)
    first.append(append_draft(first.state, {A: 1, B: 1}))
    assert max(page.level for page in first.state.pages) == 1
    runs_everywhere(memory, load(memory))


def test_a_release_ends_a_merge_in_progress(memory: MemoryStore) -> None:
    store = BlockedReads(memory)
    first = writer(store, limits=small_limits(), background=InThread(store))
    first.claim()
    while not store.has_begun.is_set():
        first.append(append_draft(first.state, {A: 1, B: 1}))
    threading.Timer(0.05, store.may_continue.set).start()
    first.release()
    assert not unnamed_objects(memory, first)
    assert max(page.level for page in first.state.pages) == 0
    runs_everywhere(memory, load(memory))


def test_merges_are_finished_at_the_end(memory: MemoryStore) -> None:
    """The first one is in progress, and what it leaves is merged too."""
    store = BlockedReads(memory)
    limits = small_limits(merge_sequences=2, merge_spills=6)
    first = writer(store, limits=limits, background=InThread(store))
    first.claim()
    while not store.has_begun.is_set():
        first.append(append_draft(first.state, {A: 1, B: 1}))
    for _ in range(20):
        first.append(append_draft(first.state, {A: 1, B: 1}))
    threading.Timer(0.05, store.may_continue.set).start()
    first.finish_merges()
    assert {page.level for page in first.state.pages} == {2}
    version = first.state.version
    assert first.finish_merges().version == version, "nothing is left to merge"
    first.release()
    assert not unnamed_objects(memory, first)
    runs_everywhere(memory, load(memory))


def test_a_failed_last_merge_leaves_the_pages(memory: MemoryStore) -> None:
    first = writer(memory, limits=small_limits(merge_sequences=2, merge_spills=9))
    first.claim()
    while len({page.from_version for page in first.state.pages}) < 3:
        first.append(append_draft(first.state, {A: 1, B: 1}))
    pages = first.state.pages
    lost = object_of(pages[0].key)
    kept = memory.get(lost)
    memory.delete([lost])
    first.finish_merges()
    assert first.state.pages == pages
    memory.put_if_absent(lost, [kept])
    first.release()
    runs_everywhere(memory, load(memory))


def test_log_checks_walk_newest_first(memory: MemoryStore) -> None:
    first = writer(memory)
    first.claim()
    for _ in range(4):
        first.append(append_draft(first.state, {A: 1}))
    first.append(CommitDraft(CommitKind.MAINTENANCE, hide=[A]))
    checks = list(log_checks(memory, first.state))
    assert [(version, to_phys) for version, _, to_phys in checks] == [(5, 800), (4, 600), (3, 400), (2, 200)]
    assert checks[0][1] == first.state.cursor.check
    assert claim_draft().owner is not None


@pytest.mark.parametrize("foreign", ["catalog/", "catalog/.DS_Store", "catalog/0-notes"])
def test_an_object_that_is_no_commit_hides_no_archive(foreign: str) -> None:
    """Browsers of buckets, and file systems over them, leave one that is called like a folder."""
    store = MemoryStore()
    made = writer(store)
    made.claim()
    made.append(append_draft(made.state, {queue("a"): 1}))
    version = head_version(store)
    store._objects[foreign] = (b"", 0)
    insort(store._keys, foreign)
    assert head_version(store) == version
    assert load(store).version == version
    other = writer(store, instance="w2")
    assert other.load() is not None
    assert other.claim(take_over=True).version == version + 1


def test_a_catalog_of_foreign_objects_is_no_archive() -> None:
    store = MemoryStore()
    store.put_if_absent("catalog/notes", [b""])
    assert head_version(store) == 0
