"""Asking the broker: what a silent, an old and a half-working one become.

The lag of every queue, counted by scanning: it agrees with the consume queues.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rocketmq_tiered.process import lag as lag_module
from rocketmq_tiered.process.broker_side import BrokerOffsetsClient, address_of, tls_of
from rocketmq_tiered.process.lag import (
    Lag,
    LogGrowth,
    measure_lag,
    retention_margin_s,
    written_end,
)
from tests.broker_store.opened_store import consume_queues_of
from tests.remoting.tls_peer import Papers, answering, listening, shows
from tiered.broker_store.bound import BoundFacts, BrokerOffsets, decide_bound
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.liveness import Liveness
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.errors import UnavailableError, UsageError
from tiered.model.queue import TopicFilter
from tiered.residency import PAGE_BYTES
from tiered.settings.load import load_settings


class FakeClient:
    """A broker with scripted answers and failures."""

    def __init__(self, info: dict[str, str] | None, confirm: int | Exception | None) -> None:
        self.info = info
        self.confirm = confirm
        self.closed = 0
        self.config: dict[str, str] | None = None

    def broker_config(self) -> dict[str, str] | None:
        return self.config

    def runtime_info(self) -> dict[str, str]:
        if self.info is None:
            raise UnavailableError("no runtime information")
        return self.info

    def confirm_offset(self) -> int | None:
        if isinstance(self.confirm, Exception):
            raise self.confirm
        return self.confirm

    def close(self) -> None:
        self.closed += 1


def _client_of(client: FakeClient) -> BrokerOffsetsClient:
    return BrokerOffsetsClient("127.0.0.1:10911", 1.0, connect=lambda *_: client)  # type: ignore[arg-type]


def test_a_5x_broker_says_everything() -> None:
    client = FakeClient({"commitLogMaxOffset": "100", "dispatchBehindBytes": "7"}, 90)
    client.config = {"enableControllerMode": "false"}
    offsets = _client_of(client).ask()
    assert offsets == BrokerOffsets(100, 90, 7)
    assert offsets.config == client.config


def test_a_49_broker_knows_no_confirm_offset() -> None:
    assert _client_of(FakeClient({"commitLogMaxOffset": "100"}, None)).ask() == BrokerOffsets(100, None, None)


def test_a_broker_without_runtime_info_still_has_a_word() -> None:
    offsets = _client_of(FakeClient(None, 90)).ask()
    assert offsets is not None
    assert (offsets.max_phys, offsets.confirm_phys, offsets.dispatch_behind_bytes) == (None, 90, None)


@pytest.mark.parametrize(
    ("config", "unflushed", "is_certain"),
    [
        ({"enableControllerMode": "false", "flushDiskType": "ASYNC_FLUSH"}, "12 B", True),
        ({"enableControllerMode": "true"}, "0 B", False),  # a slave, or a replica in sync that is away
        ({"enableControllerMode": "false", "duplicationEnable": "true"}, "0 B", False),
        ({"enableControllerMode": "false", "enableBuildConsumeQueueConcurrently": "true"}, "0 B", False),
        ({"enableControllerMode": "false", "flushDiskType": "SYNC_FLUSH"}, "12 B", False),
        ({"enableControllerMode": "false", "flushDiskType": "SYNC_FLUSH"}, "0 B", True),
        ({"flushDiskType": "SYNC_FLUSH"}, "12 B", True),  # 4.9
        (None, "0 B", False),
    ],
)
def test_a_broker_whose_dispatch_lag_is_not_exact_is_not_taken_at_its_count(
    config: dict[str, str] | None, unflushed: str, is_certain: bool
) -> None:
    """What it has not dispatched counts from there: what lies above may be taken back."""
    info = {"commitLogMaxOffset": "1000", "dispatchBehindBytes": "0", "remainHowManyDataToFlush": unflushed}
    client = FakeClient(info, 1000)
    client.config = config
    offsets = _client_of(client).ask()
    assert offsets is not None and offsets.is_dispatch_certain == is_certain
    facts = BoundFacts(Liveness.ALIVE, offsets, frontier_phys=700, log_end_phys=4096, cursor_phys=500)
    assert decide_bound(facts).phys == (1000 if is_certain else 700)


def test_a_silent_broker_is_none_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient({"commitLogMaxOffset": "1"}, UnavailableError("timed out"))
    offsets_client = _client_of(client)
    with caplog.at_level(logging.INFO):
        assert [offsets_client.ask() for _ in range(3)] == [None, None, None]
        client.confirm = 1
        assert offsets_client.ask() is not None
    away, back = caplog.messages
    assert "does not answer: " in away and back == "the broker at 127.0.0.1:10911 answers again"
    assert client.closed == 3


def test_another_broker_at_the_address_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient({"commitLogMaxOffset": "100"}, 90)
    offsets_client = BrokerOffsetsClient("127.0.0.1:10911", 1.0, name="broker-a", connect=lambda *_: client)  # type: ignore[arg-type]
    assert offsets_client.ask() is not None, "who may not know is not stopped"
    offsets_client.close()
    client.config = {"brokerName": "broker-b"}
    assert offsets_client.ask() is None
    assert "is broker-b, but the store is that of broker-a" in caplog.messages[-1]
    client.config = {"brokerName": "broker-a"}
    assert offsets_client.ask() is not None


def test_without_an_address_no_request_is_sent() -> None:
    assert BrokerOffsetsClient("", 1.0).ask() is None


def test_where_the_broker_is() -> None:
    conf = BrokerConf(broker_ip="::1", listen_port=1234)
    assert address_of(load_settings().settings, conf) == "::1:1234"
    assert address_of(load_settings().settings, None) == ""
    named = load_settings(flags={"broker.address": ("flag", "10.0.0.1:10911")}).settings
    assert address_of(named, conf) == "10.0.0.1:10911"


@pytest.mark.parametrize("address", ["broker", "broker:", ":10911", "broker:http", "broker:99999"])
def test_a_bad_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=r"broker\.address"):
        address_of(load_settings(flags={"broker.address": ("flag", address)}).settings, None)


def test_it_is_dialled_as_the_settings_say(tmp_path: Path) -> None:
    papers = Papers.made(tmp_path)
    files = {"tls_ca": papers.ca, "tls_certificate": papers.client.certificate, "tls_key": papers.client.key}
    flags = {f"broker.{name}": ("flag", str(path)) for name, path in files.items()}
    tls = tls_of(load_settings(flags={"broker.tls": ("flag", True), **flags}).settings)
    with listening(answering(shows(papers.server, asks=papers.ca))) as address:
        offsets_client = BrokerOffsetsClient(address, 5.0, tls=tls)
        assert offsets_client.ask() == BrokerOffsets(None, None, None)
        offsets_client.close()
    assert tls is not None and tls.options.verify == "full"
    assert tls_of(load_settings().settings) is None


def test_a_file_for_tls_that_is_not_there_ends_the_start() -> None:
    flags = {"broker.tls": ("flag", True), "broker.tls_ca": ("flag", "/nowhere.pem")}
    with pytest.raises(UsageError, match=r"broker\.tls_ca = /nowhere.pem cannot be loaded: No such file"):
        tls_of(load_settings(flags=flags).settings)


EVERYTHING = TopicFilter(include_system=True)
USERS = TopicFilter(cluster="FxCluster", broker="fx-a")


@pytest.fixture(params=["F", "B", "A", "K", "C"])
def store(request: pytest.FixtureRequest, real_store: Callable[[str], Path]) -> Iterator[BrokerStore]:
    """Killed; LMQs and batches; large; IPv6 hosts; RocksDB."""
    with open_broker_store(real_store(request.param) / "store") as opened:
        yield opened


def _measure(store: BrokerStore, begin_phys: int, end_phys: int) -> Lag:
    return measure_lag(store.commit_log, USERS, begin_phys, end_phys)


def _counts(lag: Lag) -> dict[tuple[str, int], tuple[int, int, int]]:
    return {queue: (found.messages, found.bytes, found.oldest_ms) for queue, found in lag.queues.items()}


def test_the_log_alone_says_what_the_consume_queues_say(store: BrokerStore) -> None:
    """For queues the broker still shows; records of deleted topics and older lives are only in the log."""
    log, index = store.commit_log, consume_queues_of(store)
    scanned = _measure(store, log.min_phys, log.max_file_end)
    assert scanned.estimated_from == 1
    by_scan = {queue: found[:2] for queue, found in _counts(scanned).items()}
    by_units = {
        queue: (int(units["inner_num"].sum()), int(units["size"].sum()))
        for queue, units in index.units_between(log.min_phys, log.max_file_end).items()
        if len(units) and USERS.admits(queue[0])
    }
    assert by_units.keys() <= by_scan.keys()
    same = [queue for queue in by_units if by_units[queue] == by_scan[queue]]
    assert len(same) >= 0.8 * len(by_units)  # the killed broker of F had not dispatched two records
    assert all(by_units[queue][0] <= by_scan[queue][0] for queue in by_units)


def test_nothing_is_behind_at_the_end(store: BrokerStore) -> None:
    whole = _measure(store, store.commit_log.min_phys, store.commit_log.max_file_end)
    lag = _measure(store, whole.end_phys, store.commit_log.max_file_end)
    assert (lag.queues, lag.messages, lag.oldest_ms()) == ({}, 0, None)
    assert measure_lag(store.commit_log, USERS, 10, 10).messages == 0


def test_a_long_lag_is_estimated_from_its_first_part(
    store: BrokerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = store.commit_log
    whole = _measure(store, log.min_phys, log.max_file_end)
    monkeypatch.setattr(lag_module, "SCAN_BYTES_MAX", (whole.end_phys - log.min_phys) // 2)
    lag = measure_lag(log, USERS, log.min_phys, log.max_file_end)
    assert 0.4 < lag.estimated_from < 0.6
    assert 0 <= lag.end_phys - whole.end_phys < PAGE_BYTES
    assert whole.messages is not None and lag.messages == pytest.approx(whole.messages, rel=0.6)
    assert lag.oldest_ms() == whole.oldest_ms()
    reports = lag.reports(0)
    assert sum(queue.lag_messages for queue in reports) == pytest.approx(lag.messages, abs=len(reports))


def test_the_written_end_of_a_log_is_found_to_a_page(store: BrokerStore) -> None:
    log = store.commit_log
    end_phys = _measure(store, log.min_phys, log.max_file_end).end_phys
    for begin_phys in (log.min_phys, end_phys - 5000, end_phys):
        found = written_end(log, begin_phys, log.max_file_end)
        assert end_phys <= found <= end_phys + PAGE_BYTES, begin_phys
    assert written_end(log, log.min_phys, end_phys) == end_phys


def test_a_record_larger_than_a_chunk_is_counted(store: BrokerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    log = store.commit_log
    whole = _measure(store, log.min_phys, log.max_file_end)
    monkeypatch.setattr(lag_module, "CHUNK_BYTES", 1024)
    end_phys = log.min_phys + 300_000
    small_chunks = _measure(store, log.min_phys, end_phys)
    monkeypatch.undo()
    assert _counts(small_chunks) == _counts(_measure(store, log.min_phys, end_phys))
    assert small_chunks.messages is not None and whole.messages is not None
    assert 0 < small_chunks.messages < whole.messages


def test_excluded_topics_are_not_behind(store: BrokerStore) -> None:
    log = store.commit_log
    counts = [
        len(measure_lag(log, topics, log.min_phys, log.max_file_end).queues)
        for topics in (TopicFilter(exclude=("*",)), USERS, EVERYTHING)
    ]
    assert counts[0] == 0 < counts[1] <= counts[2]


def test_the_retention_margin_is_none_when_everything_is_archived(store: BrokerStore) -> None:
    log = store.commit_log
    # However full the disk of the tests is.
    store.conf = BrokerConf(file_reserved_hours=1_000_000, disk_max_used_ratio=1, disk_clean_forcibly_ratio=1)
    assert retention_margin_s(store, log.max_file_end, log.max_file_end, ()) is None
    if len(log.files) > 1:
        assert (retention_margin_s(store, log.min_phys, log.max_file_end, ()) or 0) > 3600


def test_growth_is_measured_over_a_window() -> None:
    growth = LogGrowth()
    assert growth.rates(0.0, 1_000) == growth.rates(5.0, 9_000) == []
    assert growth.rates(10.0, 11_000) == [(1_000.0, 10.0)]
    assert growth.rates(20.0, 12_000) == [(550.0, 20.0), (100.0, 10.0)]
    assert growth.rates(21.0, 0) == []
    for second in range(30, 1_000, 10):
        rates = growth.rates(second, 100 * second)
    assert [rate.seconds for rate in rates] == [*range(600, 0, -10)]


def test_records_after_a_damaged_one_are_counted(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tmp_path / "store"
    shutil.copytree(real_store("F") / "store", directory)
    with open_broker_store(directory) as opened:
        log = opened.commit_log
        whole = _measure(opened, log.min_phys, log.max_file_end)
        size = log.record_size_at(log.min_phys)
    first_file = min((directory / "commitlog").iterdir())
    with first_file.open("r+b") as file:
        file.seek(size or 0)
        file.write(bytes(4) + b"\xff" * 4)
    with open_broker_store(directory) as opened:
        log = opened.commit_log
        found = _measure(opened, log.min_phys, log.max_file_end)
    assert whole.messages is not None
    assert (found.messages, found.end_phys) == (whole.messages - 1, whole.end_phys)


def test_there_is_no_lag_where_the_log_ends_below_the_archive(store: BrokerStore) -> None:
    """As that of a broker restored from an older copy does."""
    end_phys = store.commit_log.min_phys
    lag = _measure(store, end_phys + 1000, end_phys)
    assert (lag.queues, lag.messages, lag.end_phys) == ({}, 0, end_phys + 1000)
