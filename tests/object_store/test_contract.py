"""The contract of ObjectStore as tests, inherited by one class for each back end."""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.object_store.sealed_scene import ARCHIVE, key_file, sealing
from tests.servers.running_store import RunningStore
from tiered.errors import AlreadyExistsError, CorruptionError, NotFoundError, ObjectTooLargeError, UsageError
from tiered.object_store import s3
from tiered.object_store.file import FileStore
from tiered.object_store.interface import FileRange, ObjectRange, ObjectStore, Piece
from tiered.object_store.memory import MemoryStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore

MIB = 1024 * 1024
RACERS = 16
CLOCK_TOLERANCE_MS = 3_000

IMPOSSIBLE_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/.",
    "a b",
    "a+b",
    "ü",
    "a\n",
    "a" * 1025,
]


class StoreContract:
    """A subclass gives the ``store`` fixture: an empty store."""

    winners_max = 1
    """Of a race to create one object."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """An empty store."""
        raise NotImplementedError

    # -- put and get ----------------------------------------------------------

    def test_pieces_of_every_kind_come_back_as_one(self, store: ObjectStore) -> None:
        words = memoryview(bytearray(range(64))).cast("I")
        large = bytes(range(256)) * 1024
        store.put_if_absent(
            "a/b", [b"one", bytearray(b"two"), b"", memoryview(b"xthreex")[1:-1], words, large]
        )
        assert store.get("a/b") == b"onetwothree" + bytes(range(64)) + large

    def test_empty_object(self, store: ObjectStore) -> None:
        store.put_if_absent("empty", [])
        assert store.get("empty") == b""
        assert store.get_range("empty", 0, 0) == b""

    def test_key_of_a_partition_directory(self, store: ObjectStore) -> None:
        key = "topic=%25RETRY%25g%2Fx/date=2026-11-29/00000001.parquet"
        store.put_if_absent(key, [b"rows"])
        assert store.get(key) == store.get_range(key, 0, 4) == b"rows"
        assert [info.key for info in store.list("topic=%25")] == [key]
        store.delete([key])
        assert not list(store.list(""))

    def test_large_object(self, store: ObjectStore) -> None:
        pieces = [bytes([number]) * (MIB // 2 + number) for number in range(40)]
        store.put_if_absent("large", pieces)
        assert store.get("large") == b"".join(pieces)

    def test_many_small_pieces(self, store: ObjectStore) -> None:
        pieces = [str(number).encode() for number in range(5_000)]
        store.put_if_absent("small-pieces", pieces)
        assert store.get("small-pieces") == b"".join(pieces)

    def test_second_put_is_refused_and_changes_nothing(self, store: ObjectStore) -> None:
        store.put_if_absent("k", [b"first"])
        with pytest.raises(AlreadyExistsError):
            store.put_if_absent("k", [b"second"])
        with pytest.raises(AlreadyExistsError):
            store.put_if_absent("k", [b"first"])
        assert store.get("k") == b"first"

    def test_race_has_one_winner(self, store: ObjectStore) -> None:
        start = threading.Barrier(RACERS)

        def put(number: int) -> bool:
            start.wait()
            try:
                store.put_if_absent("race/00001", [f"racer {number} ".encode() * 500])
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(RACERS) as pool:
            won = list(pool.map(put, range(RACERS)))
        assert 1 <= won.count(True) <= self.winners_max
        assert store.get("race/00001") in [f"racer {n} ".encode() * 500 for n in range(RACERS) if won[n]]

    def test_missing_object(self, store: ObjectStore) -> None:
        for read in (store.get, lambda key: store.get_range(key, 0, 1)):
            with pytest.raises(NotFoundError):
                read("no/such")

    @pytest.mark.parametrize("key", IMPOSSIBLE_KEYS)
    def test_impossible_key_is_refused(self, store: ObjectStore, key: str) -> None:
        with pytest.raises(UsageError):
            store.put_if_absent(key, [b"x"])
        with pytest.raises(UsageError):
            store.get(key)

    def test_longest_keys(self, store: ObjectStore) -> None:
        key = "/".join(["k" * 250] * 4)
        store.put_if_absent(key, [b"x"])
        assert [info.key for info in store.list("k")] == [key]

    # -- composed objects -----------------------------------------------------

    def test_composed_of_bytes_files_and_ranges(self, store: ObjectStore, tmp_path: Path) -> None:
        store.put_if_absent("src/a", [bytes(range(200))])
        store.put_if_absent("src/b", [b"0123456789"])
        spooled = tmp_path / "spooled"
        spooled.write_bytes(b"xxfrom a filexx")
        store.compose_if_absent(
            "made/of/pieces",
            [
                b"head",
                ObjectRange("src/a", 10, 5),
                ObjectRange("src/a", 15, 5),
                b"",
                FileRange(str(spooled), 2, 11),
                ObjectRange("src/b", 0, 10),
                ObjectRange("src/b", 3, 0),
                memoryview(bytearray(range(64))).cast("I"),
            ],
        )
        expected = b"head" + bytes(range(10, 20)) + b"from a file" + b"0123456789" + bytes(range(64))
        assert store.get("made/of/pieces") == expected
        assert store.get("src/b") == b"0123456789"
        store.compose_if_absent("empty", [])
        assert store.get("empty") == b""

    def test_composing_an_existing_object_is_refused_and_changes_nothing(self, store: ObjectStore) -> None:
        store.put_if_absent("src", [b"0123456789"])
        store.put_if_absent("k", [b"first"])
        for key in ("k", "src"):
            with pytest.raises(AlreadyExistsError):
                store.compose_if_absent(key, [ObjectRange("src", 0, 4)])
        assert (store.get("k"), store.get("src")) == (b"first", b"0123456789")

    def test_composing_from_a_missing_source_creates_nothing(
        self, store: ObjectStore, tmp_path: Path
    ) -> None:
        with pytest.raises(NotFoundError, match="no/such"):
            store.compose_if_absent("k", [b"x", ObjectRange("no/such", 0, 4)])
        short = tmp_path / "short"
        short.write_bytes(b"abc")
        with pytest.raises(CorruptionError):
            store.compose_if_absent("k", [FileRange(str(short), 1, 5)])
        with pytest.raises(UsageError):
            store.compose_if_absent("k", [ObjectRange("a//b", 0, 4)])
        assert list(store.list("")) == []

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (9, 2), (100, 5), (-1, 3)])
    def test_composing_beyond_a_source_is_corruption(
        self, store: ObjectStore, offset: int, length: int
    ) -> None:
        store.put_if_absent("src", [b"0123456789"])
        with pytest.raises(CorruptionError):
            store.compose_if_absent("k", [ObjectRange("src", offset, length)])
        assert [info.key for info in store.list("")] == ["src"]

    def test_composing_large_ranges(self, store: ObjectStore) -> None:
        content = b"".join(bytes([number]) * MIB for number in range(14))
        store.put_if_absent("large", [content])
        pieces: list[Piece] = [
            b"head",
            ObjectRange("large", 1, 12 * MIB),
            ObjectRange("large", 7, 9),
            b"tail",
        ]
        PrefixedStore(store, "la").compose_if_absent("x/made", [b"a"])  # a prefix moves the target ...
        store.put_if_absent("below/large", [content])
        PrefixedStore(store, "below").compose_if_absent("made", pieces)  # ... and the sources
        expected = b"head" + content[1 : 12 * MIB + 1] + content[7:16] + b"tail"
        assert store.get("below/made") == expected
        assert store.get("la/x/made") == b"a"

    # -- ranges ---------------------------------------------------------------

    def test_an_object_above_the_callers_maximum_is_not_read(self, store: ObjectStore) -> None:
        store.put_if_absent("k", [bytes(200)])
        assert store.get("k", 200) == bytes(200)
        with pytest.raises(ObjectTooLargeError, match=r"k has 200 bytes, more than the 199 that may be read"):
            store.get("k", 199)
        assert store.get("k", 200) == bytes(200)

    def test_ranges(self, store: ObjectStore) -> None:
        content = bytes(range(200))
        store.put_if_absent("k", [content])
        assert store.get_range("k", 0, 200) == content
        assert store.get_range("k", 0, 1) == content[:1]
        assert store.get_range("k", 199, 1) == content[199:]
        assert store.get_range("k", 50, 100) == content[50:150]
        assert store.get_range("k", 7, 0) == b""

    @pytest.mark.parametrize(
        ("offset", "length"), [(0, 201), (199, 2), (200, 1), (1000, 5), (-1, 3), (5, -1)]
    )
    def test_range_beyond_the_object_is_corruption(
        self, store: ObjectStore, offset: int, length: int
    ) -> None:
        store.put_if_absent("k", [bytes(200)])
        with pytest.raises(CorruptionError):
            store.get_range("k", offset, length)

    # -- list -----------------------------------------------------------------

    def test_list_is_in_byte_order_of_whole_keys(self, store: ObjectStore) -> None:
        keys = ["x/a-b", "x/a.b", "x/a/b", "x/a/c/d", "x/a0", "x/aA", "x/a_", "x/aa", "y", "w/z-/q", "w/z/q"]
        for key in reversed(keys):
            store.put_if_absent(key, [key.encode()])
        assert [info.key for info in store.list("")] == sorted(keys)
        assert [info.size_bytes for info in store.list("x/a/")] == [5, 7]

    def test_list_by_prefix_that_is_no_directory(self, store: ObjectStore) -> None:
        for key in ("p/ab/1", "p/abc", "p/b", "pa"):
            store.put_if_absent(key, [b""])
        assert [info.key for info in store.list("p/ab")] == ["p/ab/1", "p/abc"]
        assert [info.key for info in store.list("p")] == ["p/ab/1", "p/abc", "p/b", "pa"]
        assert list(store.list("p/x")) == []
        assert list(store.list("nothing/there/")) == []

    def test_list_start_after_and_limit(self, store: ObjectStore) -> None:
        keys = [f"n/{number // 10}/{number:03}" for number in range(35)]
        for key in keys:
            store.put_if_absent(key, [b""])
        listed = [info.key for info in store.list("n/")]
        assert listed == keys
        for index in (0, 9, 10, 33):
            assert [info.key for info in store.list("n/", start_after=keys[index])] == keys[index + 1 :]
        assert [info.key for info in store.list("n/", start_after="n/1/0")] == keys[10:]
        assert [info.key for info in store.list("n/", start_after="n/1-")] == keys[10:]
        assert [info.key for info in store.list("n/", start_after="m")] == keys
        assert list(store.list("n/", start_after=keys[-1])) == []
        assert [info.key for info in store.list("n/", limit=1)] == keys[:1]
        assert [info.key for info in store.list("n/", start_after=keys[4], limit=12)] == keys[5:17]
        assert list(store.list("n/", limit=0)) == []

    def test_listed_times_are_the_stores(self, store: ObjectStore) -> None:
        store.put_if_absent("k", [b""])
        (info,) = store.list("k")
        assert abs(info.modified_ms - store.clock_ms()) < CLOCK_TOLERANCE_MS

    def test_clock(self, store: ObjectStore) -> None:
        assert abs(store.clock_ms() - time.time() * 1000) < CLOCK_TOLERANCE_MS

    # -- delete ---------------------------------------------------------------

    def test_delete_is_idempotent(self, store: ObjectStore) -> None:
        for key in ("d/1", "d/2", "d/3"):
            store.put_if_absent(key, [b""])
        store.delete(["d/1", "d/3", "d/absent"])
        store.delete(["d/1"])
        store.delete([])
        assert [info.key for info in store.list("d/")] == ["d/2"]
        store.delete(["d/2"])
        assert list(store.list("")) == []
        with pytest.raises(NotFoundError):
            store.get("d/2")

    def test_a_deleted_name_is_free_again(self, store: ObjectStore) -> None:
        store.put_if_absent("k/x", [b"1"])
        store.delete(["k/x"])
        store.put_if_absent("k/x", [b"2"])
        assert store.get("k/x") == b"2"

    # -- around it ------------------------------------------------------------

    def test_below_a_prefix(self, store: ObjectStore) -> None:
        store.put_if_absent("outside", [b""])
        store.put_if_absent("archive-2/k", [b""])
        below = PrefixedStore(store, "archive/")
        for key in ("a", "b/1", "b/2", "c"):
            below.put_if_absent(key, [key.encode()])
        assert [info.key for info in below.list("")] == ["a", "b/1", "b/2", "c"]
        assert [info.key for info in below.list("", start_after="b/1", limit=1)] == ["b/2"]
        assert [info.key for info in store.list("archive/b")] == ["archive/b/1", "archive/b/2"]
        assert below.get("b/1") == below.get_range("b/1", 0, 3) == b"b/1"
        below.delete(["a", "c"])
        assert [info.key for info in below.list("")] == ["b/1", "b/2"]
        assert below.url == f"{store.url.rstrip('/')}/archive" or store.url == "memory://"

    def test_close_is_idempotent(self, store: ObjectStore) -> None:
        store.put_if_absent("k", [b""])
        store.close()
        store.close()


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore()


class TestFile(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return FileStore(tmp_path / "archive")


class TestSealed(StoreContract):
    """Objects of an encrypted archive."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        store = sealing(MemoryStore(), key_file(tmp_path / "ring", "k1"))
        return PrefixedStore(store, f"{ARCHIVE}/data")


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
