"""Pages lie side by side in objects, and are found again by the names the change has."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.drafts import queue
from tiered.catalog.commit import PageChange
from tiered.catalog.page_bytes import read_page_bytes
from tiered.catalog.page_writer import PagePacks
from tiered.catalog.state import PageRef
from tiered.object_store.memory import MemoryStore


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
    change = packs.put(PageChange(added=added))
    assert [read_page_bytes(store, ref.key) for ref in change.added] == pages
    sizes = [len(store.get(info.key)) for info in store.list("pages/")]
    assert all(size <= max(pack_bytes, *map(len, pages)) for size in sizes)
