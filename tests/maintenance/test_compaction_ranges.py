"""Large sequences of pages are compacted piece by piece: no run is lost, and memory follows ``runs_max``."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maintenance.compaction_forecast import forecast
from maintenance.compaction_ranges import Versions, ranges_of, within, write_rests
from maintenance.compaction_round import plan_rounds, run_round
from maintenance.compaction_run import CompactionOptions
from tests.flat_file.archive_builder import NOW_MS
from tests.maintenance.compaction_scene import EVERYTHING, LIMITS, QUEUES, Scene
from tiered.catalog.page_merge import sequences_of
from tiered.catalog.pages import Page, RunIndex, cut, decode_page
from tiered.catalog.state import RunChunk
from tiered.formats.segment import BlockCodec
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE

SMALL = replace(LIMITS, runs_max=40)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """One sequence of many pages, larger than a round takes, and some smaller ones."""
    found = Scene(tmp_path, cycles=90, merge_sequences=3, merge_spills=3)
    assert max(sum(page.runs for page in one) for one in sequences_of(found.state.pages)) > 3 * SMALL.runs_max
    return found


def test_rounds_take_a_piece_of_a_large_sequence_and_nothing_is_lost(scene: Scene) -> None:
    objects, rounds = scene.data_objects(), 0
    while (
        planned := next(plan_rounds(scene.store, scene.state, SMALL, before_version=EVERYTHING), None)
    ) is not None:
        assert len(planned.candidates.runs) <= SMALL.runs_max
        options = CompactionOptions(scene.spool, 10**7, BlockCodec(block_bytes=600))
        assert (
            run_round(scene.store, scene.state, planned, options, clock=lambda: NOW_MS, page_runs_max=9)
            is not None
        )
        scene.check()
        rounds += 1
        assert rounds < 60, "rounds come to an end"
    assert rounds > 4
    scene.collect()
    scene.check()
    assert scene.data_objects() * 3 < objects


def test_pieces_cover_all_versions_once(scene: Scene) -> None:
    state = scene.state
    index = RunIndex(scene.store)
    for ranges in ranges_of(state, index, EVERYTHING, SMALL.runs_max):
        for one in ranges:
            if one.within is None:
                assert len(ranges) == 1
                continue
            versions = sorted([one.within, *one.rests], key=lambda part: part.first)
            assert versions[0].first == one.pages[0].from_version
            assert versions[-1].last == one.pages[0].to_version
            assert all(later.first == before.last + 1 for before, later in pairwise(versions))
            assert sum(part.runs for part in versions) == sum(page.runs for page in one.pages)
            runs = sum(len(within(index.read_page(ref), one.within).chunk.runs) for ref in one.pages)
            assert runs == one.within.runs <= SMALL.runs_max
        if len(ranges) > 1:
            runs = [one.within.runs for one in ranges if one.within is not None]
            assert [one.share for one in ranges] == [runs[at] / sum(runs[at:]) for at in range(len(runs))]


def test_the_forecast_of_a_large_sequence_is_that_of_its_first_piece_times_their_number(scene: Scene) -> None:
    exact = forecast(plan_rounds(scene.store, scene.state, LIMITS, before_version=EVERYTHING))
    about = forecast(plan_rounds(scene.store, scene.state, SMALL, before_version=EVERYTHING))
    assert about.objects == pytest.approx(exact.objects, rel=0.3)
    assert about.message_bytes == pytest.approx(exact.message_bytes, rel=0.3)
    assert about.rounds > exact.rounds
    assert 0 < about.estimated < about.rounds
    assert exact.estimated == 0


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(1, 12),
)
def test_rests_have_the_runs_of_their_versions(
    rows: list[tuple[int, int]], source_runs_max: int, runs_max: int
) -> None:
    rows.sort()
    runs = np.zeros(len(rows), RUN_DTYPE)
    runs["queue"], runs["version"] = zip(*rows, strict=True)
    runs["base_queue_offset"] = np.arange(len(rows))
    objects = np.zeros(1, OBJECT_DTYPE)
    page = Page(QUEUES, RunChunk(runs, objects, ("sets/1",)))
    rests = [Versions(1, 3, 0), Versions(7, 7, 0), Versions(8, 12, 0)]
    put: list[Page] = []
    refs = write_rests(
        cut(page, source_runs_max), rests, 2, runs_max,
        lambda version, data: put.append(decode_page(data, source="page")) or f"{version}/{len(put)}",
    )  # fmt: skip
    assert all(len(one.chunk.runs) <= runs_max for one in put)
    for rest in rests:
        mine = [(ref, one) for ref, one in zip(refs, put, strict=True) if ref.to_version == rest.last]
        found = [
            (one.queues[int(run["queue"])], int(run["base_queue_offset"]), int(run["version"]))
            for _, one in mine
            for run in one.chunk.runs
        ]
        expected = [
            (QUEUES[queue], at, version)
            for at, (queue, version) in enumerate(rows)
            if rest.first <= version <= rest.last
        ]
        assert found == expected
        assert all((ref.from_version, ref.level) == (rest.first, 2) for ref, _ in mine)
        assert len(mine) <= -(-len(expected) // runs_max)
