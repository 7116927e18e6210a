"""Finds index files of which most messages have expired. Pure.

An object counts as gone when no living run refers to it. Compaction moves runs to other objects under their versions,
so the living bytes of a file's versions decide too. A file that was just rebuilt covers no such object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tiered.archive.index.footer import Covered
from tiered.catalog.garbage import KeySet
from tiered.catalog.index_refs import IndexRef
from tiered.catalog.pages import Page
from tiered.catalog.state import CatalogState
from tiered.model.tables import QUEUE_EXPIRED


def expired_offsets(state: CatalogState) -> int:
    """A number that grows with every pass of expiry; 0: nothing has expired yet."""
    table = state.table
    return int(table["min_queue_offset"][(table["flags"] & QUEUE_EXPIRED) > 0].sum())


def mostly_expired(
    refs: Sequence[IndexRef], pages: Iterable[Page], covered_of: Callable[[IndexRef], Covered | None]
) -> list[IndexRef]:
    """The files of ``refs``, which are in order, with less than half of their message bytes alive. ``pages``: all
    living runs of their versions; ``covered_of``: a file's objects, None if its footer is damaged."""
    first = np.array([ref.from_version for ref in refs], np.int64)
    living = np.zeros(len(refs), np.int64)
    keys: list[KeySet] = []
    for page in pages:
        runs, chunk = page.chunk.runs, page.chunk
        file = np.searchsorted(first, runs["version"], side="right") - 1
        is_covered = (file >= 0) & (runs["version"] <= refs[-1].to_version)
        np.add.at(living, file[is_covered], runs["byte_count"][is_covered])
        used = np.unique(chunk.objects["key"][runs["object"]])
        keys.append(KeySet(chunk.object_keys[key] for key in used.tolist()))
    alive = KeySet.union(keys)
    found = []
    for ref, living_bytes in zip(refs, living.tolist(), strict=True):
        covered = covered_of(ref)
        if covered is None:
            continue
        sizes = covered.objects["raw_bytes"].astype(np.int64)
        is_gone = np.array([covered.keys[key] not in alive for key in covered.objects["key"].tolist()], bool)
        if 2 * int(sizes[is_gone].sum()) > int(sizes.sum()) > 2 * living_bytes:
            found.append(ref)
    return found
