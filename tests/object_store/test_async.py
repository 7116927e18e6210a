"""Reads in event loops: ThreadedStore over memory and file, aioboto3 over every S3 server."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.servers.child import free_port
from tests.servers.proxy import Action, FaultProxy
from tests.servers.running_store import RunningStore
from tiered.errors import (
    AccessDeniedError,
    CorruptionError,
    NotFoundError,
    ObjectTooLargeError,
    ThrottledError,
    UnavailableError,
    UsageError,
)
from tiered.object_store.interface import AsyncObjectStore, S3Credentials, StoreOptions
from tiered.object_store.open_store import open_async_store, open_store
from tiered.settings.sections import ObjectStoreSettings

KEYS = ["a", "b-b", "b/1", "b/2", "b0", "c"]


def fill(url: str, options: StoreOptions | None) -> None:
    """The objects every test here reads."""
    store = open_store(url, options)
    for key in KEYS:
        store.put_if_absent(key, [key.encode() * 10])
    store.put_if_absent("empty", [])
    store.close()


class AsyncContract:
    """A subclass gives ``place``: the URL of an empty store and its options."""

    @pytest.fixture
    def place(self) -> tuple[str, StoreOptions | None]:
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def store(self, place: tuple[str, StoreOptions | None]) -> AsyncIterator[AsyncObjectStore]:
        keep_memory_alive = open_store(*place)
        fill(*place)
        store = open_async_store(*place)
        yield store
        await store.close()
        await store.close()
        keep_memory_alive.close()

    async def test_reads(self, store: AsyncObjectStore) -> None:
        assert await store.get("b/1") == b"b/1" * 10
        assert await store.get_range("b/1", 3, 6) == b"b/1" * 2
        assert await store.get_range("b/1", 3, 0) == b""
        assert await store.get("empty") == b""

    async def test_an_object_above_the_callers_maximum_is_not_read(self, store: AsyncObjectStore) -> None:
        assert await store.get("b/1", 30) == b"b/1" * 10
        with pytest.raises(ObjectTooLargeError, match=r"b/1 has 30 bytes, more than the 29 that may be read"):
            await store.get("b/1", 29)

    async def test_what_is_not_there(self, store: AsyncObjectStore) -> None:
        with pytest.raises(NotFoundError):
            await store.get("absent")
        for offset, length in ((0, 11), (10, 1), (-1, 1)):
            with pytest.raises(CorruptionError):
                await store.get_range("a", offset, length)
        with pytest.raises(UsageError):
            await store.get("../a")

    async def test_many_at_once(self, store: AsyncObjectStore) -> None:
        answers = await asyncio.gather(*(store.get(key) for key in KEYS * 5))
        assert answers == [key.encode() * 10 for key in KEYS * 5]


class TestMemory(AsyncContract):
    @pytest.fixture
    def place(self) -> tuple[str, StoreOptions | None]:
        return "memory://asynchronous/prefix", None


class TestFile(AsyncContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> tuple[str, StoreOptions | None]:
        return f"file://{tmp_path}/archive", None


class TestMoto(AsyncContract):
    @pytest.fixture
    def place(self, moto_url: RunningStore) -> tuple[str, StoreOptions | None]:
        return moto_url.fresh_bucket() + "/some/prefix", moto_url.options()


@pytest.mark.integration
class TestMinio(AsyncContract):
    @pytest.fixture
    def place(self, minio_url: RunningStore) -> tuple[str, StoreOptions | None]:
        return minio_url.fresh_bucket() + "/some/prefix", minio_url.options()


@pytest.mark.integration
class TestLocalstack(AsyncContract):
    @pytest.fixture
    def place(self, localstack_url: RunningStore) -> tuple[str, StoreOptions | None]:
        return localstack_url.fresh_bucket() + "/some/prefix", localstack_url.options()


async def test_missing_bucket(moto_url: RunningStore) -> None:
    store = open_async_store("s3://no-such-bucket", moto_url.options())
    with pytest.raises(NotFoundError):
        await store.get("k")
    await store.close()


async def test_connection_refused() -> None:
    settings = ObjectStoreSettings(endpoint_url=f"http://127.0.0.1:{free_port()}", region="us-east-1")
    store = open_async_store("s3://bucket", StoreOptions(settings, S3Credentials("a", "b")))
    with pytest.raises(ThrottledError):
        await store.get("k")
    await store.close()


@pytest.mark.parametrize(
    "action", [Action.STALL, Action.TRUNCATE_ANSWER, Action.LOST_AFTER, Action.SLOW_DOWN]
)
async def test_failures_are_unavailable(moto_url: RunningStore, action: Action) -> None:
    url = moto_url.fresh_bucket()
    fill(url, moto_url.options())
    with FaultProxy(moto_url.endpoint, lambda _request: action) as proxy:
        store = open_async_store(url, replace(moto_url, endpoint=proxy.endpoint).options(read_timeout_ms=500))
        began_s = time.monotonic()
        with pytest.raises(UnavailableError):
            await store.get("a")
        assert time.monotonic() - began_s < 4
        await store.close()
        # aiohttp itself asks once more when a kept connection breaks; only reads ever go this way.
        assert len(proxy.requests) <= (2 if action is Action.LOST_AFTER else 1)


@pytest.mark.integration
async def test_wrong_secret(minio_url: RunningStore) -> None:
    options = replace(minio_url.options(), credentials=S3Credentials(minio_url.access_key, "wrong-secret"))
    store = open_async_store(minio_url.fresh_bucket(), options)
    with pytest.raises(AccessDeniedError):
        await store.get("k")
    await store.close()
