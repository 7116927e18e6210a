"""Tables of sources that are kept between rounds are those that would be decoded again."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from rocketmq_tiered.maintenance import compaction_ranges, compaction_sources, kept_tables
from rocketmq_tiered.maintenance.compaction_plan import READERS_MAX, Candidates
from rocketmq_tiered.maintenance.compaction_round import plan_rounds, run_round
from rocketmq_tiered.maintenance.compaction_run import CompactionOptions
from rocketmq_tiered.maintenance.kept_tables import KeptTables
from rocketmq_tiered.maintenance.opened_sources import WANTED_DTYPE, OpenedSources
from rocketmq_tiered.maintenance.source_tables import Parents, SourceTables, queue_hashes
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.maintenance.compaction_scene import EVERYTHING, LIMITS, Scene
from tiered.errors import CorruptionError, StoreFullError
from tiered.formats.segment import BlockCodec
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import RUN_DTYPE
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

LIMIT = 1 << 24
SMALL = replace(LIMITS, runs_max=40, step_share=0.25)
NAMES = [QueueKey(f"topic{number}", number % 3, 0) for number in range(90)]


@pytest.fixture(autouse=True)
def _every_source_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tables, "RUNS_MIN", 1)
    monkeypatch.setattr(kept_tables, "PAGE_ROWS", 7)
    monkeypatch.setattr(compaction_sources, "GROUP_BYTES_MAX", 0)
    monkeypatch.setattr(compaction_ranges, "PAGE_RUNS", 9)


def decoded(*, lmq: bool = False) -> tuple[SourceTables, int]:
    """Of a set of many queues, with several blocks, batches, and rows with no key or some; and its key hashes."""
    store, rng = MemoryStore(), random.Random(7)
    sent = [
        Sent(
            rng.choice(NAMES), rng.randbytes(60), keys=[str(number) for number in range(rng.randint(0, 3))],
            inner_num=rng.randint(1, 3), lmq=[QueueKey("%LMQ%a", 0, 0)] if lmq else [],
        )
        for _ in range(400)
    ]  # fmt: skip
    ArchiveBuilder(store).commit(sent)
    (info,) = list(store.list("sets/"))
    index = SegmentIndex(info.key, info.size_bytes, store.get_range(info.key, 0, info.size_bytes))
    offset, length = index.key_span
    keys = index.decode_keys(store.get_range(info.key, offset, length))
    return SourceTables.of(index, keys, Parents(NAMES)), index.key_count


@pytest.mark.parametrize("seed", range(20))
def test_kept_tables_are_a_part_of_the_decoded_ones(tmp_path: Path, seed: int) -> None:
    whole, hashes = decoded()
    rng = random.Random(seed)
    first, end = sorted(rng.sample(range(len(whole.runs) + 1), 2)) if seed else (0, len(whole.runs))
    with KeptTables(tmp_path, LIMIT) as kept:
        kept.keep(whole, hashes)
        assert whole.key in kept
        part = kept.load(whole.key, first, end)
        assert part.first_run == first
        for name in whole.runs.dtype.names or ():
            assert part.runs[name].tolist() == whole.runs[name][first:end].tolist()
        blocks = whole.bounds.blocks_of_runs(np.arange(first, end))
        low, high = int(blocks[0][0]), int(blocks[1][-1])
        assert part.blocks.tobytes() == whole.blocks[low:high].tobytes()
        assert part.block_offsets.tolist() == whole.block_offsets[low:high].tolist()
        assert part.first_row.tolist() == whole.first_row[first : end + 1].tolist()
        ranges = (slice(first, end + 1),) * 2 + (slice(low, high + 1),) * 2
        for own, all_, which in zip(part.bounds, whole.bounds, ranges, strict=True):
            assert own.tolist() == all_[which].tolist()
        one, last = sorted(rng.sample(range(int(part.first_row[0]), int(part.first_row[-1]) + 1), 2))
        found, expected = part.rows(one, last), whole.rows(one, last)
        assert found.table.tobytes() == expected.table.tobytes()
        assert found.hashes.tolist() == expected.hashes.tolist()
    assert not any(tmp_path.iterdir())


def test_what_does_not_fit_or_has_lmqs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, hashes = decoded()
    with KeptTables(tmp_path, LIMIT) as kept:
        kept.keep(whole, hashes)
        size_bytes = kept.size_bytes
        kept.clear()
        assert whole.key not in kept and kept.size_bytes == 0
    for limit, is_kept in ((size_bytes, True), (size_bytes - 1, False)):
        with KeptTables(tmp_path, limit) as kept:
            kept.keep(whole, hashes)
            assert (whole.key in kept) == is_kept
    with KeptTables(tmp_path, LIMIT) as kept:
        kept.keep(*decoded(lmq=True))
        monkeypatch.setattr(kept_tables, "RUNS_MIN", len(whole.runs) + 1)
        kept.keep(whole, hashes)
        assert kept.size_bytes == 0


def test_hashes_tell_queues_apart() -> None:
    names = [
        QueueKey(f"topic{one}", two, three) for one in range(20) for two in range(20) for three in range(5)
    ]
    assert len(set(queue_hashes(names).tolist())) == len(names)
    assert queue_hashes([]).tolist() == []


def rounds(store: ObjectStore, scene: Scene, kept: KeptTables | None) -> tuple[int, int]:
    """Compact everything; returns how many rounds that took, and bytes read."""
    count = bytes_read = 0
    while (
        planned := next(plan_rounds(store, scene.state, SMALL, before_version=EVERYTHING), None)
    ) is not None:
        options = CompactionOptions(scene.spool, LIMIT, BlockCodec(block_bytes=600), kept_tables=kept)
        result = run_round(
            store, scene.state, planned, options, clock=lambda: NOW_MS, page_runs_max=9
        )  # fmt: skip
        assert result is not None
        count, bytes_read = count + 1, bytes_read + result.cost.bytes_read
    return count, bytes_read


def test_later_rounds_read_kept_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    loaded = 0
    load = KeptTables.load

    def counted(self: KeptTables, key: str, first_run: int, end_run: int) -> SourceTables:
        nonlocal loaded
        loaded += 1
        return load(self, key, first_run, end_run)

    monkeypatch.setattr(KeptTables, "load", counted)
    for is_kept in (False, True):
        scene = Scene(tmp_path, cycles=60, merge_sequences=3, merge_spills=3)
        with KeptTables(tmp_path, LIMIT // 4) as kept:
            figures.append(rounds(scene.store, scene, kept if is_kept else None))
            if is_kept:
                assert loaded > READERS_MAX
        scene.collect()
        scene.check()
    (few, more), (same, fewer) = figures
    assert few == same > 4
    assert fewer < more


def test_tables_that_leave_no_room_for_outputs_are_forgotten(tmp_path: Path) -> None:
    scene = Scene(tmp_path, cycles=60, merge_sequences=3, merge_spills=3)
    with KeptTables(tmp_path, LIMIT) as kept:
        assert rounds(scene.store, scene, kept)[0] > 4
        assert kept.size_bytes == 0
    scene.collect()
    scene.check()


def test_a_run_that_a_kept_source_does_not_have_is_reported(tmp_path: Path) -> None:
    whole, hashes = decoded()
    with KeptTables(tmp_path, LIMIT) as kept:
        kept.keep(whole, hashes)
        beyond = len(whole.runs)
        part = kept.load(whole.key, beyond, beyond + 1)
        opened = OpenedSources([part])
        runs, wanted = np.zeros(1, RUN_DTYPE), np.zeros(1, WANTED_DTYPE)
        runs["ordinal"] = beyond
        candidates = cast("Candidates", SimpleNamespace(runs=runs, queues=NAMES))
        with pytest.raises(CorruptionError, match=f"has no run {beyond}"):
            opened.places_of(candidates, queue_hashes(NAMES), wanted)
        runs["ordinal"] = beyond - 1
        with pytest.raises(CorruptionError, match="is not the catalog's"):
            opened.places_of(candidates, queue_hashes(NAMES), wanted)


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int, _data: memoryview, _position: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    scene = Scene(tmp_path, cycles=60, merge_sequences=3, merge_spills=3)
    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(StoreFullError, match="no space is left in"),
        KeptTables(tmp_path, LIMIT // 4) as kept,
    ):
        rounds(scene.store, scene, kept)
    assert not any(tmp_path.iterdir())
    scene.collect()
    scene.check()
