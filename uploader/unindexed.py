"""Which entries of ``index_left_out`` name what is no longer there: runs of damaged segments that expired or were
replaced. Nobody looks for their keys, and the setting has a bound.

Reads only the pages that may still hold such runs. Who prunes when is index_builder.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np

from tiered.catalog.pages import Page, RunIndex, sorted_page
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError

Gone = Mapping[str, Set[int]]
"""Data object → versions whose runs in it are no longer there."""


def stale_entries(state: CatalogState, index: RunIndex) -> Gone:
    """Of what is left out in ``state``; nothing where a page cannot be read."""
    left_out = state.unindexed
    versions = sorted({version for found in left_out.values() for version in found})
    if not versions:
        return {}
    living: dict[str, set[int]] = {}
    try:
        for ref in state.pages:
            if any(ref.from_version <= version <= ref.to_version for version in versions):
                _add_living(living, index.living(state, index.page(ref)), left_out)
    except (CorruptionError, NotFoundError):
        return {}
    if state.memory_runs:
        _add_living(living, sorted_page(state.directory.keys, state.memory), left_out)
    gone = {key: set(found) - living.get(key, set()) for key, found in left_out.items()}
    return {key: found for key, found in gone.items() if found}


def without(left_out: Mapping[str, tuple[int, ...]], gone: Gone) -> dict[str, tuple[int, ...]]:
    """``left_out`` but for ``gone``."""
    kept = {
        key: tuple(version for version in versions if version not in gone.get(key, ()))
        for key, versions in left_out.items()
    }
    return {key: versions for key, versions in kept.items() if versions}


def _add_living(living: dict[str, set[int]], page: Page, left_out: Mapping[str, object]) -> None:
    chunk = page.chunk
    is_named = np.array([key in left_out for key in chunk.object_keys], bool)
    if not is_named.any():
        return
    keys = chunk.objects["key"][chunk.runs["object"]]
    hits = is_named[keys]
    for key, version in zip(keys[hits].tolist(), chunk.runs["version"][hits].tolist(), strict=True):
        living.setdefault(chunk.object_keys[key], set()).add(version)
