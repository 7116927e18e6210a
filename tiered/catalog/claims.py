"""Decides who may claim the next epoch. Pure.

An idle writer commits nothing, so silence does not prove that it is dead; lag does, and only an actor that sees the
broker's log can measure it. Such a caller passes ``take_over``; all others may only claim an unowned epoch.
"""

from tiered.catalog.state import CatalogState, Owner

ADVANCING_MS = 60_000
"""A writer is advancing if its last append is younger than this."""

RUN = "run"
BACKFILL = "backfill"


def refusal(state: CatalogState, claimant: Owner, *, take_over: bool, now_ms: int) -> str:
    """Why ``claimant`` may not become the archive's writer in place of the one that ``state`` names, as the text of an
    error; empty if it may. ``take_over``: the claimant has found that this writer does not keep up with the log."""
    owner = state.owner
    if owner is None or owner.released or owner.instance == claimant.instance:
        return ""
    idle_ms = now_ms - max(state.advanced_ms, owner.claimed_ms)
    # An owner whose clock was days ahead would seem to write until that day; a few seconds ahead prove nothing.
    has_clock_ahead = take_over and idle_ms <= -ADVANCING_MS
    is_advancing = idle_ms < ADVANCING_MS and not has_clock_ahead
    writer = f"tiered {owner.kind} ({owner.instance}) on {owner.host or 'an unknown host'}"
    belongs = f"the archive belongs to {writer}, epoch {state.epoch}"
    if claimant.kind == BACKFILL and is_advancing:
        return f"{belongs}, which is archiving now"
    if take_over or (owner.kind == BACKFILL and not is_advancing):
        return ""
    return f"{belongs}, which has not released it"
