"""Reads archives of RocketMQ messages (docs/READING.md).

    import rocketmq_tiered

    with rocketmq_tiered.open("s3://bucket/prefix") as archive:
        for message in archive.queue("orders", 0).messages():
            print(message.queue_offset, message.body)

``open_async`` is the form for an event loop, ``rocketmq_tiered.spark`` the one for Spark.
"""

from typing import TYPE_CHECKING

from rocketmq_tiered.own_packages import check_own_packages

check_own_packages()

from tiered.lazy_names import lazy_names  # noqa: E402 - only now is it known to be ours

if TYPE_CHECKING:
    from fetcher.archive import Queue
    from fetcher.async_archive import AsyncArchive, AsyncQueue, open_async
    from fetcher.queries.by_key import KeyKind
    from fetcher.queries.queue_listing import QueueListing
    from fetcher.queries.time_search import Boundary
    from fetcher.rows.message import Message, MessageBatch
    from fetcher.rows.tag_filter import MessageFilter, TagFilter, tag_filter
    from fetcher.sql92.message_filter import Sql92Filter
    from rocketmq_tiered.sql.archive import Archive
    from rocketmq_tiered.sql.archive import open_archive as open
    from tiered.errors import (
        AccessDeniedError,
        CorruptionError,
        NotFoundError,
        SnapshotExpiredError,
        TieredError,
        UnavailableError,
        UnsupportedFormatError,
        UsageError,
    )
    from tiered.formats.record import InnerMessage
    from tiered.settings.load import load_settings
    from tiered.settings.sections import Settings

__all__ = [
    "AccessDeniedError",
    "Archive",
    "AsyncArchive",
    "AsyncQueue",
    "Boundary",
    "CorruptionError",
    "InnerMessage",
    "KeyKind",
    "Message",
    "MessageBatch",
    "MessageFilter",
    "NotFoundError",
    "Queue",
    "QueueListing",
    "Settings",
    "SnapshotExpiredError",
    "Sql92Filter",
    "TagFilter",
    "TieredError",
    "UnavailableError",
    "UnsupportedFormatError",
    "UsageError",
    "load_settings",
    "open",
    "open_async",
    "tag_filter",
]

_HOMES = {
    "fetcher.archive": ("Queue",),
    "fetcher.async_archive": ("AsyncArchive", "AsyncQueue", "open_async"),
    "fetcher.queries.by_key": ("KeyKind",),
    "fetcher.queries.queue_listing": ("QueueListing",),
    "fetcher.queries.time_search": ("Boundary",),
    "fetcher.rows.message": ("Message", "MessageBatch"),
    "fetcher.rows.tag_filter": ("MessageFilter", "TagFilter", "tag_filter"),
    "fetcher.sql92.message_filter": ("Sql92Filter",),
    "rocketmq_tiered.sql.archive": ("Archive",),
    "tiered.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "tiered.formats.record": ("InnerMessage",),
    "tiered.settings.load": ("load_settings",),
    "tiered.settings.sections": ("Settings",),
}
__getattr__, __dir__ = lazy_names(
    __name__,
    _HOMES,
    {"open": "rocketmq_tiered.sql.archive:open_archive", "__version__": "tiered.version:VERSION"},
)
