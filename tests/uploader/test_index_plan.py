"""Which index files are made and merged: pure decisions."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered.catalog.index_refs import IndexRef
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE
from uploader.index_plan import DAY_MS, MERGES_MAX, Segment, combined, groups_of, plan_merge

DAY = 19_000
RUN = np.zeros(1, RUN_DTYPE)


def ref(number: int, *, level: int = 0, day: int = DAY, size_bytes: int = 100) -> IndexRef:
    """File number ``number`` of an archive."""
    end_ms = day * DAY_MS + number
    return IndexRef(
        f"index/{number}", level, number, number, end_ms, end_ms, 0, 1, 5, 0, (1, 1, 1, 0), 1, size_bytes, 60
    )


def segment(version: int, *, day: int = DAY, rows: int = 10, key: str = "") -> Segment:
    """A segment one version added."""
    place = np.zeros(1, OBJECT_DTYPE)
    place["rows"] = rows
    place["min_phys"], place["end_phys"] = version * 100, version * 100 + 50
    return Segment(key or f"sets/{version}", place[0], RUN, version, day * DAY_MS, day * DAY_MS + 5)


def keys(refs: Sequence[IndexRef]) -> list[str]:
    return [found.key for found in refs]


def test_a_file_is_cut_where_a_day_begins_and_where_it_grows_too_large() -> None:
    segments = [segment(3), segment(5), segment(5, key="sets/other"), segment(6), segment(8, day=DAY + 1)]
    groups = groups_of(segments[::-1], 30, 100)
    assert [[s.version for s in group.segments] for group in groups] == [[3, 5, 5], [6], [8]]
    meta = groups[0].meta(1)
    assert (meta.from_version, meta.to_version, meta.begin_phys, meta.end_phys) == (1, 5, 300, 550)
    assert sorted(groups[0].covered().keys) == ["sets/3", "sets/5", "sets/other"]


def test_a_file_covers_a_bounded_number_of_objects() -> None:
    groups = groups_of([segment(number) for number in range(1, 8)], 1000, 3)
    assert [[s.version for s in group.segments] for group in groups] == [[1, 2, 3], [4, 5, 6], [7]]


def test_a_version_is_never_split() -> None:
    groups = groups_of([segment(1, rows=50, key=f"sets/{n}") for n in range(3)] + [segment(2)], 60, 100)
    assert [[s.version for s in group.segments] for group in groups] == [[1, 1, 1], [2]]


def test_an_object_whose_runs_lie_in_several_pages_is_read_once() -> None:
    other = RUN.copy()
    other["ordinal"] = 4
    found = combined([segment(1), replace(segment(1), runs=other), segment(2)])
    assert [s.runs["ordinal"].tolist() for s in found] == [[0, 4], [0]]


def test_a_day_has_few_files_each_rewritten_few_times() -> None:
    refs, numbers, written, most = list[IndexRef](), range(1, 271), 0, 0
    for number in numbers:
        refs.append(ref(number))
        while merging := plan_merge(refs, 5):
            begin = refs.index(merging[0])
            size_bytes, level = sum(old.size_bytes for old in merging), 1 + max(old.level for old in merging)
            written += size_bytes // 100
            refs[begin : begin + len(merging)] = [
                ref(merging[-1].to_version, level=level, size_bytes=size_bytes)
            ]
        most = max(most, len(refs))
    assert most == 5 and max(found.level for found in refs) == 5
    assert written <= 5 * len(numbers)


def test_files_that_were_merged_often_are_left_alone() -> None:
    often = [ref(number, level=MERGES_MAX) for number in range(1, 9)]
    assert plan_merge([*often, ref(9)], 2) == []
    assert keys(plan_merge([*often, ref(9), ref(10), ref(11)], 2)) == ["index/9", "index/10", "index/11"]
    refs = [ref(1, level=1), ref(2, level=1), ref(3), ref(4, level=1), ref(5)]
    assert keys(plan_merge(refs, 4)) == keys(refs)


def test_a_day_that_is_over_becomes_one_file() -> None:
    refs = [ref(1), ref(2, level=3), ref(3), ref(4, day=DAY + 1)]
    assert keys(plan_merge(refs, 5)) == ["index/1", "index/2", "index/3"]


def test_one_message_from_the_future_does_not_end_the_days_after_it() -> None:
    """Else the day's one file would be written again with every new one, forever: one damaged timestamp is enough."""
    future = ref(1, day=DAY + 100_000)
    assert plan_merge([future, ref(2, level=2, size_bytes=10_000), ref(3)], 5) == []
    refs, written = [future], 0
    for number in range(2, 202):
        refs.append(ref(number))
        written += 1
        while merging := plan_merge(refs, 5):
            at = refs.index(merging[0])
            level = 1 + max(old.level for old in merging)
            written += sum(old.size_bytes // 100 for old in merging)
            refs[at : at + len(merging)] = [
                ref(merging[-1].to_version, level=level, size_bytes=sum(old.size_bytes for old in merging))
            ]
    assert len(refs) <= 6
    assert written <= 200 * 6


def test_the_end_of_a_backfill_leaves_a_large_file_alone_for_little() -> None:
    assert plan_merge([ref(1, size_bytes=1000), ref(2, size_bytes=10)], 8, is_final=True) == []
    assert len(plan_merge([ref(1, size_bytes=1000), ref(2, size_bytes=300)], 8, is_final=True)) == 2


def test_the_end_of_a_backfill_leaves_one_file_of_a_day_that_has_ended() -> None:
    refs = [ref(1, size_bytes=1000), ref(2, size_bytes=10)]
    day_ends_ms = (refs[-1].end_ms // DAY_MS + 1) * DAY_MS
    assert plan_merge(refs, 8, is_final=True, now_ms=day_ends_ms) == refs
    assert plan_merge(refs, 8, is_final=True, now_ms=day_ends_ms - 1) == []
    assert plan_merge(refs, 8, now_ms=day_ends_ms) == []


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 1000)), max_size=30),
    st.integers(2, 5),
    st.booleans(),
)
def test_merging_ends_with_few_files(
    rows: list[tuple[int, int, int]], day_files_max: int, is_final: bool
) -> None:
    """Every plan merges neighbours of one day; repeating it ends, with one file a day that is over."""
    days = sorted(day for _, day, _ in rows)
    refs = [
        ref(number, level=level, day=DAY + day, size_bytes=size)
        for number, ((level, _, size), day) in enumerate(zip(rows, days, strict=True), 1)
    ]
    for _ in range(100):
        merging = plan_merge(refs, day_files_max, is_final=is_final)
        if not merging:
            break
        first = refs.index(merging[0])
        assert refs[first : first + len(merging)] == merging
        assert len({found.end_ms // DAY_MS for found in merging}) == 1
        merged = merging[-1]._replace(
            key=f"{merging[0].key}+",
            level=1 + max(found.level for found in merging),
            size_bytes=sum(found.size_bytes for found in merging),
        )
        refs[first : first + len(merging)] = [merged]
    else:
        raise AssertionError("merging does not end")
    newest = max((found.end_ms // DAY_MS for found in refs), default=0)
    over = [found.end_ms // DAY_MS for found in refs if found.end_ms // DAY_MS < newest]
    assert len(over) == len(set(over))
    assert len(refs) <= len(set(over)) + day_files_max
