"""Pages keep every run findable through spills and merges, with memory that does not follow history.

Pages lie side by side in objects, and are found again by the names the change has.
"""

import random
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.drafts import queue
from tiered.catalog import page_merge
from tiered.catalog.commit import PageChange
from tiered.catalog.page_bytes import read_page_bytes
from tiered.catalog.page_merge import merge, merged_pages, sequence_to_merge, union
from tiered.catalog.page_writer import PagePacks
from tiered.catalog.pages import (
    Page,
    RunIndex,
    cut,
    decode_catalog_page,
    encode_catalog_page,
    sorted_page,
    write_pages,
)
from tiered.catalog.state import REMOVED_DTYPE, CatalogState, PageRef, RunChunk
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import CorruptionError
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE
from tiered.object_store.memory import MemoryStore

Fact = tuple[QueueKey, int, int, str]


def chunk_of(facts: list[Fact]) -> tuple[list[QueueKey], RunChunk]:
    """(queue, base, version, object key) as a chunk."""
    queues = list(dict.fromkeys(fact[0] for fact in facts))
    keys = list(dict.fromkeys(fact[3] for fact in facts))
    runs = np.zeros(len(facts), RUN_DTYPE)
    runs["queue"] = [queues.index(fact[0]) for fact in facts]
    runs["object"] = [keys.index(fact[3]) for fact in facts]
    runs["base_queue_offset"] = [fact[1] for fact in facts]
    runs["version"] = [fact[2] for fact in facts]
    objects = np.zeros(len(keys), OBJECT_DTYPE)
    objects["key"] = np.arange(len(keys))
    return queues, RunChunk(runs, objects, tuple(keys))


def facts_of(page: Page) -> list[Fact]:
    chunk = page.chunk
    return [
        (
            page.queues[run["queue"]],
            int(run["base_queue_offset"]),
            int(run["version"]),
            chunk.object_keys[chunk.objects["key"][run["object"]]],
        )
        for run in chunk.runs
    ]


def random_facts(seed: int, version: int, count: int) -> list[Fact]:
    source = random.Random(seed)
    names = [QueueKey(f"t{source.randrange(6)}", source.randrange(3), 0) for _ in range(count)]
    return [
        (name, version * 1000 + index, version, f"o{version}-{source.randrange(4)}")
        for index, name in enumerate(names)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_page_is_sorted_cut_and_read_back(seed: int) -> None:
    facts = random_facts(seed, 1, 40)
    page = sorted_page(*chunk_of(facts))
    assert facts_of(page) == sorted(facts)
    pieces = [decode_catalog_page(encode_catalog_page(piece), source="x") for piece in cut(page, 7)]
    assert [fact for piece in pieces for fact in facts_of(piece)] == sorted(facts)
    assert all(len(piece.chunk.runs) <= 7 for piece in pieces)
    for piece in pieces:
        assert len(piece.chunk.object_keys) == len({fact[3] for fact in facts_of(piece)})
        assert list(piece.queues) == sorted({fact[0] for fact in facts_of(piece)})
    assert facts_of(union(pieces)) == sorted(facts)


@pytest.mark.parametrize("runs_max", [1, 3, 8, 100])
def test_merging_streams_all_living_runs(runs_max: int) -> None:
    store = MemoryStore()
    made: list[str] = []

    def put(version: int, data: bytes) -> str:
        made.append(f"pages/p{len(made)}")
        store.put_if_absent(made[-1], [data])
        return made[-1]

    everything: list[Fact] = []
    pages: list[PageRef] = []
    for version in range(1, 5):
        facts = random_facts(version, version, 5 * version)
        everything += facts
        pages += write_pages(cut(sorted_page(*chunk_of(facts)), 4), 0, (version, version), put)
    dead = everything[3]
    queues = [dead[0]]
    tombstones = np.zeros(1, REMOVED_DTYPE)
    tombstones["base_queue_offset"], tombstones["version"] = dead[1], dead[2]
    state = CatalogState(tombstones=tombstones)
    state = CatalogState(
        directory=state.directory.extended(0, queues),
        table=np.zeros(1, state.table.dtype),
        tombstones=tombstones,
        pages=tuple(pages),
    )
    sequences = sequence_to_merge(pages, merging(4, 4))
    assert [sequence[0].from_version for sequence in sequences] == [1, 2, 3, 4]
    refs = merge(RunIndex(store), state, sequences, runs_max, put)
    assert all(ref.level == 1 and (ref.from_version, ref.to_version) == (1, 4) for ref in refs)
    index = RunIndex(store)
    merged = [fact for ref in refs for fact in facts_of(index.page(ref))]
    assert merged == sorted(fact for fact in everything if fact != dead)
    assert all(ref.runs <= runs_max and ref.first <= ref.last for ref in refs)


def wide_page(first: int, count: int, stream: int) -> Page:
    """Runs of one queue at every fourth offset, each in an object of its own."""
    name = QueueKey("t", 0, 0)
    facts = [(name, 4 * (first + index) + stream, 1, f"{stream}-{first + index}") for index in range(count)]
    return sorted_page(*chunk_of(facts))


def merge_peak_bytes(pages_each: int) -> int:
    streams = [(wide_page(100 * page, 100, stream) for page in range(pages_each)) for stream in range(4)]
    tracemalloc.start()
    try:
        assert sum(len(page.chunk.runs) for page in merged_pages(streams, 100)) == 400 * pages_each
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_memory_of_a_merge_does_not_grow_with_the_history() -> None:
    merge_peak_bytes(1)
    assert merge_peak_bytes(40) < 1.5 * merge_peak_bytes(8)


def test_a_merge_of_uneven_sequences_takes_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first few runs of each sequence again and again, because most of them are short."""
    steps: list[int] = []

    def counted(heads: Sequence[Page], runs_max: int) -> list[int]:
        steps.append(sum(found := next_runs(heads, runs_max)))
        return found

    next_runs = page_merge._next_runs
    monkeypatch.setattr(page_merge, "_next_runs", counted)
    name = QueueKey("t", 0, 0)
    short = [
        sorted_page(*chunk_of([(name, 41 * at + 2 * stream + 1, 2, "o") for at in range(90)]))
        for stream in range(20)
    ]
    long = (wide_page(100 * page, 100, 0) for page in range(90))
    runs = sum(len(page.chunk.runs) for page in merged_pages([long, *(iter([page]) for page in short)], 100))
    assert runs == sum(steps) == 9000 + 20 * 90
    assert len(steps) < 300 and max(steps) <= 100


def test_a_merge_of_a_corrupt_page_ends() -> None:
    name = QueueKey("t", 0, 0)
    same = sorted_page(*chunk_of([(name, 7, version, "o") for version in range(9)]))
    streams = [iter([same]), *(iter([wide_page(2, 1, stream)]) for stream in range(9))]
    assert sum(len(found.chunk.runs) for found in merged_pages(streams, 8)) == 18


def test_nothing_is_merged_before_a_level_is_full() -> None:
    def ref(level: int, version: int) -> PageRef:
        name = QueueKey("t", 0, 0)
        return PageRef(f"{level}/{version}", level, version, version, 1, 1, name, name, 0, 0, 0, 0)

    pages = [ref(0, 9), ref(0, 8), ref(1, 1), ref(1, 2), ref(1, 3)]
    assert not sequence_to_merge(pages, merging(4, 4))
    assert [s[0].from_version for s in sequence_to_merge(pages, merging(2, 2))] == [8, 9]
    assert [s[0].from_version for s in sequence_to_merge(pages, merging(2, 3))] == [1, 2]
    assert [s[0].from_version for s in sequence_to_merge(pages, merging(3, 3))] == [1, 2, 3]


def test_the_last_merge_takes_fewer_spills_and_as_many_as_memory_allows() -> None:
    def ref(version: int) -> PageRef:
        name = QueueKey("t", 0, 0)
        return PageRef(str(version), 0, version, version, 1, 1, name, name, 0, 0, 0, 0)

    pages = [ref(version) for version in range(1, 6)]
    assert not sequence_to_merge(pages, merging(2, 6))
    assert len(sequence_to_merge(pages, merging(2, 6), is_last=True)) == 5
    assert [s[0].from_version for s in sequence_to_merge(pages, merging(2, 3), is_last=True)] == [1, 2, 3]
    assert not sequence_to_merge(pages[:1], merging(2, 3), is_last=True)


def merging(sequences: int, spills: int) -> CatalogLimits:
    return CatalogLimits(merge_sequences=sequences, merge_spills=spills)


def test_the_page_cache_is_bounded() -> None:
    store = MemoryStore()
    refs = []
    for number in range(10):
        data = encode_catalog_page(sorted_page(*chunk_of(random_facts(number, 1, 50))))
        store.put_if_absent(f"pages/{number}", [data])
        name = QueueKey("t", 0, 0)
        refs.append(PageRef(f"pages/{number}", 0, 1, 1, 50, len(data), name, name, 0, 0, 0, 0))
    index = RunIndex(store, cache_bytes=30_000)
    for ref in refs * 2:
        index.page(ref)
        assert sum(page.nbytes for _, page in index._pages) <= 30_000 or len(index._pages) == 1
    assert 1 <= len(index._pages) < 10


def test_a_page_that_disagrees_with_the_catalog_is_refused() -> None:
    store = MemoryStore()
    page = sorted_page(*chunk_of(random_facts(1, 1, 5)))
    store.put_if_absent("pages/x", [encode_catalog_page(page)])
    name = QueueKey("t", 0, 0)
    with pytest.raises(CorruptionError, match="has 5 runs, but the catalog says 6"):
        RunIndex(store).page(PageRef("pages/x", 0, 1, 1, 6, 1, name, name, 0, 0, 0, 0))
    page.chunk.runs["object"][2] = 99
    with pytest.raises(CorruptionError, match="refers to row"):
        decode_catalog_page(encode_catalog_page(page), source="pages/x")


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12), st.integers(1, 100))
def test_every_page_is_found_where_the_change_says(pages: list[bytes], pack_bytes: int) -> None:
    store = MemoryStore()

    def put(version: int, body: Sequence[bytes]) -> str:
        key = f"pages/{version}-{len(list(store.list('pages/')))}"
        store.put_if_absent(key, body)
        return key

    packs = PagePacks(put, pack_bytes)
    names = [packs.add(7, page) for page in pages]
    added = [
        PageRef(name, 0, 1, 1, 1, len(page), queue(), queue(), 0, 0, 0, 0)
        for name, page in zip(names, pages, strict=True)
    ]
    assert [read_page_bytes(store, ref.key) for ref in packs.put(PageChange(added=added)).added] == pages
    sizes = [len(store.get(info.key)) for info in store.list("pages/")]
    assert all(size <= max(pack_bytes, *map(len, pages)) for size in sizes)
