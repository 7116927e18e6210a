"""Limits of requests, caches and GETs from settings. Pure."""

from __future__ import annotations

from fetcher.blocks.block_cache import BlockCacheLimits
from fetcher.blocks.coalescing import CoalescingLimits
from fetcher.io.request_scheduler import Priority, PriorityLimits
from tiered.settings.sections import FetchSettings

PACED_PIECES_PER_S = 16
"""Under a bandwidth limit pieces are made so small that one is a small part of a second's bytes."""
PIECE_BYTES_MIN = 64 * 1024


def priority_limits(settings: FetchSettings) -> dict[Priority, PriorityLimits]:
    """The limits of each priority."""
    return {
        Priority.USER: PriorityLimits(settings.user_requests, settings.queue_max),
        Priority.PREFETCH: PriorityLimits(settings.prefetch_requests, settings.queue_max),
        Priority.BACKGROUND: PriorityLimits(settings.background_requests, settings.queue_max),
    }


def coalescing_limits(settings: FetchSettings) -> CoalescingLimits:
    """How ranges become GETs; pieces are smaller under a tight bandwidth limit, so that it is kept evenly."""
    paced_bytes = settings.bytes_per_s // PACED_PIECES_PER_S or settings.piece_bytes
    return CoalescingLimits(
        settings.gap_ratio,
        max(min(settings.piece_bytes, paced_bytes), PIECE_BYTES_MIN),
        max(settings.get_max_bytes, PIECE_BYTES_MIN),
    )


def cache_limits(settings: FetchSettings) -> BlockCacheLimits:
    """Bounds of the blocks in memory."""
    return BlockCacheLimits(
        settings.cache_bytes, settings.unread_expiry_ms / 1000, settings.read_expiry_ms / 1000
    )
