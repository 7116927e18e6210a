"""Decoded pages: bounded over all indexes, each index's its own, decoded once while they are used."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered.formats.page_cache import Columns, PageCache

ROWS = 10
PAGE_BYTES = ROWS * 8


class Index:
    """Decodes pages that say whose they are."""

    def __init__(self, cache: PageCache) -> None:
        self._cache, self.owner = cache, cache.new_owner()
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
