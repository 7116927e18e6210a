"""Carries out plans over real segments: every row of every queue is what it was, and requests are few."""

import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits, plan_join, plan_rewrite
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.maintenance.archived import after, archived_candidates, contents
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tiered.archive.rewrite.outputs import compact
from tiered.archive.rewrite.plan import Candidates, RewritePlan
from tiered.archive.rewrite.result import (
    OutputIdentity,
    RewriteOptions,
    RewriteResult,
    check_totals,
    output_keys,
    spool_bytes,
)
from tiered.archive.rewrite.sources import joined_spans
from tiered.errors import CorruptionError, NotFoundError, UnansweredError, UsageError
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

IDENTITY = OutputIdentity("cluster", "broker", 1, 0, 99, 1_700_000_000_000, 10**9)
QUEUES = [QueueKey(f"topic{number}", number % 2, 0) for number in range(6)]
LMQ = QueueKey("%LMQ%a", 0, 0)
SMALL = CompactionLimits(
    memory_bytes=20_000,
    split_bytes=6000,
    block_bytes=600,
    object_bytes_max=15_000,
    set_bytes_max=30_000,
    row_bytes=8,
    run_bytes=0,
)


def archive(
    *, cycles: int = 20, seed: int = 1, block_bytes: int = 600, body: int = 400, gaps: bool = True
) -> MemoryStore:
    """Cycles with plain, batch and LMQ rows, keys, tags and gaps; some queues grow much faster than others."""
    store, rng = MemoryStore(), random.Random(seed)
    builder = ArchiveBuilder(store, codec=BlockCodec(block_bytes=block_bytes))
    stored_ms = 1_700_000_000_000
    for _ in range(cycles):
        sent = []
        for _ in range(rng.randint(1, 40)):
            queue = QUEUES[min(int(rng.expovariate(0.7)), len(QUEUES) - 1)]
            stored_ms += rng.randint(-3, 50)
            known = builder.truth.get(queue)
            skip = 3 if known is not None and gaps and rng.random() < 0.01 else 0
            pending = sum(one.queue == queue for one in sent)
            sent.append(
                Sent(
                    queue,
                    rng.randbytes(rng.randint(1, body)),
                    tags=rng.choice(["", "a", "b"]),
                    offset=None if not skip or pending else known.end + skip,
                    keys=[f"k{rng.random()}" for _ in range(rng.randint(0, 3))],
                    inner_num=3 if queue == QUEUES[2] else 1,
                    lmq=[LMQ] if queue == QUEUES[0] and rng.random() < 0.3 else [],
                    stored_ms=stored_ms,
                )
            )
        builder.commit(sent)
    return store


@pytest.fixture
def store() -> MemoryStore:
    return archive()


@pytest.fixture
def before(store: MemoryStore) -> Candidates:
    return archived_candidates(store)


@pytest.fixture
def plan(before: Candidates) -> RewritePlan:
    plan = plan_rewrite(before, SMALL)
    assert plan is not None
    return plan


def options(directory: Path, **others: object) -> RewriteOptions:
    values = {"spool_bytes_max": 10**7, "codec": BlockCodec(block_bytes=600)} | others
    return RewriteOptions(directory, wait=lambda _seconds: None, **values)  # type: ignore[arg-type]


def compacted(
    store: ObjectStore, candidates: Candidates, plan: RewritePlan | None, directory: Path, **others: object
) -> RewriteResult:
    assert plan is not None
    result = compact(store, candidates, plan, IDENTITY, options(directory, **others))
    assert not any(directory.iterdir()), "the spool is empty again"
    return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("memory", [5_000, 20_000, 10**7])
def test_level_1_keeps_every_row_of_every_queue(tmp_path: Path, seed: int, memory: int) -> None:
    store = archive(seed=seed)
    before = archived_candidates(store)
    plan = plan_rewrite(before, replace(SMALL, memory_bytes=memory))
    result = compacted(store, before, plan, tmp_path)
    assert plan is not None
    assert contents(store, after(before, plan, result)) == contents(store, before)
    assert set(result.runs["version"].tolist()) == {plan.last_version}
    assert {output.is_set for output in plan.outputs} == {True, False}
    reads = result.cost.gets
    assert reads <= len(plan.sources), "small sources are read once, whatever the number of iterations"


@pytest.mark.parametrize("disk", [10**7, 250_000])
def test_larger_sources_are_read_once_for_as_many_iterations_as_fit_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: int
) -> None:
    monkeypatch.setattr("tiered.archive.rewrite.sources.WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr("tiered.archive.rewrite.sources.key_bytes_guess", lambda rows: 24 * rows + 64)
    store = archive(cycles=10, gaps=False, body=3000)
    before = archived_candidates(store)
    plan = plan_rewrite(before, replace(SMALL, memory_bytes=40_000, split_bytes=10**6, set_bytes_max=50_000))
    assert plan is not None
    result = compacted(store, before, plan, tmp_path, spool_bytes_max=spool_bytes(before, plan) + disk)
    assert contents(store, after(before, plan, result)) == contents(store, before)
    stored = int(before.objects["size_bytes"][plan.sources].sum())
    windows = -(-2 * stored // disk) + 1
    assert len(plan.iterations) > 5
    assert result.cost.gets <= len(plan.sources) * (1 + windows)
    assert result.cost.bytes_read <= 1.5 * stored


def test_many_small_cycles_become_a_tenth_of_the_objects(tmp_path: Path) -> None:
    store = archive(cycles=120, gaps=False, body=60)
    before = archived_candidates(store)
    plan = plan_rewrite(before, CompactionLimits())
    result = compacted(store, before, plan, tmp_path, spool_bytes_max=10**8)
    assert len(result.object_keys) == 1
    assert plan is not None
    assert contents(store, after(before, plan, result)) == contents(store, before)


def test_memory_follows_the_limit_and_not_the_archive(tmp_path: Path) -> None:
    """The limit, and a constant for buffers. Files are on disk, so that only the compaction counts."""
    limits = CompactionLimits(
        memory_bytes=256 << 10, split_bytes=10**9, block_bytes=16 << 10, set_bytes_max=10**9
    )
    peaks = []
    for cycles in (20, 60):
        memory = archive(cycles=cycles, gaps=False, body=4000, block_bytes=16 << 10)
        store = FileStore(tmp_path / str(cycles))
        for info in memory.list(""):
            store.put_if_absent(info.key, [memory.get(info.key)])
        before = archived_candidates(store)
        plan = plan_rewrite(before, limits)
        assert plan is not None
        assert len(plan.iterations) > cycles // 10
        del memory
        tracemalloc.start()
        compacted(
            store,
            before,
            plan,
            tmp_path / f"spool-{cycles}",
            codec=BlockCodec(block_bytes=16 << 10),
            in_flight_bytes=limits.memory_bytes,
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.3
    assert peaks[1] < limits.memory_bytes + (3 << 20)


def test_larger_blocks_are_copied_without_decoding(tmp_path: Path) -> None:
    """Runs of 100 KiB: their blocks belong to one queue, and leave as they came."""
    store = archive(cycles=6, block_bytes=64 << 10, body=20_000)
    before = archived_candidates(store)
    limits = CompactionLimits(memory_bytes=300_000, split_bytes=200_000, block_bytes=64 << 10)
    plan = plan_rewrite(before, limits)
    result = compacted(store, before, plan, tmp_path, codec=BlockCodec(block_bytes=64 << 10))
    assert plan is not None
    assert contents(store, after(before, plan, result)) == contents(store, before)


def test_a_later_level_compacts_an_earlier_one(tmp_path: Path) -> None:
    store = archive(cycles=30, gaps=False)
    before = archived_candidates(store)
    expected = contents(store, before)
    state = before
    for level in (plan_rewrite, plan_join, plan_rewrite, plan_join):
        plan = level(state, replace(SMALL, object_bytes_max=60_000, joined_bytes_min=40_000))
        if plan is None:
            continue
        state = after(state, plan, compacted(store, state, plan, tmp_path))
        assert contents(store, state) == expected
    assert len(np.unique(state.runs["object"])) < len(np.unique(before.runs["object"])) / 2


def test_level_2_copies_blocks_inside_the_store(tmp_path: Path) -> None:
    """No GET reaches a block: only the ends of the sources are read."""
    store = archive(cycles=12, body=3000)
    before = archived_candidates(store)
    first = plan_rewrite(before, replace(SMALL, object_bytes_max=4000, memory_bytes=9000))
    assert first is not None
    state = after(before, first, compacted(store, before, first, tmp_path))
    plan = plan_join(state, replace(SMALL, object_bytes_max=40_000, joined_bytes_min=30_000))
    result = compacted(store, state, plan, tmp_path)
    assert plan is not None
    assert plan.copies
    assert spool_bytes(state, plan) == 0
    assert result.cost.gets <= 2 * len(plan.sources)
    assert contents(store, after(state, plan, result)) == contents(store, before)
    for row in result.runs:
        assert int(row["byte_count"]) <= 40_000


def test_what_is_below_the_floor_is_gone(store: MemoryStore, before: Candidates, tmp_path: Path) -> None:
    floors = before.floors.copy()
    for queue in range(len(floors)):
        ends = np.sort(before.runs["end_queue_offset"][before.runs["queue"] == queue])
        floors[queue] = ends[len(ends) // 2]
    before = replace(before, floors=floors)
    plan = plan_rewrite(before, SMALL)
    result = compacted(store, before, plan, tmp_path)
    assert plan is not None
    found = contents(store, after(before, plan, result))
    for queue, rows in contents(store, before).items():
        number = before.queues.index(queue)
        live = [row for row in rows if row.offset + row.inner_num > floors[number]]
        assert found[queue][-len(live) :] == live
        assert len(found[queue]) < len(rows)


def test_keys_are_known_before_anything_is_written(
    store: MemoryStore, before: Candidates, plan: RewritePlan, tmp_path: Path
) -> None:
    keys = output_keys(before, plan, IDENTITY)
    assert len(set(keys)) == len(plan.outputs)
    result = compacted(store, before, plan, tmp_path)
    assert set(result.object_keys) <= set(keys)
    assert result.abandoned == []


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.THROTTLED])
def test_after_a_put_without_a_response_the_object_goes_to_another_key(
    store: MemoryStore, before: Candidates, plan: RewritePlan, tmp_path: Path, fault: Fault
) -> None:
    faulty = FaultStore(store, [FaultRule(fault, frozenset({"compose"}), times=3, skip=1)])
    result = compacted(faulty, before, plan, tmp_path)
    assert plan is not None
    assert len(result.abandoned) == (0 if fault is Fault.THROTTLED else 3)
    assert not set(result.abandoned) & set(result.object_keys)
    assert contents(store, after(before, plan, result)) == contents(store, before)


def test_failures_leave_an_empty_spool(
    store: MemoryStore, before: Candidates, plan: RewritePlan, tmp_path: Path
) -> None:
    lost = FaultStore(store, [FaultRule(Fault.LOST_BEFORE, frozenset({"compose"}))])
    with pytest.raises(UnansweredError):
        compact(lost, before, plan, IDENTITY, options(tmp_path))
    assert not any(tmp_path.iterdir())
    store.delete([before.object_keys[int(plan.sources[3])]])
    with pytest.raises(NotFoundError):
        compact(store, before, plan, IDENTITY, options(tmp_path))
    assert not any(tmp_path.iterdir())


def test_a_spool_that_is_too_small_is_refused_before_any_request(
    store: MemoryStore, before: Candidates, plan: RewritePlan, tmp_path: Path
) -> None:
    counting = FaultStore(store)
    with pytest.raises(UsageError, match="more than the 100 that it may use"):
        compact(counting, before, plan, IDENTITY, options(tmp_path, spool_bytes_max=100))
    assert counting.requests == []


def test_sources_are_read_again_when_the_spool_cannot_keep_them(
    store: MemoryStore, before: Candidates, plan: RewritePlan, tmp_path: Path
) -> None:
    result = compacted(store, before, plan, tmp_path, spool_bytes_max=spool_bytes(before, plan))
    assert len(plan.sources) < result.cost.gets <= len(plan.sources) * len(plan.iterations)
    assert contents(store, after(before, plan, result)) == contents(store, before)


@pytest.mark.parametrize("place", ["block", "keys", "tail"])
def test_a_damaged_source_is_an_error(
    store: MemoryStore, before: Candidates, plan: RewritePlan, tmp_path: Path, place: str
) -> None:
    number = int(plan.sources[0])
    row, key = before.objects[number], before.object_keys[number]
    data = bytearray(store.get(key))
    at = {"block": 20, "keys": len(data) - int(row["tail_bytes"]) - 3, "tail": len(data) - 60}[place]
    data[at] ^= 0x55
    store.delete([key])
    store.put_if_absent(key, [data])
    with pytest.raises(CorruptionError, match=key):
        compact(store, before, plan, IDENTITY, options(tmp_path))


def test_a_run_that_is_not_the_catalogs_is_an_error(
    store: MemoryStore, before: Candidates, plan: RewritePlan, tmp_path: Path
) -> None:
    lying = replace(before, runs=before.runs.copy())
    lying.runs["rows"][int(plan.iterations[0][0].ranges["run"][0])] += 1
    with pytest.raises(CorruptionError, match="that the catalog describes"):
        compact(store, lying, plan, IDENTITY, options(tmp_path))


def test_totals_of_every_queue_are_compared(
    store: MemoryStore, before: Candidates, plan: RewritePlan, tmp_path: Path
) -> None:
    new = compacted(store, before, plan, tmp_path).runs
    check_totals(before, plan, new)
    for name in ("rows", "byte_count", "end_queue_offset"):
        changed = new.copy()
        changed[name][0] += 1
        with pytest.raises(CorruptionError, match="the compaction is not committed, as it would change"):
            check_totals(before, plan, changed)
    with pytest.raises(CorruptionError, match="the compaction is not committed, as it would change"):
        check_totals(before, plan, new[1:])


def test_neighbouring_ranges_are_one_get() -> None:
    mib = 1 << 20
    assert joined_spans([]) == []
    assert joined_spans([(100, 50), (16, 84), (150, 1)]) == [(16, 135)]
    assert joined_spans([(16, 100), (90, 60)]) == [(16, 134)], "two runs share a block"
    assert joined_spans([(16, 10), (2 * mib, 10)]) == [(16, 10), (2 * mib, 10)]
    assert joined_spans([(0, 10 * mib), (10 * mib, 6 * mib), (16 * mib, 1)]) == [
        (0, 16 * mib),
        (16 * mib, 1),
    ]
    assert joined_spans([(0, 30 * mib), (5, 10)]) == [(0, 30 * mib)]
