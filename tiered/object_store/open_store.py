"""Archive URLs: ``s3://bucket/prefix``, ``file:///directory``, ``memory://name``.

Owns the syntax of URLs, and the order in which a request passes the wrappers of a store: seals → prefix → retries →
metrics → throttle → back end.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit
from weakref import WeakValueDictionary

from tiered.errors import UsageError
from tiered.object_store.file import FileStore
from tiered.object_store.interface import GET_BYTES_MAX, AsyncObjectStore, ObjectStore, StoreOptions
from tiered.object_store.key import check_key
from tiered.object_store.key_ring import open_ring
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.request_metrics import MetricsStore, StoreMetrics
from tiered.object_store.retrying import RetryingStore
from tiered.object_store.s3 import S3Store
from tiered.object_store.s3_async import AsyncS3Store
from tiered.object_store.sealed import SealedStore
from tiered.object_store.throttle import ThrottledStore

FORMS = "use file:///directory or s3://bucket/prefix"
_CREDENTIALS_HINT = (
    "remove them, and give them where the AWS SDK looks: its environment variables, files or roles"
)

_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")
"""What the SDK accepts, without ARNs."""
_memory_stores: WeakValueDictionary[str, MemoryStore] = WeakValueDictionary()
"""memory://name is the same store while one is open in this process."""


T = TypeVar("T")
P = ParamSpec("P")


class ThreadedStore:
    """AsyncObjectStore over ``store``. The thread of a cancelled call runs to its end."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """The wrapped store's."""
        return self._store.url

    async def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        return await _in_thread(self._store.get, key, max_bytes)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        return await _in_thread(self._store.get_range, key, offset, length)

    async def close(self) -> None:
        await _in_thread(self._store.close)


async def _in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    import asyncio  # import takes 0.07 s

    return await asyncio.to_thread(work, *args, **kwargs)


@dataclass(frozen=True)
class StoreAddress:
    """A parsed URL. ``place`` is the bucket, the directory or the name."""

    scheme: str
    place: str
    prefix: str


def parse_url(url: str) -> StoreAddress:
    """The parts of an archive URL. Raises UsageError for an invalid one; the message never repeats a URL that may
    contain a secret."""
    split = _split(url, "archive URL", FORMS)
    if "@" in split.netloc:
        raise UsageError("the archive URL contains credentials", hint=_CREDENTIALS_HINT)
    if split.query or split.fragment:
        raise UsageError(f"the {split.scheme}:// URL of the archive contains ? or #", hint=FORMS)
    path = unquote(split.path, errors="surrogateescape")  # directory names are bytes
    if split.scheme == "file":
        if split.netloc not in ("", "localhost") or not path.startswith("/"):
            raise UsageError(f"{url} is not an absolute directory", hint="use file:///directory")
        return StoreAddress("file", path, "")
    if split.scheme not in ("s3", "memory"):
        raise UsageError(f"{url or '(empty)'} is not an archive URL", hint=FORMS)
    if split.scheme == "s3" and not split.netloc:
        raise UsageError(f"{url} names no bucket", hint=FORMS)
    if split.scheme == "s3" and not _BUCKET.fullmatch(split.netloc):
        raise UsageError(
            f"{split.netloc} is not the name of a bucket",
            hint="use letters, digits, dots and hyphens; for an access point its alias (…-s3alias), not its ARN",
        )
    prefix = path.strip("/")
    return StoreAddress(split.scheme, split.netloc, check_key(prefix) if prefix else "")


def _split(url: str, what: str, hint: str) -> SplitResult:
    """The parts of ``url``, which is called ``what`` in messages. Raises UsageError whose message has neither the URL
    nor urllib's reason, as both may contain a secret."""
    try:
        return urlsplit(url)
    except ValueError:
        raise UsageError(f"{what} is not a valid URL", hint=hint) from None


def url_of(place: str | os.PathLike[str]) -> str:
    """The URL of a local directory given as a path; text is a URL already."""
    return place if isinstance(place, str) else Path(place).absolute().as_uri()


def check_addresses(url: str, endpoint_url: str) -> StoreAddress:
    """The parts of the archive URL ``url``. Raises UsageError for an invalid one, and if the endpoint contains
    credentials: both URLs are logged."""
    if "@" in _split(endpoint_url, "object_store.endpoint_url", "use https://host:port").netloc:
        raise UsageError("object_store.endpoint_url contains credentials", hint=_CREDENTIALS_HINT)
    return parse_url(url)


def open_store(
    url: str, options: StoreOptions | None = None, *, metrics: StoreMetrics | None = None
) -> SealedStore:
    """The object store at the archive URL ``url``, with retries, counted in ``metrics`` if given, with the limit of
    upload bandwidth, and with keys relative to the URL's prefix. The first request connects."""
    options = options or StoreOptions()
    address = check_addresses(url, options.settings.endpoint_url)
    store: ObjectStore
    if address.scheme == "file":
        store = FileStore(address.place, readers=options.settings.file_readers)
    elif address.scheme == "memory":
        store = _memory_stores.setdefault(address.place, MemoryStore(f"memory://{address.place}"))
    else:
        store = S3Store(address.place, options)
    if options.settings.upload_bytes_per_s:
        store = ThrottledStore(store, options.settings.upload_bytes_per_s)
    if metrics is not None:
        store = MetricsStore(store, metrics)
    if address.scheme == "s3" and options.retry_seconds > 0:
        store = RetryingStore(store, retry_seconds=options.retry_seconds)
    return SealedStore(PrefixedStore(store, address.prefix) if address.prefix else store, open_ring(options))


def open_async_store(url: str, options: StoreOptions | None = None) -> AsyncObjectStore:
    """The read half at ``url`` for an event loop; file:// and memory:// run in the loop's threads."""
    options = options or StoreOptions()
    address = check_addresses(url, options.settings.endpoint_url)
    if address.scheme == "s3":
        return AsyncS3Store(address.place, options, prefix=address.prefix)
    return ThreadedStore(open_store(url, options))
