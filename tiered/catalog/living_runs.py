"""The one walk over what is alive in an archive: by page, so that memory follows a page and not the archive.

Runs that are in no page yet come last. Expired and removed runs are not among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from sys import maxsize

from tiered.catalog.pages import Page, RunIndex, sorted_page
from tiered.catalog.state import CatalogState, PageRef


def living_runs(
    index: RunIndex,
    state: CatalogState,
    first_version: int = 0,
    last_version: int = maxsize,
    *,
    is_cached: bool = False,
) -> Iterator[Page]:
    """Pages of ``state`` with runs that versions [``first_version``, ``last_version``] added, with others. Raises what
    reading pages raises."""
    chosen = (ref for ref in state.pages if ref.overlaps(first_version, last_version))
    yield from living_pages(index, state, chosen, is_cached=is_cached)
    yield from memory_page(state)


def living_pages(
    index: RunIndex, state: CatalogState, refs: Iterable[PageRef], *, is_cached: bool = False
) -> Iterator[Page]:
    """What is alive of some pages of ``state``."""
    read = index.page if is_cached else index.read_page
    for ref in refs:
        yield index.living(state, read(ref))


def memory_page(state: CatalogState) -> Iterator[Page]:
    """The runs of ``state`` that are in no page yet, sorted as one, if there are any."""
    if state.memory_runs:
        yield sorted_page(state.directory.keys, state.memory)
