"""What a running instance says of its lag where the bound keeps messages out of the archive."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from rocketmq_tiered.process import reporter as reporter_module
from rocketmq_tiered.process.report import StatusReport
from rocketmq_tiered.process.reporter import COST_SHARE, Clock, Reporter
from tests.end_to_end.offloading import FILTER
from tests.uploader.living_broker import LivingBroker, offloader_of
from tiered.broker_store.store import open_broker_store
from tiered.catalog.deletions import PendingDeletion, Reason
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import GcSettings
from uploader.offload import OffloadStatus

pytestmark = pytest.mark.integration  # whole uploaders and processes

MESSAGES, CONFIRMED = 2_000, 1_500
SPEC = StoreSpec(topics=2, queues_per_topic=2, body_bytes=200)
RECORD = SPEC.record_bytes
HEAD = StatusReport(archive_url="memory://lag", cluster="C", broker="b", writer="w")
Ask = Callable[[Callable[[StatusReport], bool]], StatusReport]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LivingBroker]:
    write_store(tmp_path / "store", SPEC, messages=MESSAGES)
    broker = LivingBroker(tmp_path / "store")
    yield broker
    broker.close()


@contextmanager
def followed(directory: Path, broker: LivingBroker) -> Iterator[Ask]:
    """Gives a function that asks for reports until one is as wanted."""
    stop = threading.Event()
    with open_broker_store(directory) as store:
        following = offloader_of(store, MemoryStore("memory://lag"), broker)
        reporter = Reporter(
            HEAD, open_broker_store(directory), FILTER, clock=Clock(monotonic_s=iter(range(10**9)).__next__)
        )
        work = threading.Thread(target=following.run, args=(stop,), kwargs={"follow": True})
        work.start()

        def ask(wanted: Callable[[StatusReport], bool]) -> StatusReport:
            for _ in range(1000):
                if wanted(report := reporter.report(following.status)):
                    return report
                stop.wait(0.02)
            pytest.fail(f"not in time: {report}")

        try:
            yield ask
        finally:
            stop.set()
            work.join(10)
            reporter.close()


def test_what_a_silent_broker_keeps_out_is_behind(tmp_path: Path, broker: LivingBroker) -> None:
    """The bound is frozen and all below it is archived, yet nothing is well."""
    broker.answers = False
    with followed(tmp_path / "store", broker) as ask:
        report = ask(lambda report: "does not answer" in report.bound_reason)
    assert report.committed_phys == report.bound_phys == 0
    assert (report.lag_messages, report.lag_bytes) == (MESSAGES, MESSAGES * RECORD)
    assert report.lag_seconds is not None and report.lag_seconds > 0
    assert sum(queue.lag_messages for queue in report.queues) == MESSAGES


def test_what_comes_after_the_last_word_of_a_broker_is_behind(tmp_path: Path, broker: LivingBroker) -> None:
    broker.end_phys = CONFIRMED * RECORD
    with followed(tmp_path / "store", broker) as ask:
        ask(lambda report: report.committed_phys == CONFIRMED * RECORD)
        ask(lambda report: report.lag_messages == 0)  # the broker says that its log ends here
        broker.answers = False
        report = ask(lambda report: "does not answer" in report.bound_reason)
        assert report.bound_phys == CONFIRMED * RECORD
        assert report.lag_messages == MESSAGES - CONFIRMED


def test_reports_that_cost_much_are_made_less_often_and_delay_no_request(
    tmp_path: Path, broker: LivingBroker
) -> None:
    """With many thousands of queues a report takes seconds."""
    now_s, cpu_s, made = [0.0], [0.0], [0]
    is_being_made, may_end = threading.Event(), threading.Event()

    def slow() -> int:  # a report asks for the time
        cpu_s[0] += 1.0
        return 0

    with open_broker_store(tmp_path / "store") as store:
        offloader = offloader_of(store, MemoryStore("memory://lag"), broker)
        offloader.run(threading.Event(), follow=False)
        status = offloader.status()
        view = open_broker_store(tmp_path / "store")
        reporter = Reporter(HEAD, view, FILTER, clock=Clock(slow, lambda: now_s[0], lambda: cpu_s[0]))

        def counted() -> OffloadStatus | None:
            made[0] += 1
            if made[0] == 2:
                is_being_made.set()
                assert may_end.wait(10)
            return status

        first = reporter.report(counted)
        now_s[0] += COST_SHARE * cpu_s[0] - 0.1
        assert reporter.report(counted) == replace(first, measured_seconds=now_s[0]) and made == [1]
        now_s[0] += 0.2
        assert reporter.report(counted) == replace(first, measured_seconds=now_s[0])
        assert is_being_made.wait(10)
        assert reporter.report(counted) == replace(first, measured_seconds=now_s[0]) and made == [2]
        may_end.set()
        reporter.close()  # waits for it
        assert reporter.report(counted).measured_seconds == 0 and made == [2]


def test_a_report_without_figures_has_no_age(tmp_path: Path, broker: LivingBroker) -> None:
    """Before the uploader has a status nothing was measured."""
    now_s = [0.0]
    reporter = Reporter(
        HEAD, open_broker_store(tmp_path / "store"), FILTER, clock=Clock(monotonic_s=lambda: now_s[0])
    )
    assert reporter.report(lambda: None) == HEAD
    now_s[0] = 60.0
    assert reporter.report(lambda: None) == HEAD
    reporter.close()


def test_what_gc_has_not_deleted_is_reported(tmp_path: Path, broker: LivingBroker) -> None:
    pending_since_ms, now_ms = 1_700_000_000_000, 1_700_000_600_000
    with open_broker_store(tmp_path / "store") as store:
        offloader = offloader_of(store, MemoryStore("memory://lag"), broker)
        offloader.run(threading.Event(), follow=False)
        status = offloader.status()
        view = open_broker_store(tmp_path / "store")
        reporter = Reporter(
            HEAD, view, FILTER, gc=GcSettings(grace_ms=200_000), clock=Clock(wall_ms=lambda: now_ms)
        )
        assert status is not None and status.catalog is not None
        pending = {key: PendingDeletion(pending_since_ms, 1, Reason.EXPIRED) for key in "ab"}
        catalog = replace(status.catalog, pending_deletions=pending)
        report = reporter.report(lambda: replace(status, catalog=catalog))
        reporter.close()
    assert (report.pending_deletions, report.oldest_pending_deletion_seconds) == (2, 600.0)
    assert report.garbage_overdue_seconds == 400.0


def test_the_log_of_a_dead_broker_ends_with_its_last_record(tmp_path: Path, broker: LivingBroker) -> None:
    """Not with its files, of which the last are empty to their end: half of it seemed to be missing."""
    write_store(tmp_path / "dead", SPEC, messages=MESSAGES)
    with followed(tmp_path / "dead", broker) as ask:
        report = ask(lambda report: report.committed_phys == MESSAGES * RECORD and report.lag_bytes == 0)
    assert "does not run" in report.bound_reason
    assert report.bound_phys == MESSAGES * RECORD


def test_a_file_that_is_gone_makes_the_lag_unknown_not_the_report(
    tmp_path: Path, broker: LivingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker deletes files while one looks at them."""

    def gone(*_arguments: object) -> float | None:
        raise FileNotFoundError(2, "No such file or directory", "00000000000000000000")

    monkeypatch.setattr(reporter_module, "retention_margin_s", gone)
    broker.end_phys = MESSAGES * RECORD
    with followed(tmp_path / "store", broker) as ask:
        report = ask(lambda report: report.committed_phys == MESSAGES * RECORD)
    assert report.lag_messages is None and "No such file" in report.last_error
