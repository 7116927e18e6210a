"""Archive addresses for an event loop. asyncio itself is loaded by the first store that is opened."""

from __future__ import annotations

from tiered.object_store.options import StoreOptions
from tiered.object_store.protocol import AsyncObjectStore
from tiered.object_store.s3_async import AsyncS3Store
from tiered.object_store.threaded import ThreadedStore
from tiered.object_store.url import check_addresses, open_store


def open_async_store(url: str, options: StoreOptions | None = None) -> AsyncObjectStore:
    """The read half at ``url`` for an event loop; file:// and memory:// run in the loop's threads."""
    options = options or StoreOptions()
    address = check_addresses(url, options.settings.endpoint_url)
    if address.scheme == "s3":
        return AsyncS3Store(address.place, options, prefix=address.prefix)
    return ThreadedStore(open_store(url, options))
