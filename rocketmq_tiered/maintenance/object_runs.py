"""How many living runs each object has in pages of the catalog. A page is read once, for all rounds of a compaction.

Only digests of the keys are kept: 12 bytes for each object of each page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.garbage import digests
from tiered.catalog.living_runs import living_pages
from tiered.catalog.pages import Page, RunIndex
from tiered.catalog.state import CatalogState, PageRef


@dataclass(frozen=True)
class ObjectRuns:
    """Objects by digest, ascending, and their runs."""

    digests: NDArray[np.uint64]
    runs: NDArray[np.int64]

    def of(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """The runs of each of ``keys``."""
        wanted = digests(keys)
        at = np.minimum(np.searchsorted(self.digests, wanted), len(self.digests) - 1)
        found: NDArray[np.int64] = np.where(self.digests[at] == wanted, self.runs[at], 0)
        return found


class ObjectRunCounter:
    """Counts runs, and keeps the counts of pages that still exist."""

    def __init__(self) -> None:
        self._pages: dict[str, tuple[NDArray[np.uint64], NDArray[np.int64]]] = {}

    def count(
        self, index: RunIndex, state: CatalogState, pages: Sequence[PageRef], memory: Iterable[Page] = ()
    ) -> ObjectRuns:
        """The runs of ``pages``, of which there is at least one, that live in ``state``, and those of ``memory``."""
        if state.has_expired_runs or len(state.tombstones):
            self._pages.clear()  # a run of a known page may have died
        exists = {ref.key for ref in state.pages}
        self._pages = {key: known for key, known in self._pages.items() if key in exists}
        for ref in pages:
            if ref.key not in self._pages:
                self._pages[ref.key] = _counted(next(living_pages(index, state, [ref])))
        parts = [*(self._pages[ref.key] for ref in pages), *map(_counted, memory)]
        found, number = np.unique(np.concatenate([part for part, _ in parts]), return_inverse=True)
        runs = np.bincount(number, weights=np.concatenate([runs for _, runs in parts]))
        return ObjectRuns(found, runs.astype(np.int64))


def _counted(page: Page) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    chunk = page.chunk
    runs = np.bincount(chunk.runs["object"], minlength=len(chunk.objects))
    return digests(chunk.object_keys)[chunk.objects["key"]], runs
