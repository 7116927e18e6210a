"""Runs the contract over every back end: memory, file, moto, MinIO, LocalStack."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.object_store.contract import MIB, RACERS, StoreContract
from tests.servers.running_store import RunningStore
from tiered.errors import AlreadyExistsError, NotFoundError
from tiered.object_store import s3
from tiered.object_store.file import FileStore
from tiered.object_store.interface import FileRange, ObjectRange, ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.open_store import open_store


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore()


class TestFile(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return FileStore(tmp_path / "archive")


class TestFileWithNamedUploads(StoreContract):
    """As on a file system without O_TMPFILE."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        store = FileStore(tmp_path / "archive")
        store.writes_anonymously = False
        return store


class S3Contract(StoreContract):
    """The contract, and what only an S3 has: a bucket, pages of a listing, multipart."""

    @pytest.fixture
    def server(self) -> RunningStore:
        raise NotImplementedError

    @pytest.fixture
    def bucket_url(self, server: RunningStore) -> str:
        return server.fresh_bucket()

    @pytest.fixture
    def store(self, server: RunningStore, bucket_url: str) -> Iterator[ObjectStore]:
        store = open_store(bucket_url, server.options())
        yield store
        store.close()

    @pytest.fixture
    def part_store(self, server: RunningStore, bucket_url: str) -> Iterator[ObjectStore]:
        options = server.options(multipart_threshold_bytes=5 * MIB, multipart_part_bytes=5 * MIB)
        store = open_store(bucket_url, options)
        yield store
        store.close()

    def test_missing_bucket(self, server: RunningStore) -> None:
        store = open_store("s3://no-such-bucket-here/prefix", server.options())
        with pytest.raises(NotFoundError, match="NoSuchBucket"):
            store.put_if_absent("k", [b"x"])
        with pytest.raises(NotFoundError, match="no-such-bucket-here"):
            store.get("k")
        with pytest.raises(NotFoundError):
            list(store.list(""))
        with pytest.raises(NotFoundError):
            store.clock_ms()
        store.close()

    def test_listing_in_pages(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3, "LIST_KEYS_MAX", 4)
        keys = [f"n/{number // 3}/{number:03}" for number in range(17)]
        for key in keys:
            store.put_if_absent(key, [b""])
        assert [info.key for info in store.list("n/")] == keys
        assert [info.key for info in store.list("n/", start_after=keys[2], limit=9)] == keys[3:12]
        assert [info.key for info in itertools.islice(store.list("n/"), 5)] == keys[:5]

    def test_deleting_in_batches(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3, "DELETE_KEYS_MAX", 4)
        keys = [f"d/{number}" for number in range(9)]
        for key in keys:
            store.put_if_absent(key, [b""])
        store.delete(keys)
        assert list(store.list("")) == []

    def test_multipart(self, server: RunningStore, bucket_url: str, part_store: ObjectStore) -> None:
        pieces = [bytes([number]) * (MIB + 1000 + number) for number in range(13)]
        part_store.put_if_absent("data/parts", pieces)
        assert part_store.get("data/parts") == b"".join(pieces)
        assert _etag(server, bucket_url, "data/parts").endswith("-3")
        with pytest.raises(AlreadyExistsError):
            part_store.put_if_absent("data/parts", [b"y" * (6 * MIB)])
        assert _open_uploads(server, bucket_url) == []

    def test_composed_in_parts(
        self, server: RunningStore, bucket_url: str, part_store: ObjectStore, tmp_path: Path
    ) -> None:
        """Large ranges are copied by the server, small ones sent with their neighbours."""
        source = [bytes([number]) * MIB for number in range(16)]
        content = b"".join(source)
        part_store.put_if_absent("data/source", source)
        spooled = tmp_path / "spooled"
        spooled.write_bytes(content[: 7 * MIB])
        part_store.compose_if_absent(
            "data/composed",
            [
                ObjectRange("data/source", 0, 5 * MIB),
                ObjectRange("data/source", 5 * MIB, 2 * MIB + 1),
                FileRange(str(spooled), 3, 6 * MIB),
                ObjectRange("data/source", 9, 100),
                ObjectRange("data/source", 2 * MIB, 14 * MIB),
                b"tail",
            ],
        )
        expected = b"".join(
            [content[: 7 * MIB + 1], content[3 : 6 * MIB + 3], content[9:109], content[2 * MIB :], b"tail"]
        )
        assert part_store.get("data/composed") == expected
        assert _etag(server, bucket_url, "data/composed").endswith("-5")

    def test_a_composed_upload_that_fails_is_aborted(
        self, server: RunningStore, bucket_url: str, part_store: ObjectStore
    ) -> None:
        part_store.put_if_absent("data/source", [bytes(6 * MIB)])
        whole = ObjectRange("data/source", 0, 6 * MIB)
        with pytest.raises(NotFoundError, match="data/absent"):
            part_store.compose_if_absent("data/k", [whole, ObjectRange("data/absent", 0, 6 * MIB)])
        part_store.compose_if_absent("data/k", [whole, b"x"])
        with pytest.raises(AlreadyExistsError):
            part_store.compose_if_absent("data/k", [whole, b"y"])
        assert part_store.get_range("data/k", 6 * MIB, 1) == b"x"
        assert _open_uploads(server, bucket_url) == []

    def test_commits_and_pages_are_never_multipart(
        self, server: RunningStore, bucket_url: str, part_store: ObjectStore
    ) -> None:
        for key in ("prefix/catalog/0001", "prefix/pages/1"):
            part_store.put_if_absent(key, [bytes(6 * MIB)])
            assert "-" not in _etag(server, bucket_url, key)


def _etag(server: RunningStore, bucket_url: str, key: str) -> str:
    client = server.client()
    etag: str = client.head_object(Bucket=bucket_url.removeprefix("s3://"), Key=key)["ETag"]
    client.close()
    return etag.strip('"')


def _open_uploads(server: RunningStore, bucket_url: str) -> list[object]:
    client = server.client()
    answer = client.list_multipart_uploads(Bucket=bucket_url.removeprefix("s3://"))
    client.close()
    return list(answer.get("Uploads", ()))


class TestMoto(S3Contract):
    winners_max = RACERS
    """Moto checks for an object and writes it without a lock."""

    @pytest.fixture
    def server(self, moto_url: RunningStore) -> RunningStore:
        return moto_url


@pytest.mark.integration
class TestMinio(S3Contract):
    @pytest.fixture
    def server(self, minio_url: RunningStore) -> RunningStore:
        return minio_url

    def test_multipart_race_has_one_winner(self, part_store: ObjectStore) -> None:
        # Only here: moto and LocalStack check and complete without a lock, and let several win. Nothing
        # relies on it: commits are single PUTs, and a data key belongs to one attempt.
        start = threading.Barrier(4)

        def put(number: int) -> bool:
            start.wait()
            try:
                part_store.put_if_absent("race", [bytes([number]) * (6 * MIB)])
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(put, range(4)))
        assert won.count(True) == 1
        assert part_store.get("race") == bytes([won.index(True)]) * (6 * MIB)


@pytest.mark.integration
class TestLocalstack(S3Contract):
    @pytest.fixture
    def server(self, localstack_url: RunningStore) -> RunningStore:
        return localstack_url

    def test_ready_script_made_its_bucket(self, localstack_url: RunningStore) -> None:
        client = localstack_url.client()
        deadline_s = time.monotonic() + 10
        while "rocketmq-tiered" not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
            assert time.monotonic() < deadline_s, localstack_url.server.log.read_text("utf-8", "replace")
            time.sleep(0.1)
        rules = client.get_bucket_lifecycle_configuration(Bucket="rocketmq-tiered")["Rules"]
        assert rules[0]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
        client.close()
