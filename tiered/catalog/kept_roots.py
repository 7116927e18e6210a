"""Which older roots are kept, so that earlier versions can be read without the whole chain of commits. Pure.

Roots are replaced often, and replaced ones are garbage. One of every KEEP_EVERY versions is kept; above KEPT_MAX every
second one of the older half leaves, so that the distance grows with age.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered.catalog.state import RootRef

KEEP_EVERY = 4096
KEPT_MAX = 64


def with_root(kept: Sequence[RootRef], root: RootRef) -> tuple[RootRef, ...]:
    """The kept roots once ``root`` is the newest."""
    if kept and root.version // KEEP_EVERY <= kept[-1].version // KEEP_EVERY:
        return tuple(kept)
    kept = (*kept, root)
    if len(kept) <= KEPT_MAX:
        return kept
    half = KEPT_MAX // 2
    return (*kept[:half:2], *kept[half:])
