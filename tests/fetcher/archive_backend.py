"""The archive's side of a pull: the real fetcher over a plain block source, whose failures can be ordered."""

from __future__ import annotations

from typing import Any

from fetcher.rows.pull import PullRequest, PullResult
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.fetcher.reading_fakes import plain_fetcher
from tiered.catalog.state import CatalogState
from tiered.errors import TieredError
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore


class Backend:
    """Reads the archive in ``root``; every refresh finds the newest version."""

    def __init__(self, root: ObjectStore) -> None:
        store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
        self.fetcher = plain_fetcher(store, refresh_ms=0)
        self.error: TieredError | None = None
        self.pulls = 0

    @property
    def state(self) -> CatalogState:
        """See KnownCatalog."""
        return self.fetcher.catalog.state

    def refresh_if_due(self) -> None:
        """See KnownCatalog."""
        self.fetcher.catalog.refresh_if_due()

    async def get(self, topic: str, queue_id: int, offset: int, **arguments: Any) -> PullResult:
        """See TieredReader."""
        self.pulls += 1
        if self.error is not None:
            raise self.error
        return await self.fetcher.pull(PullRequest(topic, queue_id, offset, **arguments))
