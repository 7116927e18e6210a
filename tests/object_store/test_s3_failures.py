"""What failures of an S3 server and of the network become, through a faulty proxy before a real server.

moto for what any server shows; MinIO for secrets, checksums and clocks.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Timer
from urllib.parse import parse_qs, urlsplit

import botocore.auth
import pytest

from tests.servers.child import free_port
from tests.servers.proxy import Action, FaultProxy, ProxiedRequest
from tests.servers.running_store import RunningStore
from tiered.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    NotFoundError,
    RefusedRequestError,
    StoreFullError,
    ThrottledError,
    TieredError,
    UnansweredError,
    UnavailableError,
)
from tiered.object_store.abandonment import Abandonment, abandonable
from tiered.object_store.interface import S3Credentials, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.s3 import S3Store
from tiered.settings.sections import ObjectStoreSettings

MIB = 1024 * 1024
SLACK_S = 3.0


class ProxiedBucket:
    """A fresh bucket behind a proxy with scripted behaviour."""

    def __init__(self, server: RunningStore, **settings: object) -> None:
        self.action = Action.PASS
        self.proxy = FaultProxy(server.endpoint, self._decide)
        url = server.fresh_bucket()
        self.name = url.removeprefix("s3://")
        self.direct = S3Store(self.name, server.options())
        options = replace(server, endpoint=self.proxy.endpoint).options(**settings)
        self.store = S3Store(self.name, options)

    def _decide(self, _request: ProxiedRequest) -> Action:
        return self.action

    def close(self) -> None:
        self.store.close()
        self.direct.close()
        self.proxy.close()


@pytest.fixture
def proxied(moto_url: RunningStore) -> Iterator[ProxiedBucket]:
    bucket = ProxiedBucket(moto_url)
    yield bucket
    bucket.close()


@pytest.fixture
def impatient(moto_url: RunningStore) -> Iterator[ProxiedBucket]:
    bucket = ProxiedBucket(moto_url, read_timeout_ms=700)
    yield bucket
    bucket.close()


@pytest.fixture
def proxied_minio(minio_url: RunningStore) -> Iterator[Callable[..., ProxiedBucket]]:
    opened: list[ProxiedBucket] = []

    def make(**settings: object) -> ProxiedBucket:
        opened.append(ProxiedBucket(minio_url, **settings))
        return opened[-1]

    yield make
    for bucket in opened:
        bucket.close()


def wait_until(condition: Callable[[], bool], limit_s: float = 5.0) -> bool:
    """Whether ``condition`` came true in time."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


# -- answers ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (Action.SLOW_DOWN, ThrottledError),
        (Action.CONFLICT, ThrottledError),
        (Action.INTERNAL_ERROR, UnansweredError),
        (Action.FULL, StoreFullError),
    ],
)
def test_refusals_are_one_request_each(
    proxied: ProxiedBucket, action: Action, expected: type[TieredError]
) -> None:
    proxied.action = action
    with pytest.raises(expected, match=f"s3://{proxied.name}/k") as raised:
        proxied.store.put_if_absent("k", [b"x"])
    assert type(raised.value) is expected
    assert len(proxied.proxy.requests) == 1, "the SDK's own retries are off"


def test_unanswered_put_is_never_asked_about(proxied: ProxiedBucket) -> None:
    for action, exists in ((Action.LOST_BEFORE, False), (Action.LOST_AFTER, True)):
        proxied.action = action
        key = f"k-{action.name}"
        with pytest.raises(UnansweredError):
            proxied.store.put_if_absent(key, [b"content"])
        assert [seen.method for seen in proxied.proxy.requests if seen.path.endswith(key)] == ["PUT"]
        assert [info.key for info in proxied.direct.list(key)] == ([key] if exists else [])


# -- time ---------------------------------------------------------------------


@pytest.mark.parametrize("action", [Action.STALL, Action.STALL_AFTER])
def test_unanswered_put_ends_in_time_and_closes_its_socket(proxied: ProxiedBucket, action: Action) -> None:
    proxied.action = action
    began_s = time.monotonic()
    with pytest.raises(UnansweredError, match="time"):
        proxied.store.put_if_absent("k", [bytes(MIB)], timeout_s=1.5)
    assert 1.4 < time.monotonic() - began_s < 1.5 + SLACK_S
    assert wait_until(lambda: any(seen.client_closed for seen in proxied.proxy.requests)), (
        "the connection is still open"
    )


@pytest.mark.parametrize("action", [Action.STALL, Action.STALL_AFTER, Action.STALL_BODY])
def test_an_abandoned_put_ends_at_once_and_closes_its_socket(proxied: ProxiedBucket, action: Action) -> None:
    """Long before its time is over; what begins later does not begin."""
    proxied.store.put_if_absent("first", [b"loads the SDK"])
    proxied.action = action
    abandonment = Abandonment()
    Timer(0.3, abandonment.cancel).start()
    began_s = time.monotonic()
    with abandonable(abandonment):
        with pytest.raises(UnansweredError):
            proxied.store.put_if_absent("k", [bytes(8 * MIB)], timeout_s=30)
        assert 0.2 < time.monotonic() - began_s < 3
        with pytest.raises(ThrottledError):
            proxied.store.put_if_absent("later", [b"x"], timeout_s=30)
    _first, stalled = proxied.proxy.requests
    assert wait_until(lambda: stalled.client_closed)
    proxied.action = Action.PASS
    proxied.store.put_if_absent("other", [b"others are not given up"])


def test_put_ends_in_time_when_the_server_does_not_even_read(proxied: ProxiedBucket) -> None:
    proxied.action = Action.STALL_BODY
    began_s = time.monotonic()
    with pytest.raises(UnansweredError, match="time"):
        proxied.store.put_if_absent("k", [bytes(4 * MIB)] * 8, timeout_s=1.5)
    assert 1.4 < time.monotonic() - began_s < 1.5 + SLACK_S
    assert wait_until(lambda: any(seen.client_closed for seen in proxied.proxy.requests))


def test_the_time_limit_covers_all_parts(moto_url: RunningStore) -> None:
    bucket = ProxiedBucket(moto_url, multipart_threshold_bytes=5 * MIB, multipart_part_bytes=5 * MIB)
    bucket.proxy.decide = lambda seen: Action.STALL if "partNumber=2" in seen.query else Action.PASS
    began_s = time.monotonic()
    with pytest.raises(UnansweredError):
        bucket.store.put_if_absent("k", [bytes(12 * MIB)], timeout_s=1.5)
    assert time.monotonic() - began_s < 1.5 + SLACK_S
    assert [info.key for info in bucket.direct.list("")] == []
    assert bucket.proxy.requests[-1].method == "DELETE", "the parts are aborted"
    bucket.close()


def test_reads_without_an_answer_end_too(impatient: ProxiedBucket) -> None:
    impatient.direct.put_if_absent("k", [b"content"])
    impatient.action = Action.STALL
    for read in (
        impatient.store.get,
        lambda key: list(impatient.store.list(key)),
        lambda key: impatient.store.delete([key]),
    ):
        began_s = time.monotonic()
        with pytest.raises(UnansweredError):
            read("k")
        assert time.monotonic() - began_s < 0.7 + SLACK_S


def test_a_truncated_answer_is_unavailable_not_short(proxied: ProxiedBucket) -> None:
    proxied.direct.put_if_absent("k", [bytes(MIB)])
    proxied.action = Action.TRUNCATE_ANSWER
    for read in (proxied.store.get, lambda key: proxied.store.get_range(key, 0, MIB)):
        with pytest.raises(UnavailableError):
            read("k")


def test_a_connection_that_the_server_closed_while_idle_is_replaced(proxied: ProxiedBucket) -> None:
    proxied.store.put_if_absent("k1", [b""])
    proxied.action = Action.LOST_AFTER
    with pytest.raises(UnansweredError):
        proxied.store.put_if_absent("k2", [b""])
    proxied.action = Action.PASS
    proxied.store.put_if_absent("k3", [b""])


# -- addresses ----------------------------------------------------------------


@contextmanager
def store_at(server_of: type[BaseHTTPRequestHandler]) -> Iterator[S3Store]:
    """A store whose requests are answered by such handlers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), server_of)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    settings = ObjectStoreSettings(endpoint_url=f"http://127.0.0.1:{server.server_port}", region="us-east-1")
    store = S3Store("bucket", StoreOptions(settings, S3Credentials("a", "b")))
    try:
        yield store
    finally:
        store.close()
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_store_that_overwrites_is_refused_at_the_first_commit() -> None:
    class Forgetful(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.send_header("ETag", '"x"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet."""

    with store_at(Forgetful) as store:
        store.put_if_absent("cluster/broker/data/x", [b"x"])
        for _ in range(2):
            with pytest.raises(RefusedRequestError, match="overwrites objects"):
                store.put_if_absent("cluster/broker/catalog/x", [b"x"])


def test_not_an_address() -> None:
    settings = ObjectStoreSettings(endpoint_url="no scheme", region="us-east-1")
    with pytest.raises(RefusedRequestError):
        S3Store("bucket", StoreOptions(settings, S3Credentials("a", "b"))).put_if_absent("k", [b"x"])


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, moto_url: RunningStore) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    store = open_store("s3://bucket", replace(moto_url.options(), credentials=None))
    with pytest.raises(AccessDeniedError, match="no usable credentials"):
        store.get("k")


# -- what only a strict server shows ------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("size_bytes", [10, 8 * MIB])
def test_wrong_secret(minio_url: RunningStore, size_bytes: int) -> None:
    bucket = minio_url.fresh_bucket().removeprefix("s3://")
    options = replace(minio_url.options(), credentials=S3Credentials(minio_url.access_key, "wrong-secret"))
    store = S3Store(bucket, options)
    with pytest.raises(AccessDeniedError, match="SignatureDoesNotMatch"):
        store.put_if_absent("k", [bytes(size_bytes)])
    with pytest.raises(AccessDeniedError):
        store.get("k")
    with pytest.raises(AccessDeniedError):
        list(store.list(""))
    with pytest.raises(AccessDeniedError):
        store.clock_ms()


@pytest.mark.integration
def test_unknown_access_key(minio_url: RunningStore) -> None:
    options = replace(minio_url.options(), credentials=S3Credentials("unknown", "x"))
    with pytest.raises(AccessDeniedError, match="InvalidAccessKeyId"):
        S3Store("bucket", options).put_if_absent("k", [b"x"])


@pytest.mark.integration
def test_clock_skew_is_named(minio_url: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = minio_url.fresh_bucket().removeprefix("s3://")
    ahead = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=1)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: ahead)
    with pytest.raises(RefusedRequestError, match="clock"):
        S3Store(bucket, minio_url.options()).put_if_absent("k", [b"x"])


@pytest.mark.integration
@pytest.mark.parametrize("trusted_network", [False, True])
def test_a_body_damaged_on_its_way_is_not_stored(
    proxied_minio: Callable[..., ProxiedBucket], trusted_network: bool
) -> None:
    bucket = proxied_minio(trusted_network=trusted_network)
    bucket.action = Action.DAMAGE
    with pytest.raises(ThrottledError, match="arrived damaged"):
        bucket.store.put_if_absent("k", [bytes(MIB)])
    assert list(bucket.direct.list("")) == []
    bucket.action = Action.PASS
    bucket.store.put_if_absent("k", [bytes(MIB)])


@pytest.mark.integration
def test_minio_goes_away_and_comes_back(minio_url: RunningStore) -> None:
    store = open_store(minio_url.fresh_bucket(), minio_url.options())
    store.put_if_absent("before", [b"1"])
    minio_url.server.kill()
    with pytest.raises(ThrottledError):
        store.put_if_absent("during", [b"2"])
    minio_url.server.start()
    store.put_if_absent("after", [b"3"])
    assert [info.key for info in store.list("")] == ["after", "before"]
    with pytest.raises(AlreadyExistsError):
        store.put_if_absent("before", [b"4"])


# -- secrets ------------------------------------------------------------------


def test_credentials_appear_nowhere(moto_url: RunningStore, caplog: pytest.LogCaptureFixture) -> None:
    secret, token = "SECRET-0123456789abcdef", "TOKEN-0123456789abcdef"
    caplog.set_level(logging.DEBUG)
    bucket = moto_url.fresh_bucket().removeprefix("s3://")
    options = replace(moto_url.options(), credentials=S3Credentials("AKIDEXAMPLE", secret, token))
    store = S3Store(bucket, options)
    store.put_if_absent("k", [b"x"])
    texts = [repr(store), repr(options), str(options), store.url]
    with pytest.raises(NotFoundError) as missing:
        store.get("absent")
    with pytest.raises(NotFoundError) as nowhere:
        list(S3Store("no-such-bucket", options).list(""))
    texts += [str(missing.value), repr(missing.value), str(nowhere.value)]
    assert list(store.list(""))
    store.close()
    seen = caplog.text + "\n".join(texts)
    for hidden in (secret, token, "AKIDEXAMPLE"):
        assert hidden not in seen


@pytest.mark.parametrize(
    ("address", "why"),
    [("127.0.0.1", "Connection refused"), ("no-such-host.invalid", r"no-such-host\.invalid")],
)
def test_a_store_that_is_not_reached_is_unavailable(address: str, why: str) -> None:
    settings = ObjectStoreSettings(endpoint_url=f"http://{address}:{free_port()}", region="us-east-1")
    store = S3Store("bucket", StoreOptions(settings, S3Credentials("a", "b")))
    with pytest.raises(ThrottledError, match=why):
        store.put_if_absent("k", [b"x"])
    with pytest.raises(UnavailableError):
        store.get("k")


def test_an_empty_page_does_not_end_a_listing() -> None:
    """Of a bucket with very many deleted versions: the page is truncated, and nothing is on it."""
    asked: list[str] = []

    class Sparse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if "continuation-token" in parse_qs(urlsplit(self.path).query):
                inside = "<IsTruncated>false</IsTruncated>" + "".join(
                    f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
                    for key in ("a/1", "a/2")
                )
            else:
                inside = "<IsTruncated>true</IsTruncated><NextContinuationToken>next</NextContinuationToken>"
            page = f"<ListBucketResult>{inside}</ListBucketResult>".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet."""

    with store_at(Sparse) as store:
        assert [info.key for info in store.list("a/")] == ["a/1", "a/2"]
    assert len(asked) == 2
