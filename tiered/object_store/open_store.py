"""Archive URLs: ``s3://bucket/prefix``, ``file:///directory``, ``memory://name``.

Owns the syntax and the order of the wrappers: prefix → retries → metrics → throttle → back end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from tiered.errors import UsageError
from tiered.object_store.file import FileStore
from tiered.object_store.interface import AsyncObjectStore, ObjectStore
from tiered.object_store.key import check_key
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.request_metrics import MetricsStore, StoreMetrics
from tiered.object_store.retrying import RetryingStore
from tiered.object_store.s3 import S3Store
from tiered.object_store.s3_async import AsyncS3Store
from tiered.object_store.store_options import StoreOptions
from tiered.object_store.threaded import ThreadedStore
from tiered.object_store.throttle import ThrottledStore

FORMS = "use file:///directory or s3://bucket/prefix"

_memory_stores: WeakValueDictionary[str, MemoryStore] = WeakValueDictionary()
"""memory://name means the same objects for as long as somebody in this process holds them."""


@dataclass(frozen=True)
class StoreAddress:
    """A parsed address. ``place`` is the bucket, the directory or the name."""

    scheme: str
    place: str
    prefix: str


def parse_url(url: str) -> StoreAddress:
    """The parts of ``url``, or UsageError. Never repeats a URL that may hold a secret."""
    split = urlsplit(url)
    if "@" in split.netloc:
        raise UsageError(
            "credentials do not belong into an archive's URL", hint="the SDK's own chain finds them"
        )
    if split.query or split.fragment:
        raise UsageError(f"{split.scheme}:// address with ? or #", hint=FORMS)
    path = unquote(split.path, errors="surrogateescape")  # directories' names are bytes
    if split.scheme == "file":
        if split.netloc not in ("", "localhost") or not path.startswith("/"):
            raise UsageError(f"not an absolute directory: {url}", hint="file:// takes three slashes")
        return StoreAddress("file", path, "")
    if split.scheme not in ("s3", "memory"):
        raise UsageError(f"not an archive's URL: {url!r}", hint=FORMS)
    if split.scheme == "s3" and not split.netloc:
        raise UsageError(f"no bucket in {url}", hint=FORMS)
    prefix = path.strip("/")
    return StoreAddress(split.scheme, split.netloc, check_key(prefix) if prefix else "")


def url_of(place: str | os.PathLike[str]) -> str:
    """The address of a local directory that a program has as a path; a text is an address already."""
    return place if isinstance(place, str) else Path(place).absolute().as_uri()


def check_addresses(url: str, endpoint_url: str) -> StoreAddress:
    """The parts of ``url``, or UsageError, also for an endpoint that holds a secret: both are logged and printed."""
    if "@" in urlsplit(endpoint_url).netloc:
        raise UsageError(
            "credentials do not belong into object_store.endpoint_url", hint="the SDK's own chain finds them"
        )
    return parse_url(url)


def open_store(
    url: str, options: StoreOptions | None = None, *, metrics: StoreMetrics | None = None
) -> ObjectStore:
    """The store at ``url``. Nothing is contacted before the first request."""
    options = options or StoreOptions()
    address = check_addresses(url, options.settings.endpoint_url)
    store: ObjectStore
    if address.scheme == "file":
        store = FileStore(address.place)
    elif address.scheme == "memory":
        store = _memory_store(address.place)
    else:
        store = S3Store(address.place, options)
    if options.settings.upload_bytes_per_s:
        store = ThrottledStore(store, options.settings.upload_bytes_per_s)
    if metrics is not None:
        store = MetricsStore(store, metrics)
    if address.scheme == "s3" and options.retry_seconds > 0:
        store = RetryingStore(store, retry_seconds=options.retry_seconds)
    return PrefixedStore(store, address.prefix) if address.prefix else store


def open_async_store(url: str, options: StoreOptions | None = None) -> AsyncObjectStore:
    """The read half at ``url`` for an event loop; file:// and memory:// run in the loop's threads."""
    options = options or StoreOptions()
    address = check_addresses(url, options.settings.endpoint_url)
    if address.scheme == "s3":
        return AsyncS3Store(address.place, options, prefix=address.prefix)
    return ThreadedStore(open_store(url, options))


def _memory_store(name: str) -> MemoryStore:
    return _memory_stores.setdefault(name, MemoryStore(f"memory://{name}"))
