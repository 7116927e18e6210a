"""Stores that are not quite AWS, and credentials that change: a scripted server that shows what real ones rarely do.

Parts of composed objects: bytes, order and the sizes that S3 allows.
"""

import asyncio
import base64
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CorruptionError,
    NotFoundError,
    ObjectTooLargeError,
    RefusedRequestError,
    ThrottledError,
    TieredError,
    UnansweredError,
)
from tiered.object_store.interface import Body, FileRange, ObjectRange, Piece, S3Credentials, StoreOptions
from tiered.object_store.part_plan import (
    COPY_BYTES_MAX,
    PART_BYTES_MIN,
    copied_range,
    joined_pieces,
    piece_bytes,
    plan_parts,
    sent_bytes,
)
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.s3 import S3Store
from tiered.object_store.s3_async import AsyncS3Store
from tiered.settings.sections import ObjectStoreSettings

MIB = 1024 * 1024
CHUNKS_MAX = 400


class Asked(NamedTuple):
    """One request."""

    method: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """What it gets."""

    status: int
    body: bytes = b""
    etag: str = ""
    endless: bool = False
    """``body`` again and again, in chunks, until the client closes the connection."""


Script = Callable[[Asked], Answer]


class ScriptedServer:
    """Answers as ``script`` says, and keeps the requests."""

    def __init__(self) -> None:
        self.script: Script = lambda _asked: Answer(200)
        self.asked: list[Asked] = []
        self.chunks = 0
        self.is_contradictory = False
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(self.command, query, headers, body)
                owner.asked.append(asked)
                answer = owner.script(asked)
                self.send_response(answer.status)
                if answer.endless:
                    self.send_chunks(answer.body)
                    return
                self.send_header("Content-Length", str(len(answer.body)))
                if answer.etag:
                    self.send_header("ETag", answer.etag)
                self.end_headers()
                self.wfile.write(answer.body)

            def send_chunks(self, chunk: bytes) -> None:
                self.send_header("Transfer-Encoding", "chunked")
                if owner.is_contradictory:  # aiohttp refuses it
                    self.send_header("Content-Length", "5")
                self.end_headers()
                self.close_connection = True
                with suppress(OSError):
                    while owner.chunks < CHUNKS_MAX:
                        self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                        owner.chunks += 1

            do_PUT = do_GET = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, format: str, *arguments: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def settings(self) -> ObjectStoreSettings:
        """Of a store here; bodies above 5 MiB go in parts."""
        return ObjectStoreSettings(
            endpoint_url=f"http://127.0.0.1:{self._server.server_port}",
            region="us-east-1",
            multipart_threshold_bytes=5 * MIB,
            multipart_part_bytes=5 * MIB,
        )

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


def options(server: ScriptedServer) -> StoreOptions:
    return StoreOptions(server.settings, S3Credentials("a", "b"))


def page(*keys: str, more: bool = False) -> Answer:
    inside = f"<IsTruncated>{str(more).lower()}</IsTruncated>" + "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        for key in keys
    )
    return Answer(200, f"<ListBucketResult>{inside}</ListBucketResult>".encode())


def refusal(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode())


def listed(server: ScriptedServer, prefix: str) -> list[str]:
    store = S3Store("bucket", options(server))
    try:
        return [info.key for info in store.list(prefix)]
    finally:
        store.close()


# -- listings -----------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"<html><body>Log in</body></html>"])
def test_a_page_of_a_web_server_is_no_empty_listing(server: ScriptedServer, body: bytes) -> None:
    """Else an archive behind a proxy that wants a password would not exist."""
    server.script = lambda _asked: Answer(200, body)
    with pytest.raises(UnansweredError, match="is not a listing"):
        listed(server, "a/")


@pytest.mark.parametrize(
    "answer",
    [page("a/2", "a/1"), page("a/1", "a/1"), page("b/1"), page("a/1", more=True)],
    ids=["unsorted", "repeated", "elsewhere", "from the beginning again and again"],
)
def test_a_listing_out_of_order_is_refused(server: ScriptedServer, answer: Answer) -> None:
    """The newest commit is listed first; a listing whose next page begins where it began would never end."""
    server.script = lambda _asked: answer
    with pytest.raises(RefusedRequestError, match="order"):
        listed(server, "a/")


# -- bodies ---------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_a_body_is_not_read_beyond_the_callers_maximum(server: ScriptedServer, is_async: bool) -> None:
    """Whatever its headers say: a chunked body ignores Content-Length."""
    server.is_contradictory = not is_async
    server.script = lambda _asked: Answer(200, bytes(MIB), endless=True)
    with pytest.raises(
        ObjectTooLargeError, match=r"bucket/k has \d+ bytes, more than the 2097152 that may be read"
    ):
        read(server, "get", 2 * MIB, is_async=is_async)
    assert server.chunks < CHUNKS_MAX


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("endless", [False, True], ids=["whole object", "endless"])
def test_a_server_that_ignores_ranges_is_not_read(
    server: ScriptedServer, endless: bool, is_async: bool
) -> None:
    server.script = lambda _asked: Answer(200, bytes(3 * MIB), endless=endless)
    with pytest.raises(
        CorruptionError, match=r"bucket/k: the store sent \d+ bytes or more, though 1048576 were requested"
    ):
        read(server, "get_range", 0, MIB, is_async=is_async)
    assert server.chunks < CHUNKS_MAX


def read(server: ScriptedServer, verb: str, *numbers: int, is_async: bool) -> bytes:
    """The object ``k``, by a store of its own."""
    if not is_async:
        with closing(S3Store("bucket", options(server))) as store:
            return bytes(getattr(store, verb)("k", *numbers))

    async def read_async() -> bytes:
        store = AsyncS3Store("bucket", options(server))
        try:
            return bytes(await getattr(store, verb)("k", *numbers))
        finally:
            await store.close()

    return asyncio.run(read_async())


# -- what is refused ----------------------------------------------------------


def test_parts_that_are_gone_are_put_again_not_missing(server: ScriptedServer) -> None:
    """Cleaned up in between, or completed by a proxy that sent the request twice. NotFoundError would end archiving."""

    def script(asked: Asked) -> Answer:
        if "uploads" in asked.query:
            start = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, start)
        if asked.method == "PUT":
            return Answer(200, etag='"p"')
        return refusal(404, "NoSuchUpload")

    server.script = script
    store = S3Store("bucket", options(server))
    with pytest.raises(UnansweredError, match="NoSuchUpload"):
        store.put_if_absent("data/k", [bytes(6 * MIB)])
    store.close()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "ThrottlingException", ThrottledError),
        (400, "KMS.ThrottlingException", ThrottledError),
        (400, "RequestThrottled", ThrottledError),
        (403, "InvalidObjectState", RefusedRequestError),
        (404, "NoSuchBucket", NotFoundError),
        (403, "AccessDenied", AccessDeniedError),
    ],
)
def test_what_services_behind_the_store_refuse(
    server: ScriptedServer, status: int, code: str, kind: type[TieredError]
) -> None:
    server.script = lambda _asked: refusal(status, code)
    store = S3Store("bucket", options(server))
    with pytest.raises(kind, match=code) as raised:
        store.get("k")
    assert type(raised.value) is kind
    store.close()


def test_a_batch_delete_carries_the_checksum_that_older_stores_want(server: ScriptedServer) -> None:
    server.script = lambda _asked: Answer(200, b"<DeleteResult></DeleteResult>")
    store = S3Store("bucket", options(server))
    store.delete(["a", "b"])
    store.close()
    (asked,) = server.asked
    assert asked.headers["content-md5"] == base64.b64encode(hashlib.md5(asked.body).digest()).decode()


def denied_get(listing: Answer) -> Script:
    """What AWS answers to an account that may list only with a prefix: 403 also for an object that is not there."""

    def script(asked: Asked) -> Answer:
        return listing if "list-type" in asked.query else refusal(403, "AccessDenied")

    return script


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (page(), NotFoundError),
        (page("p/k2"), NotFoundError),
        (page("p/k"), AccessDeniedError),
        (refusal(403, "AccessDenied"), AccessDeniedError),
    ],
    ids=["absent", "only a longer name", "there", "no listing either"],
)
def test_a_denied_object_that_is_not_listed_does_not_exist(
    server: ScriptedServer, listing: Answer, expected: type[TieredError]
) -> None:
    async def read() -> None:
        store = AsyncS3Store("bucket", options(server), prefix="p")
        try:
            await store.get("k")
        finally:
            await store.close()

    server.script = denied_get(listing)
    store = S3Store("bucket", options(server))
    for get in (lambda: store.get("p/k"), lambda: store.get_range("p/k", 0, 8), lambda: asyncio.run(read())):
        with pytest.raises(expected, match="s3://bucket/p/k") as raised:
            get()
        assert expected is NotFoundError or "s3:GetObject" in str(raised.value)
    store.close()


def test_the_clock_is_read_below_the_prefix(server: ScriptedServer) -> None:
    """A policy with a condition on s3:prefix refuses every request for the bucket as a whole."""
    server.script = lambda asked: (
        page() if asked.query.get("prefix") == ["p/"] else refusal(403, "AccessDenied")
    )
    store = PrefixedStore(S3Store("bucket", options(server)), "p")
    assert abs(store.clock_ms() - time.time() * 1000) < 2000
    store.close()


# -- copied parts -------------------------------------------------------------

COPIED = b"<CopyPartResult><ETag>&quot;c&quot;</ETag></CopyPartResult>"


def multipart(copy: Answer, complete: Answer) -> Script:
    """A multipart upload whose copied parts and completion get these responses."""

    def script(asked: Asked) -> Answer:
        if "uploads" in asked.query:
            created = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, created)
        if "x-amz-copy-source" in asked.headers:
            return copy
        if asked.method == "POST":
            return complete
        return Answer(204 if asked.method == "DELETE" else 200, etag='"p"')

    return script


DONE = Answer(
    200, b"<CompleteMultipartUploadResult><ETag>&quot;d&quot;</ETag></CompleteMultipartUploadResult>"
)


def failure(code: str) -> bytes:
    """A body that follows a status line sent before the failure."""
    return f'<?xml version="1.0"?>\n\n<Error><Code>{code}</Code><Message>m</Message></Error>'.encode()


@pytest.mark.parametrize(
    ("copy", "complete", "error"),
    [
        (Answer(200, failure("InternalError")), DONE, UnansweredError),
        (Answer(200, failure("SlowDown")), DONE, ThrottledError),
        (Answer(200, b""), DONE, UnansweredError),
        (Answer(200, b"<CopyPartResult></CopyPartResult>"), DONE, UnansweredError),
        (refusal(404, "NoSuchKey"), DONE, NotFoundError),
        (refusal(403, "AccessDenied"), DONE, AccessDeniedError),
        (refusal(416, "InvalidRange"), DONE, CorruptionError),
        (refusal(400, "InvalidArgument"), DONE, RefusedRequestError),
        (Answer(200, COPIED), Answer(200, failure("InternalError")), UnansweredError),
        (Answer(200, COPIED), Answer(200, b""), UnansweredError),
        (Answer(200, COPIED), refusal(412, "PreconditionFailed"), AlreadyExistsError),
    ],
)
def test_a_failed_copy_is_an_error_and_its_upload_aborted(
    server: ScriptedServer, copy: Answer, complete: Answer, error: type[TieredError]
) -> None:
    """S3 sends the status line before it copies, so that a response of status 200 may contain an error."""
    server.script = multipart(copy, complete)
    store = S3Store("bucket", options(server))
    with pytest.raises(error) as raised:
        store.compose_if_absent("k", [ObjectRange("source", 7, 6 * MIB), b"tail"])
    assert type(raised.value) is error
    assert "s3://bucket/k" in str(raised.value)
    if error is AccessDeniedError:
        assert "s3:PutObject or s3:GetObject" in str(raised.value)
    assert server.asked[-1].method == "DELETE"
    assert not any("x-amz-copy-source" in asked.headers and asked.body for asked in server.asked)
    store.close()


# -- encryption ---------------------------------------------------------------


@pytest.mark.parametrize(("kind", "key"), [("AES256", ""), ("aws:kms", "key-1"), ("", "")])
def test_every_new_object_has_the_encryption_header(server: ScriptedServer, kind: str, key: str) -> None:
    server.script = multipart(Answer(200, COPIED), DONE)
    made = options(server)
    settings = replace(made.settings, server_side_encryption=kind, kms_key=key)
    store = S3Store("bucket", replace(made, settings=settings))
    store.put_if_absent("plain", [b"x"])
    store.compose_if_absent("k", [ObjectRange("source", 7, 6 * MIB), b"tail"])
    creating = [
        asked.headers for asked in server.asked if asked.method == "POST" and "uploads" in asked.query
    ] + [asked.headers for asked in server.asked if asked.method == "PUT" and "partNumber" not in asked.query]
    assert len(creating) == 2
    for headers in creating:
        assert headers.get("x-amz-server-side-encryption", "") == kind
        assert headers.get("x-amz-server-side-encryption-aws-kms-key-id", "") == key
    store.close()


# -- credentials --------------------------------------------------------------


@pytest.fixture
def keys_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the SDK's chain finds keys, and nowhere else."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path / "credentials"


def write_keys(path: Path, access_key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = s\n")


def only(access_key: str) -> Script:
    """Knows one key only."""

    def script(asked: Asked) -> Answer:
        if f"Credential={access_key}/" not in asked.headers["authorization"]:
            return refusal(400, "ExpiredToken")
        return Answer(200, b"content" if asked.method == "GET" else b"", etag='"e"')

    return script


def test_keys_that_were_replaced_in_their_file_are_used(server: ScriptedServer, keys_file: Path) -> None:
    """An agent writes new ones before the old ones end. Refused for good is only who has no others."""
    write_keys(keys_file, "OLD")
    server.script = only("OLD")
    store = S3Store("bucket", StoreOptions(server.settings))
    assert store.get("k") == b"content"
    server.script = only("NEW")
    with pytest.raises(AccessDeniedError):
        store.get("k")
    write_keys(keys_file, "NEW")
    with pytest.raises(ThrottledError, match="have been replaced"):
        store.put_if_absent("k", [b"x"])
    store.put_if_absent("k", [b"x"])
    server.script = only("NEXT")
    with pytest.raises(AccessDeniedError):
        store.get("k")
    store.close()


def test_who_gives_credentials_may_be_away_for_a_moment(
    server: ScriptedServer, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of a container, not started yet: no reason to end for good."""
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0.05)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{server.settings.endpoint_url}/credentials")
    server.script = lambda _asked: Answer(500, b"SECRET of somebody")
    store = S3Store("bucket", StoreOptions(server.settings))
    with pytest.raises(ThrottledError, match="credentials") as raised:
        store.put_if_absent("k", [b"x"])
    assert "SECRET" not in str(raised.value)
    store.close()


def test_a_proxy_is_given_the_password_of_its_address(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password is in no error message."""
    port = urlsplit(server.settings.endpoint_url).port
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://user:p%40ss%3A@127.0.0.1:{port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    expected = f"Basic {base64.b64encode(b'user:p@ss:').decode()}"
    server.script = lambda asked: Answer(200 if asked.headers.get("proxy-authorization") == expected else 407)
    elsewhere = replace(server.settings, endpoint_url="http://minio.example:9000")
    store = S3Store("bucket", StoreOptions(elsewhere, S3Credentials("a", "b")))
    assert store.get("k") == b""
    server.script = lambda _asked: Answer(407)
    with pytest.raises(RefusedRequestError, match="407") as raised:
        store.get("k")
    assert "HTTPS_PROXY" in raised.value.hint and "p%40ss" not in str(raised.value)
    store.close()


async def test_an_event_loop_uses_replaced_keys_too(server: ScriptedServer, keys_file: Path) -> None:
    write_keys(keys_file, "OLD")
    server.script = only("OLD")
    store = AsyncS3Store("bucket", StoreOptions(server.settings))
    assert await store.get("k") == b"content"
    server.script = only("NEW")
    with pytest.raises(AccessDeniedError):
        await store.get("k")
    write_keys(keys_file, "NEW")
    with pytest.raises(ThrottledError, match="later requests use the new keys"):
        await store.get("k")
    assert await store.get("k") == b"content"
    await store.close()


def shape(pieces: list[Piece], part_bytes: int = 16 * MIB) -> list[tuple[str, int]]:
    """What becomes of each part, and its length."""
    return [
        ("copy" if copied_range(part) else "send", sum(map(piece_bytes, part)))
        for part in plan_parts(pieces, part_bytes)
    ]


def source(length: int, offset: int = 0, key: str = "a") -> ObjectRange:
    return ObjectRange(key, offset, length)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], []),
        ([b"x"], [("send", 1)]),
        ([source(6 * MIB)], [("copy", 6 * MIB)]),
        ([source(4 * MIB)], [("send", 4 * MIB)]),
        ([b"h" * 16, source(12 * MIB)], [("send", 5 * MIB), ("copy", 7 * MIB + 16)]),
        ([b"h" * 16, source(9 * MIB)], [("send", 9 * MIB + 16)]),
        (
            [source(6 * MIB), source(6 * MIB, key="b"), b"tail"],
            [("copy", 6 * MIB), ("copy", 6 * MIB), ("send", 4)],
        ),
        ([source(6 * MIB), source(6 * MIB, offset=6 * MIB)], [("copy", 12 * MIB)]),
        ([source(1 * MIB), source(20 * MIB, key="b")], [("send", 5 * MIB), ("copy", 16 * MIB)]),
        ([source(MIB, key=str(key)) for key in range(20)], [("send", 16 * MIB), ("send", 4 * MIB)]),
        ([source(600 * MIB)], [("copy", 200 * MIB)] * 3),
        ([FileRange("f", 0, 40 * MIB)], [("send", 16 * MIB), ("send", 16 * MIB), ("send", 8 * MIB)]),
        ([FileRange("f", 0, 7 * MIB), source(8 * MIB)], [("send", 7 * MIB), ("copy", 8 * MIB)]),
    ],
)
def test_shapes(pieces: list[Piece], expected: list[tuple[str, int]]) -> None:
    assert shape(pieces) == expected


def units(pieces: Body | list[Piece]) -> list[object]:
    """One item for each MiB, to compare order and completeness."""
    found: list[object] = []
    for piece in pieces:
        if isinstance(piece, ObjectRange | FileRange):
            step = range(piece.offset, piece.offset + piece.length, MIB // 2)
            found += [(piece[0], at) for at in step]
        else:
            found += [bytes(piece[at : at + MIB // 2]) for at in range(0, len(piece), MIB // 2)]
    return found


HALF = MIB // 2
PIECES = st.lists(
    st.one_of(
        st.builds(
            ObjectRange,
            st.sampled_from("ab"),
            st.integers(0, 20).map(lambda n: n * HALF),
            st.integers(0, 40).map(lambda n: n * HALF),
        ),
        st.builds(
            FileRange,
            st.just("f"),
            st.integers(0, 3).map(lambda n: n * HALF),
            st.integers(0, 12).map(lambda n: n * HALF),
        ),
        st.integers(0, 6).map(lambda n: bytes([n]) * (n * HALF)),
    ),
    max_size=12,
)


@given(pieces=PIECES, part_mib=st.sampled_from([5, 8, 16]))
def test_parts_hold_every_byte_once_in_order_within_the_limits(pieces: list[Piece], part_mib: int) -> None:
    planned = plan_parts(pieces, part_mib * MIB)
    assert units([piece for part in planned for piece in part]) == units(pieces)
    sizes = [sum(map(piece_bytes, part)) for part in planned]
    assert all(size >= PART_BYTES_MIN for size in sizes[:-1])
    assert all(
        size <= (COPY_BYTES_MAX if copied_range(part) else part_mib * MIB + PART_BYTES_MIN)
        for part, size in zip(planned, sizes, strict=True)
    )
    assert units(joined_pieces(pieces)) == units(pieces)


def test_large_ranges_are_not_sent() -> None:
    assert sent_bytes([b"abc", source(6 * MIB), source(MIB), FileRange("f", 0, 7)]) == 3 + MIB + 7
