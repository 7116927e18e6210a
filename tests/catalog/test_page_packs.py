"""Pages lie side by side in a commit or in objects, and are found again by the names the change carries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.drafts import queue
from tiered.catalog.commit import PageChange
from tiered.catalog.embedded_pages import (
    COMMIT_TAIL_BYTES,
    MAGIC,
    TRAILER,
    container_in,
    read_commit_bytes,
    read_page_bytes,
    with_embedded_pages,
)
from tiered.catalog.page_packs import PagePacks
from tiered.catalog.state import PageRef
from tiered.errors import CorruptionError
from tiered.formats.keys import catalog_key, object_of
from tiered.object_store.memory import MemoryStore

KIND = b"RMQTTEST"
VERSION = 7
KEY = catalog_key(VERSION)


def _ref(name: str, data: bytes) -> PageRef:
    return PageRef(name, 0, 1, 1, 1, len(data), queue(), queue())


@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12),
    st.integers(1, 100),
    st.integers(-1, 200),
    st.binary(min_size=1, max_size=60),
)
def test_every_page_is_found_where_the_change_says(
    pages: list[bytes], pack_bytes: int, carried_bytes: int, container: bytes
) -> None:
    store = MemoryStore()

    def put(version: int, body: Sequence[bytes]) -> str:
        key = f"pages/{version}-{len(list(store.list('pages/')))}"
        store.put_if_absent(key, body)
        return key

    packs = PagePacks(put, pack_bytes)
    names = [packs.add(VERSION, page) for page in pages]
    added = [_ref(name, page) for name, page in zip(names, pages, strict=True)]
    size = sum(map(len, pages))
    change = packs.placed(PageChange(added=added), VERSION, carried_bytes)
    store.put_if_absent(KEY, with_embedded_pages(KIND, change.embedded, container))
    assert [read_page_bytes(store, ref.key) for ref in change.added] == pages
    assert read_commit_bytes(store, KEY) == container == container_in(store.get(KEY))
    in_commit = {object_of(ref.key) for ref in change.added} == {KEY}
    assert in_commit == bool(change.embedded)
    assert in_commit == (size <= carried_bytes and (len(pages) == 1 or size <= pack_bytes))


def test_a_commit_whose_end_says_more_than_there_is_is_damaged() -> None:
    store = MemoryStore()
    *_, trailer = with_embedded_pages(KIND, [b"page"], bytes(500))
    store.put_if_absent(KEY, [b"x" * 100, trailer])
    with pytest.raises(CorruptionError, match=f"{KEY}: commit is truncated"):
        read_commit_bytes(store, KEY)


def test_a_trailer_counts_only_with_its_checksum() -> None:
    """A commit without pages may end in any bytes."""
    plain = b"c" * 50 + TRAILER.pack(3, 12345, MAGIC)
    assert container_in(plain) == plain
    assert container_in(b"short") == b"short"


def test_a_large_commit_without_pages_is_read_whole() -> None:
    store = MemoryStore()
    plain = bytes(range(256)) * (COMMIT_TAIL_BYTES // 256 + 3)
    store.put_if_absent(KEY, [plain])
    assert read_commit_bytes(store, KEY) == plain
    large = plain + b"more"
    store.put_if_absent(catalog_key(8), with_embedded_pages(KIND, [b"p" * COMMIT_TAIL_BYTES], large))
    assert read_commit_bytes(store, catalog_key(8)) == large
