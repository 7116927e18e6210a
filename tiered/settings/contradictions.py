"""Values that are fine alone and impossible together. Pure.

Owns those of several components, and of those that do not say it themselves (``complaints`` in sections.py).
"""

from __future__ import annotations

from tiered.settings.sections import Settings


def contradictions(settings: Settings) -> list[tuple[str, str]]:
    """Pairs (key, complaint) for values that are fine alone but impossible together."""
    offload, pins = settings.offload, settings.pins
    found: list[tuple[str, str]] = []
    if offload.poll_min_ms > offload.poll_max_ms:
        found.append(("offload.poll_min_ms", "must not exceed offload.poll_max_ms"))
    if offload.block_bytes > offload.batch_bytes:
        found.append(("offload.block_bytes", "must not exceed offload.batch_bytes"))
    if offload.memory_budget_bytes < 3 * offload.batch_bytes:
        found.append((
            "offload.memory_budget_bytes",
            f"must be at least 3 × offload.batch_bytes = {3 * offload.batch_bytes}: one batch is read, "
            "one encoded, one uploaded at a time",
        ))  # fmt: skip
    fetch = settings.fetch
    if fetch.cache_bytes + fetch.index_cache_bytes > fetch.memory_bytes:
        found.append(("fetch.memory_bytes", "must be at least fetch.cache_bytes + fetch.index_cache_bytes"))
    if fetch.piece_bytes > fetch.get_max_bytes:
        found.append(("fetch.piece_bytes", "must not exceed fetch.get_max_bytes"))
    if pins.create_below_ratio >= pins.release_above_ratio:
        found.append(("pins.create_below_ratio", "must be less than pins.release_above_ratio"))
    return found + settings.broker.complaints() + settings.read.complaints() + settings.slave.complaints()
