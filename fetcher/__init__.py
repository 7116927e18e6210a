"""Reads archives: ``open`` for blocking calls, ``open_async`` for an event loop (docs/READING.md).

Owns the read path: what a pull answers, searches and queries, caches, reading ahead. Does not own formats (tiered)
nor writing (uploader).
"""

from fetcher.archive import Archive, Queue
from fetcher.archive import open_archive as open
from fetcher.async_archive import AsyncArchive, AsyncQueue, open_async
from fetcher.queries.time_search import Boundary
from fetcher.rows.message import Message
from fetcher.rows.tag_filter import tag_filter
from fetcher.sql92.message_filter import Sql92Filter

__all__ = [
    "Archive", "AsyncArchive", "AsyncQueue", "Boundary", "Message", "Queue", "Sql92Filter", "open", "open_async",
    "tag_filter",
]  # fmt: skip
