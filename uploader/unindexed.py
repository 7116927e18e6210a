"""Finds stale entries of the setting ``unindexed``: runs of damaged segments that expired or were replaced. The setting
is bounded, so they are removed.

Reads only pages that may still hold such runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import chain

import numpy as np

from tiered.catalog.living_runs import living_pages, memory_page
from tiered.catalog.pages import Page, RunIndex
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError

Stale = Mapping[str, Set[int]]
"""Data object → versions whose runs in it no longer exist."""


def stale_entries(state: CatalogState, index: RunIndex) -> Stale:
    """The stale entries of ``state``; empty where a page cannot be read."""
    unindexed = state.unindexed
    versions = sorted({version for found in unindexed.values() for version in found})
    if not versions:
        return {}
    living: dict[str, set[int]] = {}
    refs = [ref for ref in state.pages if any(ref.overlaps(version, version) for version in versions)]
    try:
        for page in chain(living_pages(index, state, refs, is_cached=True), memory_page(state)):
            _add_living(living, page, unindexed)
    except (CorruptionError, NotFoundError):
        return {}
    stale = {key: set(found) - living.get(key, set()) for key, found in unindexed.items()}
    return {key: found for key, found in stale.items() if found}


def without(unindexed: Mapping[str, tuple[int, ...]], stale: Stale) -> dict[str, tuple[int, ...]]:
    """``unindexed`` but for ``stale``."""
    kept = {
        key: tuple(version for version in versions if version not in stale.get(key, ()))
        for key, versions in unindexed.items()
    }
    return {key: versions for key, versions in kept.items() if versions}


def _add_living(living: dict[str, set[int]], page: Page, unindexed: Mapping[str, object]) -> None:
    chunk = page.chunk
    is_named = np.array([key in unindexed for key in chunk.object_keys], bool)
    if not is_named.any():
        return
    keys = chunk.objects["key"][chunk.runs["object"]]
    hits = is_named[keys]
    for key, version in zip(keys[hits].tolist(), chunk.runs["version"][hits].tolist(), strict=True):
        living.setdefault(chunk.object_keys[key], set()).add(version)
