"""Packs the pages of one catalog change: into the commit that names them, or into objects.

The choice is made when all pages exist; until then a page's name is its position in a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tiered.catalog.commit import PageChange
from tiered.catalog.embedded_pages import EMBEDDED_BEGIN
from tiered.catalog.state import PageRef
from tiered.formats.keys import catalog_key, parse_part_key, part_key

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
        """Add a page of ``version``; returns its name until ``placed`` or ``put`` gives the final one."""
        if self._pages and self._bytes + len(data) > self._bytes_max:
            self._close()
        name = part_key(str(len(self._keys)), self._bytes, len(data))
        self._pages.append(data)
        self._bytes += len(data)
        self._version = version
        return name

    def placed(self, change: PageChange, version: int, embedded_bytes_max: int) -> PageChange:
        """``change`` with final names: inside the commit of ``version`` if all pages fit ``embedded_bytes_max``, else
        in objects, which are put."""
        if self.fit(embedded_bytes_max):
            return _renamed(change, [catalog_key(version)], EMBEDDED_BEGIN, embedded=tuple(self._pages))
        return self.put(change)

    def put(self, change: PageChange) -> PageChange:
        """``change`` with the names of objects, which are put."""
        if self._pages:
            self._close()
        return _renamed(change, self._keys, 0)

    def fit(self, bytes_max: int) -> bool:
        """Whether all pages are in memory, and at most ``bytes_max``."""
        return not self._keys and self._bytes <= bytes_max

    def _close(self) -> None:
        self._keys.append(self._put(self._version, self._pages))
        self._pages, self._bytes = [], 0


def _renamed(
    change: PageChange, objects: Sequence[str], begin: int, embedded: Sequence[bytes] = ()
) -> PageChange:
    def name(key: str) -> str:
        part = parse_part_key(key)
        assert part is not None
        return part_key(objects[int(part.key)], begin + part.offset, part.length)

    added: list[PageRef] = [page._replace(key=name(page.key)) for page in change.added]
    return replace(change, added=tuple(added), embedded=embedded)
