"""Objects of timers: what is written is read, merged in order, and sorted out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from tiered.archive.timers import Slice, TimerFiles, sort_out
from tiered.catalog.state import CatalogState
from tiered.catalog.timer_refs import TimerRef, after_change
from tiered.errors import CorruptionError
from tiered.formats import timer_object
from tiered.formats.timer_object import ENTRY_DTYPE, encode_timers, sorted_entries
from tiered.model.queue import QueueKey
from tiered.model.tables import Table
from tiered.object_store.memory import MemoryStore

HOUR = 3_600_000
QUEUES = [QueueKey("T", 0, 0), QueueKey("T", 1, 0)]


def entries(*rows: tuple[int, int, int, int]) -> Table:
    """(ms, key, order, kind)."""
    table = np.zeros(len(rows), ENTRY_DTYPE)
    for at, (ms, key, order, kind) in enumerate(rows):
        table[at] = (ms, key, order, order * 10, order % 2, kind)
    return sorted_entries(table)


def put(store: MemoryStore, number: int, table: Table, queues: Sequence[QueueKey] = QUEUES) -> TimerRef:
    encoded = encode_timers(iter([table]), queues)
    ref = TimerRef.of(encoded, 1, number)
    store.put_if_absent(ref.key, encoded.body)
    return ref


@pytest.mark.parametrize("seed", range(4))
def test_entries_of_many_objects_are_read_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_object, "PAGE_ROWS", 7)
    rng, store = random.Random(seed), MemoryStore()
    refs, everything = [], []
    for number in range(5):
        rows = [
            (rng.randrange(3 * HOUR), rng.randrange(4), 1000 * number + at, rng.choice([0, 0, 1]))
            for at in range(rng.randrange(1, 60))
        ]
        queues = QUEUES if number % 2 else QUEUES[::-1]
        refs.append(put(store, number, entries(*rows), queues))
        everything += [(*row[:3], queues[row[2] % 2]) for row in rows]
    files, state = TimerFiles(store), CatalogState(timers=tuple(refs))
    found, ends = [], {}
    before_ms = 2 * HOUR + 5
    for some in files.merged([Slice(ref, 0, ref.entries) for ref in refs], before_ms):
        found += [(*row[:3], some.queues[row[4]]) for row in some.table.tolist()]
        keys = {tuple(row[:2]) for row in some.table.tolist()}
        assert not keys & {row[:2] for row in found[: -len(some.table)]}
        for part in some.slices:
            assert part.first == ends.get(part.ref, 0)
            ends[part.ref] = part.last
    assert found == sorted(row for row in everything if row[0] < before_ms)
    assert files.hours(state) == {
        hour: count for hour in range(3) if (count := sum(row[0] // HOUR == hour for row in everything))
    }
    claimed = CatalogState(timers=tuple(ref.moved(0, ends.get(ref, 0)) for ref in refs))
    left = [row for row in everything if row[0] >= before_ms]
    assert sum(files.hours(claimed).values()) == len(left)
    assert min(map(files.next_ms, claimed.timers)) == min(row[0] for row in left)


def test_cancelled_and_repeated_timers_are_told_apart() -> None:
    found = sort_out(
        entries(
            (5, 1, 1, 0), (5, 1, 2, 1), (5, 1, 3, 0), (5, 1, 4, 0), (5, 2, 9, 1), (5, 2, 10, 0), (0, 4, 3, 2)
        )
    )
    assert [table["order"].tolist() for table in found] == [[3, 10], [1], [4], [9], [3]]


def test_a_damaged_object_is_named() -> None:
    store = MemoryStore()
    ref = put(store, 1, entries((5, 1, 1, 0), (6, 2, 2, 0)))
    data = bytearray(store.get_range(ref.key, 0, ref.size_bytes))
    data[45] ^= 1
    store.delete([ref.key])
    store.put_if_absent(ref.key, [bytes(data)])
    with pytest.raises(CorruptionError, match=ref.key):
        TimerFiles(store).rows(ref, 0, 2)


def test_progress_only_rises_and_ends_an_object() -> None:
    ref = TimerRef(3, 1, 5, 9, 10, 2, 4, 100, 50)

    def change(
        *changed: TimerRef, may_move: bool = True, garbage: tuple[str, ...] = ()
    ) -> tuple[TimerRef, ...]:
        return after_change([ref], changed, epoch=3, may_move=may_move, pending_deletions=garbage)

    assert change(ref.moved(4, 8)) == (ref.moved(4, 8),)
    assert change(ref.over) == ()
    new = TimerRef(3, 2, 5, 9, 10, 0, 0, 100, 50)
    assert change(ref.over, new) == (new,)
    for bad in (
        ref.moved(1, 4),
        ref.moved(2, 3),
        ref._replace(entries=11),
        new._replace(epoch=2),
        new.moved(0, 1),
    ):
        with pytest.raises(ValueError, match="timer"):
            change(bad)
    with pytest.raises(ValueError, match="cannot be changed"):
        change(ref.moved(4, 4), may_move=False)
    with pytest.raises(ValueError, match="pending deletion"):
        change(new, garbage=(new.key,))
