"""s3:// for an event loop: ranges and whole objects over aioboto3. Semantics, errors and options are those of
s3.py."""

from contextlib import AsyncExitStack
from typing import Any

from tiered.errors import AccessDeniedError, CorruptionError, NotFoundError, TieredError
from tiered.object_store.interface import GET_BYTES_MAX, StoreOptions
from tiered.object_store.key import check_key
from tiered.object_store.s3 import exact_range, listed_objects
from tiered.object_store.s3_client import (
    client_arguments,
    config_arguments,
    has_outdated_keys,
    quiet_sdk_logs,
    with_endpoint,
)
from tiered.object_store.s3_errors import is_denied, s3_error, with_new_keys
from tiered.object_store.s3_transport import PIECE_BYTES, ResponseLimit


class AsyncS3Store:
    """One bucket below ``prefix``. Bound to the event loop of its first request; close it there."""

    def __init__(self, bucket: str, options: StoreOptions, *, prefix: str = "") -> None:
        """No request is made before the first call. ``prefix``: what every key begins with in the bucket."""
        import asyncio  # import takes 0.07 s

        self._bucket = bucket
        self._options = options
        self._prefix = check_key(prefix.rstrip("/")) + "/" if prefix else ""
        self._connecting = asyncio.Lock()
        self._resources = AsyncExitStack()
        self._client: Any = None

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"AsyncS3Store({self.url!r}, endpoint={self._options.settings.endpoint_url or 'AWS'!r})"

    async def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        return await self._fetch(key, {}, max_bytes)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0:
            raise CorruptionError(
                f"{self.url}/{key}: [{offset}, {offset + length}) is not a range of an object"
            )
        if length == 0:
            return b""
        content = await self._fetch(key, {"Range": f"bytes={offset}-{offset + length - 1}"}, length)
        return exact_range(content, f"{self.url}/{key}", offset, length)

    async def _fetch(self, key: str, range_header: dict[str, str], max_bytes: int) -> bytes:
        """Read an object, or the range of it in ``range_header``, of at most ``max_bytes``. To accounts that may not
        list the whole bucket, S3 answers AccessDenied for a missing object too: then a listing of the key decides."""
        check_key(key)
        client = None
        try:
            client = await self._connected()
            answer = await client.get_object(Bucket=self._bucket, Key=self._prefix + key, **range_header)
            limit = ResponseLimit(max_bytes, f"{self.url}/{key}", is_range=bool(range_header))
            async with answer["Body"]:
                return await _read_within(limit, answer)
        except Exception as error:
            translated = await self._typed_error(error, f"{self.url}/{key}", client)
            translated.__cause__ = error
            if is_denied(translated) and await self._is_absent(client, self._prefix + key):
                translated = NotFoundError(
                    f"{self.url}/{key} does not exist: reading it is denied, and a listing does not have it"
                )
            raise translated from error

    async def _is_absent(self, client: Any, key: str) -> bool:
        """Whether a listing shows that there is no object ``key``; False too if the listing fails."""
        try:
            answer = await client.list_objects_v2(Bucket=self._bucket, Prefix=key, MaxKeys=1)
            found = listed_objects(answer, key, "", where=self.url)
        except Exception:  # denied too, or no answer: the first error stays
            return False
        return key not in (info.key for info in found)

    async def close(self) -> None:
        self._client = None
        await self._resources.aclose()

    async def _typed_error(self, error: Exception, where: str, client: Any) -> TieredError:
        """The error of tiered.errors for ``error`` of a request by ``client`` about ``where``. If the store refuses
        access keys that have been replaced in their file, the client is discarded, so that later requests use the new
        keys, and the error is one to retry."""
        translated = s3_error(error, where)
        if not isinstance(translated, AccessDeniedError) or client is None:
            return translated
        if client is self._client and has_outdated_keys(client):
            self._client = None
            outdated, self._resources = self._resources, AsyncExitStack()
            await outdated.aclose()
            return with_new_keys(translated)
        return translated if client is self._client else with_new_keys(translated)

    async def _connected(self) -> Any:
        if self._client is None:
            async with self._connecting:
                if self._client is None:
                    self._client = await self._connect()
        return self._client

    async def _connect(self) -> Any:
        """Load the SDK and return a new client of it, which ``close`` closes."""
        import aioboto3  # import takes 0.7 s
        from botocore.config import Config

        quiet_sdk_logs()
        session = aioboto3.Session()
        options = with_endpoint(self._options, session._session)
        config = Config(**config_arguments(options.settings))
        context = session.client("s3", config=config, **client_arguments(options))
        return await self._resources.enter_async_context(context)


async def _read_within(limit: ResponseLimit, answer: dict[str, Any]) -> bytes:
    """Read the body of the SDK's answer to a GET. Raises if it is longer than ``limit`` allows, before it is in memory,
    whatever the server sends."""
    body, refusal = answer["Body"], limit.refusal(answer)
    if refusal is not None:
        raise refusal
    if limit.is_bounded(answer):
        return bytes(await body.read())
    pieces: list[bytes] = []
    while piece := await body.read(PIECE_BYTES):
        pieces.append(limit.within(piece))
    return b"".join(pieces)
