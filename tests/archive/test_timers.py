"""Objects of timers: what is written is read, merged in order, and sorted out."""

import random
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest

from tests.archive.timer_fates import entries_of, fate_of
from tiered.archive.timers import Entries, Slice, TimerFiles, joined, sort_out
from tiered.catalog.state import CatalogState
from tiered.catalog.timer_refs import TimerRef, after_change
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats import timer_object
from tiered.formats.timer_object import ENTRY_DTYPE, encode_timers, sorted_entries
from tiered.model.queue import QueueKey
from tiered.model.tables import Table
from tiered.model.timer import EntryKind, TimerPlace
from tiered.object_store.memory import MemoryStore

HOUR = 3_600_000
QUEUES, TOPICS = [QueueKey("T", 0, 0), QueueKey("T", 1, 0)], ["orders", "mails"]
TIMER, CANCEL, CANCEL_PLACE, REFUSED, POSTPONED = map(int, EntryKind)


def entries(*rows: tuple[int, ...]) -> Table:
    """(ms, key, physical offset, kind), and perhaps (number of the topic, queue offset, queue, changes)."""
    table = np.zeros(len(rows), ENTRY_DTYPE)
    for at, (ms, key, phys, kind, *more) in enumerate(rows):
        topic, offset, queue, changes = more or (0, phys * 10, phys % 2, 0)
        table[at] = (ms, key, phys, offset, queue, topic, kind, 0, changes, 0)
    return sorted_entries(table)


def put(store: MemoryStore, number: int, table: Table, queues: Sequence[QueueKey] = QUEUES) -> TimerRef:
    encoded = encode_timers(iter([(table, queues, TOPICS)]))
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
            (rng.randrange(3 * HOUR), rng.randrange(4), 1000 * number + at, TIMER)
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
        assert all(end > ends.get(ref, 0) for ref, end in some.ends.items())
        ends |= some.ends
    assert found == sorted(row for row in everything if row[0] < before_ms)
    assert files.counts(state).hours == {
        hour: count for hour in range(3) if (count := sum(row[0] // HOUR == hour for row in everything))
    }
    claimed = CatalogState(timers=tuple(ref.moved(0, ends.get(ref, 0)) for ref in refs))
    left = [row for row in everything if row[0] >= before_ms]
    assert files.counts(claimed).pending == len(left)
    assert min(map(files.next_ms, claimed.timers)) == min(row[0] for row in left)


@pytest.mark.parametrize("seed", range(40))
def test_what_becomes_of_entries_and_their_counts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few times, keys, topics and places: everything collides. Counts are the same however entries are read."""
    monkeypatch.setattr(timer_object, "PAGE_ROWS", 5)
    rng, store = random.Random(seed), MemoryStore()

    def some() -> tuple[int, ...]:
        kind = rng.choice([TIMER, TIMER, *EntryKind])
        ms, key, phys = rng.randrange(3) * HOUR, rng.randrange(2), rng.randrange(8)
        more = phys % 2, rng.randrange(3), rng.randrange(2), rng.randrange(3)
        return ms, key, phys, int(kind), *more

    rows = sorted({some() for _ in range(rng.randrange(1, 40))})
    refs, every = [], entries(*rows).tolist()
    for number in range(3):
        if part := [row for at, row in enumerate(rows) if at % 3 == number]:
            refs.append(put(store, number, entries(*part)))
    files, state = TimerFiles(store), CatalogState(timers=tuple(refs))
    read = joined(list(files.pending(state, 0, 3 * HOUR)))
    found = sort_out(read)
    for name, table in found._asdict().items():
        wanted = sorted(row[:3] for row in every if fate_of(row, every) == name)
        assert sorted(row[:3] for row in table.tolist()) == wanted, name
    timers = found.timers
    hours = {hour: count for hour in range(3) if (count := int((timers["deliver_ms"] == hour * HOUR).sum()))}
    postponed = int((timers["kind"] == POSTPONED).sum())
    assert files.counts(state) == (hours, postponed, len(found.refused))
    assert sum(map(len, files.pending_times(state).values())) == len(timers)
    place = TimerPlace(1, 2)
    at_place = (timers["queue"] == read.queues.index(QUEUES[1])) if QUEUES[1] in read.queues else False
    at_place &= timers["queue_offset"] == 2
    with nullcontext() if at_place.any() else pytest.raises(NotFoundError):
        assert len(files.find(state, place).table) == at_place.sum()


def test_a_record_of_several_log_histories_is_one_timer() -> None:
    table = entries((5, 1, 1, TIMER), (5, 1, 1, TIMER), (5, 1, 2, TIMER))
    assert sort_out(Entries(table, QUEUES, TOPICS)).timers["physical_offset"].tolist() == [1, 2]


def test_a_damaged_object_is_named() -> None:
    store = MemoryStore()
    ref = put(store, 1, entries((5, 1, 1, 0), (6, 2, 2, 0)))
    data = bytearray(store.get_range(ref.key, 0, ref.size_bytes))
    data[45] ^= 1
    store.delete([ref.key])
    store.put_if_absent(ref.key, [bytes(data)])
    with pytest.raises(CorruptionError, match=ref.key):
        entries_of(TimerFiles(store), [ref])


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


def test_only_hours_with_other_entries_are_read_to_be_counted_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, reads = MemoryStore(), list[int]()
    rows = [(hour * HOUR, hour, 100 * hour, TIMER) for hour in range(20)]
    refs = [
        put(store, 0, entries(*rows)),
        put(store, 1, entries((7 * HOUR, 7, 999, CANCEL), (9 * HOUR, 1, 5, TIMER))),
    ]
    right = store.get_range

    def get_range(key: str, offset: int, length: int) -> bytes:
        reads.append(length)
        return right(key, offset, length)

    monkeypatch.setattr(store, "get_range", get_range)
    files, state = TimerFiles(store), CatalogState(timers=tuple(refs))
    assert files.counts(CatalogState(timers=(refs[0],))).pending == 20 and len(reads) == 1, "the footer"
    assert not list(files.merged([Slice(refs[0], 0, 20)], 0)) and len(reads) == 1, "nothing is due"
    assert files.counts(state).pending == 20 and len(reads) == 4, "a footer, and a page of each"
    assert (
        files.counts(state).hours == dict.fromkeys([*range(7), 8, *range(10, 20)], 1) | {9: 2}
        and len(reads) == 4
    )
