"""Reads archives: ``open`` for blocking calls, ``open_async`` for an event loop (docs/READING.md).

Owns the read path: what a pull answers, searches and queries, caches, reading ahead. Does not own formats (tiered)
nor writing (uploader).
"""

from fetcher.archive import Archive, Queue
from fetcher.archive import open_archive as open
from fetcher.async_archive import AsyncArchive, AsyncQueue, open_async
from fetcher.message import Message
from fetcher.time_search import Boundary

__all__ = [
    "Archive", "AsyncArchive", "AsyncQueue", "Boundary", "Message", "Queue", "open", "open_async",
]  # fmt: skip
