"""Decoded pages: bounded over all indexes, each index's its own, decoded once while they are used."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered.formats.page_cache import PAGE_COST_BYTES, Columns, PageCache

ROWS = 10
PAGE_BYTES = ROWS * 8 + PAGE_COST_BYTES


class Index:
    """Decodes pages that say whose they are."""

    def __init__(self, cache: PageCache) -> None:
        self._cache, self.owner = cache, cache.number_of(self)
        self.decoded: list[int] = []

    def page(self, page: int) -> Columns:
        return self._cache.get(self.owner, page, self._decode)

    def _decode(self, page: int) -> Columns:
        self.decoded.append(page)
        return (np.full(ROWS, self.owner * 1000 + page),)


@given(st.integers(0, 6), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=60))
def test_pages_are_the_index_own_and_bounded(kept: int, asked: list[tuple[int, int]]) -> None:
    cache = PageCache(kept * PAGE_BYTES)
    indexes = [Index(cache) for _ in range(3)]
    recent: list[tuple[int, int]] = []
    for number, page in asked:
        index = indexes[number]
        before = len(index.decoded)
        (column,) = index.page(page)
        assert column.tolist() == [index.owner * 1000 + page] * ROWS
        assert len(index.decoded) - before == ((number, page) not in recent)
        recent = [one for one in recent if one != (number, page)] + [(number, page)]
        recent = recent[len(recent) - kept :] if len(recent) > kept else recent
        assert len(cache) == len(recent) and cache.held_bytes == len(recent) * PAGE_BYTES


def test_what_is_gone_leaves_no_pages_behind() -> None:
    cache = PageCache(100 * PAGE_BYTES)
    stays, goes = Index(cache), Index(cache)
    for page in range(5):
        stays.page(page)
        goes.page(page)
    assert len(cache) == 10
    del goes
    stays.page(5)
    assert len(cache) == 6 and cache.held_bytes == 6 * PAGE_BYTES
    assert [stays.page(page)[0][0] for page in range(6)] == [stays.owner * 1000 + page for page in range(6)]
    assert stays.decoded == [*range(6)]


def test_many_tiny_pages_are_bounded_by_what_they_take() -> None:
    index = Index(PageCache(1 << 20))
    tracemalloc.start()
    for page in range(20_000):
        index.page(page)
    index.decoded.clear()
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held_bytes < 1.2 * (1 << 20)
