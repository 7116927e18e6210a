"""Retries, metrics, bandwidth, faults and addresses: the wrappers around any store, over memory."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.object_store.fault_store import OPERATIONS, Fault, FaultRule, FaultStore, Request
from tiered.clock import Clock
from tiered.errors import (
    AlreadyExistsError,
    ThrottledError,
    UnansweredError,
    UsageError,
)
from tiered.object_store.interface import ObjectRange, S3Credentials, StoreOptions, compose_own
from tiered.object_store.memory import MemoryStore
from tiered.object_store.open_store import StoreAddress, check_addresses, open_store, parse_url
from tiered.object_store.request_metrics import MetricsStore, StoreMetrics
from tiered.object_store.retrying import ATTEMPTS_MAX, RetryingStore
from tiered.object_store.throttle import ThrottledStore
from tiered.settings.sections import ObjectStoreSettings

ROOT = Path(__file__).parents[2]
READS = OPERATIONS - {"put", "compose"}


def filled(*keys: str) -> MemoryStore:
    """A store with these objects."""
    store = MemoryStore()
    for key in keys:
        store.put_if_absent(key, [key.encode()])
    return store


# -- faults -------------------------------------------------------------------


# -- retries ------------------------------------------------------------------


def retrying(store: FaultStore, sleeps: list[float]) -> RetryingStore:
    """With time that only counts."""
    return RetryingStore(store, retry_seconds=60, clock=Clock(sleep=sleeps.append), jitter=lambda: 1.0)


def test_reads_lists_and_deletes_are_repeated() -> None:
    faulty = FaultStore(filled("a", "b"))
    sleeps: list[float] = []
    store = retrying(faulty, sleeps)
    acts: dict[str, Callable[[], object]] = {
        "get": lambda: store.get("a"),
        "get_range": lambda: store.get_range("a", 0, 1),
        "list": lambda: [info.key for info in store.list("")],
        "clock": store.clock_ms,
        "delete": lambda: store.delete(["a"]),
    }
    assert acts.keys() == READS
    for operation, act in acts.items():
        faulty.add(FaultRule(Fault.LOST_BEFORE, frozenset({operation}), times=2))
        before = len(faulty.requests)
        answer = act()
        assert len(faulty.requests) - before >= 3, operation
        if operation == "list":
            assert answer == ["a", "b"]
    assert sleeps[:2] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("operation", "act"),
    [
        ("put", lambda store: store.put_if_absent("k", [b"x"])),
        ("compose", lambda store: store.compose_if_absent("k", [ObjectRange("a", 0, 1)])),
    ],
)
def test_what_writes_is_never_repeated(operation: str, act: Callable[[RetryingStore], None]) -> None:
    faulty = FaultStore(filled("a"), [FaultRule(Fault.THROTTLED, frozenset({operation}), times=1)])
    sleeps: list[float] = []
    with pytest.raises(ThrottledError):
        act(retrying(faulty, sleeps))
    assert faulty.requests == [Request(operation, "k", "THROTTLED")]
    assert sleeps == []


def test_an_own_name_that_exists_is_an_upload_without_response() -> None:
    store = filled("a")
    compose_own(store, "k", [ObjectRange("a", 0, 1)])
    with pytest.raises(UnansweredError, match="sent the request twice"):
        compose_own(store, "k", [b"x"])


def test_retries_are_bounded() -> None:
    faulty = FaultStore(MemoryStore(), [FaultRule(Fault.THROTTLED, READS)])
    sleeps: list[float] = []
    with pytest.raises(ThrottledError):
        retrying(faulty, sleeps).get("k")
    assert len(faulty.requests) == ATTEMPTS_MAX
    assert max(sleeps) <= 5.0


def test_a_listing_continues_where_it_broke() -> None:
    class Breaking(MemoryStore):
        broken = 0

        def list(self, prefix: str, *, start_after: str = "", limit: int | None = None):  # type: ignore[no-untyped-def]
            for number, info in enumerate(super().list(prefix, start_after=start_after, limit=limit)):
                if number == 3 and self.broken < 3:
                    self.broken += 1
                    raise UnansweredError("page lost")
                yield info

    store = Breaking()
    keys = [f"{number:02}" for number in range(20)]
    for key in keys:
        store.put_if_absent(key, [])
    patient = RetryingStore(store, retry_seconds=60, clock=Clock(sleep=lambda _seconds: None))
    assert [info.key for info in patient.list("")] == keys
    assert store.broken == 3
    store.broken = 0
    assert [info.key for info in patient.list("", start_after="01", limit=11)] == keys[2:13]


# -- metrics and bandwidth ----------------------------------------------------


def test_metrics_count_requests_bytes_failures_and_time() -> None:
    metrics = StoreMetrics()
    times = iter(range(100))
    store = MetricsStore(MemoryStore(), metrics, clock=Clock(monotonic_s=lambda: next(times) / 50))
    store.put_if_absent("k", [b"12", memoryview(b"345")])
    with pytest.raises(AlreadyExistsError):
        store.put_if_absent("k", [b"123456789"])
    store.get_range("k", 1, 3)
    assert [info.key for info in store.list("")] == ["k"]
    next(store.list(""))
    seen = metrics.snapshot()
    assert (seen["put"].requests, seen["put"].bytes, seen["put"].failures) == (
        2,
        5,
        {"AlreadyExistsError": 1},
    )
    assert seen["put"].seconds == pytest.approx(0.04)
    assert sum(seen["put"].latency_counts) == 2
    assert seen["get_range"].bytes == 3
    assert seen["list"].requests == 2
    assert seen["list"].failures == {}
    assert metrics.requests == 5


def test_bandwidth_is_held_on_average() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    store = ThrottledStore(MemoryStore(), 1000, clock=Clock(monotonic_s=lambda: now[0], sleep=sleep))
    for number in range(21):
        store.put_if_absent(str(number), [bytes(500)])
    assert now[0] == pytest.approx((20 * 500 - 1000) / 1000)
    store.get("1")
    now[0] += 100
    before = now[0]
    store.put_if_absent("later", [bytes(900)])
    assert now[0] == before + 0, "saved up while idle"


def test_copies_inside_the_store_are_no_bandwidth() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    source = MemoryStore()
    source.put_if_absent("a", [bytes(6 << 20)])
    metrics = StoreMetrics()
    store = MetricsStore(
        ThrottledStore(source, 1000, clock=Clock(monotonic_s=lambda: now[0], sleep=sleep)),
        metrics,
        clock=Clock(monotonic_s=lambda: now[0]),
    )
    for number in range(11):
        store.compose_if_absent(
            str(number), [ObjectRange("a", 0, 6 << 20), ObjectRange("a", 5, 400), bytes(100)]
        )
    assert now[0] == pytest.approx((10 * 500 - 1000) / 1000)
    counted = metrics.snapshot()["compose"]
    assert (counted.requests, counted.bytes, counted.failures) == (11, 11 * 500, {})


# -- addresses ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("file:///tmp/a%20b", StoreAddress("file", "/tmp/a b", "")),
        ("s3://bucket", StoreAddress("s3", "bucket", "")),
        ("s3://bucket/some/prefix/", StoreAddress("s3", "bucket", "some/prefix")),
        ("memory://name/p", StoreAddress("memory", "name", "p")),
    ],
)
def test_addresses(url: str, address: StoreAddress) -> None:
    assert parse_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/tmp/x",
        "http://bucket",
        "s3://",
        "s3:///x",
        "file://host/x",
        "file://x",
        "s3://b/ü",
        "s3://b/../x",
        "s3://b?x=1",
        "s4://a[",
        "s3://a]",
        "s3://a℀",
    ],
)
def test_impossible_addresses(url: str) -> None:
    with pytest.raises(UsageError):
        parse_url(url)


def test_a_secret_in_an_address_is_refused_and_not_repeated() -> None:
    for url in ("s3://AKIDEXAMPLE:secret@bucket/prefix", "s3://AKIDEXAMPLE:secret@bucket℀/prefix"):
        with pytest.raises(UsageError) as raised:
            parse_url(url)
        assert "secret" not in str(raised.value)
        assert "AKID" not in str(raised.value)
        assert raised.value.__cause__ is None


def test_an_impossible_endpoint_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"object_store\.endpoint_url is not a valid URL"):
        check_addresses("s3://b", "http://[1")


def test_open_store(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/x")
    assert "FileStore" in repr(store)
    assert store.url == f"file://{tmp_path}/x"
    first, second = open_store("memory://shared"), open_store("memory://shared/below")
    second.put_if_absent("k", [b"x"])
    assert first.get("below/k") == b"x"
    metrics = StoreMetrics()
    open_store("memory://shared", metrics=metrics).get("below/k")
    assert metrics.requests == 1
    limited = StoreOptions(ObjectStoreSettings(upload_bytes_per_s=1))
    assert "Throttled" in repr(open_store("memory://shared", limited))
    assert open_store("s3://bucket/p").url == "s3://bucket/p"


def test_credentials_have_no_repr() -> None:
    credentials = S3Credentials("AKIDEXAMPLE", "secret", "token")
    assert repr(credentials) == "S3Credentials()"
    assert "secret" not in repr(StoreOptions(credentials=credentials))


def test_file_archives_never_load_the_sdk(tmp_path: Path) -> None:
    script = f"""
import sys
from tiered.object_store.open_store import open_store
from tiered.clock import Clock
store = open_store("file://{tmp_path}/x")
store.put_if_absent("k", [b"x"])
store.get("k")
heavy = ("boto3", "botocore", "aioboto3", "urllib3", "tenacity", "asyncio", "numba", "numpy")
sys.exit(", ".join(name for name in heavy if name in sys.modules) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
