"""Packs the pages of one catalog change into objects. Until one is put, a page's name is its position in a pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tiered.catalog.commit import PageChange
from tiered.catalog.state import PageRef
from tiered.formats.keys import parse_part_key, part_key

PutPack = Callable[[int, Sequence[bytes]], str]
"""(version, pages) -> key of the durable object with them; raises what the object store raises."""


class PagePacks:
    """Pages in packs of up to ``bytes_max``. Only the last pack is in memory, others are put when full."""

    def __init__(self, put: PutPack, bytes_max: int) -> None:
        self._put = put
        self._bytes_max = bytes_max
        self._keys: list[str] = []
        self._pages: list[bytes] = []
        self._bytes = 0
        self._version = 0

    def add(self, version: int, data: bytes) -> str:
        """Add a page of ``version``; returns its name until ``put`` gives the final one."""
        if self._pages and self._bytes + len(data) > self._bytes_max:
            self._close()
        name = part_key(str(len(self._keys)), self._bytes, len(data))
        self._pages.append(data)
        self._bytes += len(data)
        self._version = version
        return name

    def put(self, change: PageChange) -> PageChange:
        """``change`` with the names of objects, which are put."""
        if self._pages:
            self._close()
        added: list[PageRef] = [page._replace(key=self._final_name(page.key)) for page in change.added]
        return replace(change, added=tuple(added))

    def _final_name(self, key: str) -> str:
        part = parse_part_key(key)
        assert part is not None
        return part_key(self._keys[int(part.key)], part.offset, part.length)

    def _close(self) -> None:
        self._keys.append(self._put(self._version, self._pages))
        self._pages, self._bytes = [], 0
