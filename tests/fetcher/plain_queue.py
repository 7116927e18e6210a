"""Queues of the archives that fetcher tests build."""

from __future__ import annotations

from tiered.model.queue import QueueKey

PLAIN, OTHER = QueueKey("plain", 0, 0), QueueKey("other", 3, 0)
