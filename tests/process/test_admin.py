"""The admin server, the metrics it serves, and the client that asks it."""

import dataclasses
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from prometheus_client import generate_latest

from rocketmq_tiered.process.admin import CONNECTIONS_MAX, AdminServer
from rocketmq_tiered.process.admin_client import fetch_status
from rocketmq_tiered.process.metrics import QUEUES_MAX, registry_of, status_families, store_families
from rocketmq_tiered.process.report import QueueReport, StatusReport, decode_report, encode_report
from tests.process.status_report import REPORT as NOTHING_HAPPENED
from tiered.errors import UnavailableError, UsageError
from tiered.object_store.request_metrics import StoreMetrics

QUEUE = QueueReport("orders", 3, lag_messages=10, lag_bytes=1000, lag_seconds=2.5)
REPORT = dataclasses.replace(
    NOTHING_HAPPENED,
    state="following",
    cluster="C",
    bound_phys=None,
    bound_reason="frozen",
    lag_messages=10,
    lag_bytes=1000,
    lag_seconds=2.5,
    gaps=1,
    errors=2,
    last_error="x",
    queues=(QUEUE,),
)


class Source:
    """An AdminSource that says what a test wants."""

    ready = True
    hold: threading.Event | None = None

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)

    def health(self) -> tuple[bool, str]:
        self.asked.release()
        if self.hold is not None:
            self.hold.wait(10)
        return True, "following: well"

    def readiness(self) -> tuple[bool, str]:
        return self.ready, "standby: epoch 4 is owned by b"

    def status_json(self) -> bytes:
        return encode_report(REPORT)

    def metrics(self) -> bytes:
        return metrics_text(REPORT).encode()


@contextmanager
def _serving(source: Source) -> Iterator[str]:
    server = AdminServer("127.0.0.1", 0, source)
    try:
        yield server.url
    finally:
        server.close()


def _get(url: str, path: str, method: str = "GET") -> tuple[int, str]:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def _raw(url: str, request: bytes) -> bytes:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def metrics_text(report: StatusReport) -> str:
    return generate_latest(registry_of(lambda: status_families(report))).decode()


def test_routes() -> None:
    source = Source()
    with _serving(source) as url:
        assert _get(url, "/health") == (200, "following: well\n")
        assert _get(url, "/ready?verbose") == (200, "standby: epoch 4 is owned by b\n")
        source.ready = False
        assert _get(url, "/ready") == (503, "standby: epoch 4 is owned by b\n")
        assert _get(url, "/elsewhere")[0] == 404
        assert _get(url, "/health", "POST")[0] == 501
        assert _get(url, "/ready", "HEAD") == (503, "")
        assert _raw(url, b"HEAD /health HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\n"), "without a body"
        assert "rocketmq_tiered_store_up" in _get(url, "/metrics")[1]
        assert decode_report(fetch_status(url)) == REPORT


def test_a_port_in_use_is_a_usage_error() -> None:
    with _serving(Source()) as url, pytest.raises(UsageError, match="cannot listen"):
        AdminServer("127.0.0.1", urlsplit(url).port or 0, Source())


@pytest.mark.parametrize("host", ["::1", "[::1]", "::", "0.0.0.0", ""])
def test_it_listens_on_addresses_of_both_families(host: str) -> None:
    server = AdminServer(host, 0, Source())
    try:
        assert decode_report(fetch_status(server.url)) == REPORT
    finally:
        server.close()


def test_an_address_of_another_host_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:0: .*set admin\.host"):
        AdminServer("192.0.2.1", 0, Source())


def _status_for(url: str, *hosts: str) -> tuple[int, str]:
    """The response to a request with these Host headers."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=10)
    try:
        connection.putrequest("GET", "/status.json", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:10919",
        "127.0.0.1",
        "127.0.0.1:80",
        "[::1]:10919",
        "[::1]",
        "10.1.2.3:10919",
        "sidecar.example:10919",
        "SIDECAR.example.",
    ],
)
def test_hosts_that_no_foreign_page_can_name_are_accepted(host: str) -> None:
    server = AdminServer("127.0.0.1", 0, Source(), host_names=("sidecar.example",))
    try:
        assert _status_for(server.url, host)[0] == 200
        assert _status_for(server.url)[0] == 200, "HTTP/1.0 checks have none, browsers always do"
    finally:
        server.close()


@pytest.mark.parametrize(
    "hosts",
    [
        ("rebound.attacker.example",),
        ("rebound.attacker.example:10919",),
        ("localhost.attacker.example",),
        ("127.0.0.1.attacker.example",),
        ("sidecar.example",),
        ("",),
        ("[::1",),
        ("2130706433",),
        ("0x7f.1",),
        ("localhost", "rebound.attacker.example"),
        ("localhost:1:2",),
        ("a" * 5000 + "\x1b",),
    ],
)
def test_a_page_whose_name_was_rebound_to_this_host_reads_nothing(
    hosts: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with _serving(Source()) as url:
        for _ in range(3):
            status, text = _status_for(url, *hosts)
            assert (status, "orders" in text, "admin.host_names" in text) == (421, False, True)
    (record,) = [one for one in caplog.records if "Host" in one.getMessage()]
    assert len(str(vars(record)["host"])) <= 100
    assert vars(record)["client"] == "127.0.0.1"


def test_no_answer_is_temporarily_unavailable() -> None:
    with _serving(Source()) as url:
        pass
    with pytest.raises(UnavailableError):
        fetch_status(url)


def test_an_unexpected_error_is_answered_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A scrape without an answer would tell that the process is dead."""

    def fail(_source: Source) -> bytes:
        raise FileNotFoundError("just deleted by the broker")

    monkeypatch.setattr(Source, "metrics", fail)
    with _serving(Source()) as url:
        assert _get(url, "/metrics")[0] == 500
        assert _get(url, "/health")[0] == 200
    assert "deleted by the broker" in caplog.text


def test_connections_are_bounded() -> None:
    source = Source()
    source.hold = threading.Event()
    with _serving(source) as url:
        address = urlsplit(url)
        held = [
            HTTPConnection(address.hostname or "", address.port, timeout=10) for _ in range(CONNECTIONS_MAX)
        ]
        for connection in held:
            connection.request("GET", "/health")
            assert source.asked.acquire(timeout=10)
        with pytest.raises(OSError):
            _get(url, "/health")
        source.hold.set()
        assert [connection.getresponse().status for connection in held] == [200] * CONNECTIONS_MAX
        for connection in held:
            connection.close()


SAID = {"nothing": b"", "half": b"GET /hea", "no end": b"GET /health HTTP/1.0\r\nHost: h\r\n"}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_health_is_answered_while_silent_clients_hold_connections(said: bytes) -> None:
    with _serving(Source()) as url, ExitStack() as idle:
        for _ in range(2 * CONNECTIONS_MAX):
            idle.enter_context(_connected(url)).sendall(said)
        for _ in range(3):
            assert _get(url, "/health") == (200, "following: well\n")
        last = idle.enter_context(_connected(url))
        last.sendall(b"GET /health HTTP/1.0\r\n")
        assert _get(url, "/health")[0] == 200
        last.sendall(b"\r\n")
        assert last.recv(1000).startswith(b"HTTP/1.0 200"), "it has not waited for longest"


def _connected(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname or "", address.port or 0), 5)


def test_metrics_keep_rocketmq_names() -> None:
    labels = (
        'file_type="consume_queue",queue_id="3",storage_medium="blob",storage_type="tiered",topic="orders"'
    )
    text = metrics_text(REPORT)
    assert f"rocketmq_tiered_store_dispatch_behind{{{labels}}} 10.0" in text
    assert f"rocketmq_tiered_store_dispatch_latency{{{labels}}} 2.5" in text
    assert (
        'rocketmq_tiered_store_messages_dispatch_total{storage_medium="blob",storage_type="tiered"} 5.0'
        in text
    )
    assert "rocketmq_tiered_store_bound_offset" not in text, "unknown is absent, not zero"


def test_metrics_without_a_report_say_down() -> None:
    assert 'rocketmq_tiered_store_up{storage_medium="blob",storage_type="tiered"} 0.0' in metrics_text(
        StatusReport()
    )


@pytest.mark.parametrize(
    ("state", "is_up"),
    [
        ("starting", 0),
        ("connecting", 0),
        ("following", 1),
        ("behind", 1),
        ("blocked: object store", 0),
        ("frozen: broker h:10911 does not answer", 0),
        ("standby", 1),
        ("fenced", 1),
        ("stopping", 1),
        ("stopped", 0),
    ],
)
def test_an_uploader_that_does_not_archive_is_not_up(state: str, is_up: int) -> None:
    """An archive that is not mounted fails no request: no other metric tells of it."""
    text = metrics_text(dataclasses.replace(REPORT, state=state))
    word = state.partition(":")[0]
    labels = f'state="{word}",storage_medium="blob",storage_type="tiered"'
    assert f"rocketmq_tiered_store_state{{{labels}}} 1.0" in text
    assert len(re.findall(r"tiered_store_state{.*} 1.0", text)) == 1
    assert f'rocketmq_tiered_store_up{{storage_medium="blob",storage_type="tiered"}} {is_up}.0' in text


def test_series_per_queue_are_bounded_to_the_worst() -> None:
    queues = tuple(dataclasses.replace(QUEUE, queue_id=i, lag_messages=i) for i in range(QUEUES_MAX + 50))
    text = metrics_text(dataclasses.replace(REPORT, queues=queues))
    assert text.count("rocketmq_tiered_store_dispatch_behind{") == QUEUES_MAX
    assert f'queue_id="{QUEUES_MAX + 49}"' in text and 'queue_id="10"' not in text


def test_a_report_from_a_newer_version_is_understood() -> None:
    document = REPORT.to_json() | {"something_new": 1}
    assert decode_report(document) == REPORT


def test_object_store_metrics_keep_rocketmq_names() -> None:
    metrics = StoreMetrics()
    metrics.record("put", 0.02, 1000, None)
    metrics.record("put", 50.0, 0, "UnansweredError")
    metrics.record("get_range", 0.001, 300, None)
    text = generate_latest(registry_of(lambda: store_families(metrics))).decode()
    assert 'provider_rpc_latency_bucket{le="25.0",operation="write",request="put"' in text.replace(
        'le="25"', 'le="25.0"'
    )
    assert 'provider_failures_total{error="UnansweredError",request="put"' in text
    assert 'provider_upload_bytes_sum{storage_medium="blob",storage_type="tiered"} 1000.0' in text
    assert 'provider_download_bytes_count{storage_medium="blob",storage_type="tiered"} 1.0' in text
