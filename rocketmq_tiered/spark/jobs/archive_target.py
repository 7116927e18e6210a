"""Where a task finds the archives: plain data, and how a worker opens one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from rocketmq_tiered.message_table.plan.archive_plan import archive_store
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from tiered.object_store.store_options import StoreOptions


@dataclass(frozen=True)
class ArchiveTarget:
    """The URL of the archives, and options that open the object store."""

    url: str
    options: StoreOptions = field(default_factory=StoreOptions)

    @contextmanager
    def open(self, cluster: str, broker: str) -> Iterator[ObjectStore]:
        """The archive of one broker name."""
        with closing(open_store(self.url, self.options)) as root:
            yield archive_store(root, cluster, broker)
