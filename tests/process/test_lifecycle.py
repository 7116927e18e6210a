"""The service's main loop with a job that does what a test says: drain, outage, fencing, reload."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_tiered.process.findings import RunState, after_failure
from rocketmq_tiered.process.lifecycle import Event, UploaderService
from rocketmq_tiered.process.report import StatusReport
from tests.process.status_report import REPORT
from tiered.errors import (
    AccessDeniedError,
    CorruptionError,
    EmptyCommitlogError,
    FencedError,
    LogDivergedError,
    MissingBrokerFileError,
    NotFoundError,
    RefusedRequestError,
    StoreLayoutError,
    UnavailableError,
    UsageError,
)
from tiered.settings.load import LoadedSettings, load_settings
from tiered.settings.sections import Settings
from uploader.follow_loop import BrokerRestartedError

UNOWNED = dataclasses.replace(REPORT, epoch=0)
NEVER_OWNERS: list[Callable[[threading.Event], None]] = []
"""Behaviours that end before their archive is claimed."""


class FakeJob:
    """Runs `behaviour(stop)`."""

    def __init__(self, behaviour: Callable[[threading.Event], None], shows: StatusReport) -> None:
        self._behaviour = behaviour
        self.shows = shows

    def run(self, stop: threading.Event) -> None:
        self._behaviour(stop)

    def report(self) -> StatusReport:
        return self.shows


@pytest.fixture(autouse=True)
def _no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.0)


class Harness:
    """A service in a thread, with a list of behaviours, one for each job it starts; the last repeats."""

    def __init__(self, *behaviours: Callable[[threading.Event], None], **settings: Any) -> None:
        self.behaviours = list(behaviours)
        self.seen: list[Settings] = []
        self.applied: list[Settings] = []
        self.refused: dict[str, Exception] = {}
        """By topics.exclude: why no job can be built."""
        self.next_loaded: LoadedSettings | Exception = _loaded(**settings)
        self.service = UploaderService(
            self.loaded(),
            factory=self._build,
            surroundings=self,
        )
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self.exit_code = self.service.serve()
        if self.exit_code != 4:
            self.service.close()

    def _build(self, settings: Settings) -> FakeJob:
        self.seen.append(settings)
        for excluded in settings.topics.exclude:
            if excluded in self.refused:
                raise self.refused[excluded]
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        self.job = FakeJob(behaviour, UNOWNED if behaviour in NEVER_OWNERS else REPORT)
        return self.job

    def loaded(self) -> LoadedSettings:
        if isinstance(self.next_loaded, Exception):
            raise self.next_loaded
        return self.next_loaded

    def apply(self, settings: Settings) -> None:
        self.applied.append(settings)

    def extended(self, report: StatusReport) -> StatusReport:
        return report

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"state {self.service.condition}"
            time.sleep(0.002)

    def stop(self) -> int | None:
        self.service.post(Event.STOP)
        self._thread.join(10)
        return self.exit_code

    def join(self) -> int | None:
        self._thread.join(10)
        return self.exit_code


def _loaded(*, standby_retry_ms: int | None = None, **values: object) -> LoadedSettings:
    flags = {key.replace("__", "."): ("test", value) for key, value in values.items()}
    loaded = load_settings(flags=flags)
    if standby_retry_ms is None:
        return loaded
    process = dataclasses.replace(loaded.settings.process, standby_retry_ms=standby_retry_ms)
    return dataclasses.replace(loaded, settings=dataclasses.replace(loaded.settings, process=process))


def _until_stopped(stop: threading.Event) -> None:
    stop.wait()


def _raising(error: BaseException, *, owned: bool = False) -> Callable[[threading.Event], None]:
    def behaviour(stop: threading.Event) -> None:
        raise error

    if not owned:
        NEVER_OWNERS.append(behaviour)
    return behaviour


def _wait(event: threading.Event) -> None:
    event.wait()


@pytest.fixture
def harness() -> Harness:
    """A job that runs until it is stopped."""
    return Harness(_until_stopped)


def test_stop_drains() -> None:
    drained = threading.Event()

    def behaviour(stop: threading.Event) -> None:
        stop.wait()
        drained.set()

    harness = Harness(behaviour)
    harness.wait_for(lambda: harness.service.readiness()[0])
    assert harness.service.health()[0]
    assert harness.stop() == 0
    assert drained.is_set()
    assert harness.service.health() == (False, "stopped: all uploads are finished")


def test_an_uploader_that_the_object_store_blocks_is_not_ready(harness: Harness) -> None:
    harness.wait_for(lambda: harness.service.readiness()[0])
    blocked = dataclasses.replace(REPORT, store_problem="http://h:9000 is unreachable: refused")
    harness.job.shows = blocked
    why = "blocked: object store: http://h:9000 is unreachable: refused"
    ready, text = harness.service.readiness()
    assert not ready and text.startswith(f"{why}. Next: run tiered doctor")
    assert harness.service.report().state == "blocked: object store"
    assert harness.service.health()[0]
    harness.job.shows = REPORT
    assert harness.service.readiness()[0]
    assert harness.stop() == 0


def test_a_job_that_does_not_drain_is_left_behind_with_exit_4() -> None:
    release = threading.Event()
    harness = Harness(lambda stop: (release.wait(), None)[1], process__drain_timeout_ms=20)
    harness.wait_for(lambda: harness.service.condition.state is RunState.FOLLOWING)
    assert harness.stop() == 4
    release.set()


def test_an_outage_is_retried_with_growing_waits() -> None:
    settings = Settings()
    waits = [after_failure(UnavailableError("gone"), settings, n, 0.5).delay_s for n in range(1, 9)]
    assert waits == sorted(waits) and waits[0] == 0.75 and waits[-1] == 22.5
    assert after_failure(UnavailableError("gone"), settings, 1000, 0.99).delay_s <= 30
    assert after_failure(BrokerRestartedError("started"), settings, 1000, 0.99).delay_s == 1, (
        "nothing has failed"
    )


def test_an_outage_ends_without_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_tiered.process.findings.RETRY_FIRST_S", 0.02)
    harness = Harness(
        _raising(UnavailableError("bucket away")), _raising(UnavailableError("x")), _until_stopped
    )
    harness.wait_for(lambda: len(harness.seen) == 3)
    assert harness.stop() == 0


def test_a_fenced_writer_stands_by_and_comes_back() -> None:
    harness = Harness(_raising(FencedError("epoch 4 is owned by b")), _until_stopped, standby_retry_ms=200)
    harness.wait_for(lambda: harness.service.condition.state is RunState.STANDBY)
    report = harness.service.report()
    assert (report.state, report.why) == ("standby", "epoch 4 is owned by b")
    ready, why = harness.service.readiness()
    assert not ready and "epoch 4 is owned by b" in why
    assert harness.service.health()[0]
    harness.wait_for(lambda: harness.service.condition.state is RunState.FOLLOWING)
    assert harness.stop() == 0


def test_a_broker_that_is_silent_freezes_and_one_log_entry_marks_each_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rocketmq_tiered.process.lifecycle.OBSERVE_S", 0.01)
    caplog.set_level("INFO")
    harness = Harness(_until_stopped)
    harness.wait_for(lambda: "state following" in caplog.messages)
    silent = dataclasses.replace(
        REPORT, broker_address="h:10911", broker_problem="it does not answer at h:10911 (refused)"
    )
    text = "frozen: broker h:10911 does not answer"
    harness.job.shows = silent
    ready, line = harness.service.readiness()
    assert not ready and line.startswith(f"{text}: it does not answer at h:10911 (refused). Next: ")
    harness.wait_for(lambda: f"state {text}" in caplog.messages)
    time.sleep(0.05)
    harness.job.shows = REPORT
    harness.wait_for(lambda: caplog.messages[-1] == "state following")
    assert vars(caplog.records[-1])["before"] == text
    assert harness.stop() == 0
    assert caplog.messages.count(f"state {text}") == 1


def test_an_uploader_that_lags_is_behind_and_ready(harness: Harness) -> None:
    harness.wait_for(lambda: harness.service.readiness()[0])
    harness.job.shows = dataclasses.replace(REPORT, lag_seconds=90.0)
    why = "behind: the oldest message not archived yet is 90 s old"
    assert harness.service.readiness() == (True, why)
    assert harness.stop() == 0


def test_a_start_that_fails_twice_for_the_same_cause_is_blocked() -> None:
    error = UnavailableError("the archive is empty, but was archived to before")
    first, second = (after_failure(error, _loaded().settings, 2, 0.0, lasts=lasts) for lasts in (False, True))
    assert first.condition.text == "connecting" and second.condition.text == "blocked: archive"
    assert second.condition.step and second.exit_code is None


def test_a_log_that_does_not_continue_the_archive_is_a_state_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = LogDivergedError("the broker's log shares nothing", hint="put it back")
    harness = Harness(_raising(error))
    harness.wait_for(lambda: harness.service.condition.state is RunState.DIVERGED)
    is_ready, text = harness.service.readiness()
    assert not is_ready and text.startswith("diverged: the broker's log shares nothing. Next: put it back")
    report = harness.service.report()
    assert (report.state, report.why, report.step) == ("diverged", error.message, error.hint)
    assert harness.service.health()[0]
    assert harness.stop() == 2
    assert caplog.messages.count("state diverged") == 1


def test_a_store_whose_disk_went_away_is_waited_for() -> None:
    error = StoreLayoutError("/store has no commitlog directory")
    assert after_failure(error, _loaded().settings, 1, 0.0).exit_code == 2
    gone = MissingBrokerFileError("commitlog directory /store/commitlog of broker.conf does not exist")
    for one in (error, gone, EmptyCommitlogError("/store/commitlog contains no commitlog file")):
        plan = after_failure(one, _loaded().settings, 1, 0.0, has_owned=True)
        assert plan.condition.text == "blocked: broker store" and plan.exit_code is None
        assert "mount its disk" in plan.condition.step


def test_an_uploader_is_not_ready_before_it_owns_its_archive() -> None:
    def behaviour(stop: threading.Event) -> None:
        stop.wait()

    NEVER_OWNERS.append(behaviour)
    harness = Harness(behaviour)
    harness.wait_for(lambda: harness.service.condition.state is RunState.CONNECTING)
    assert not harness.service.readiness()[0]
    assert harness.stop() == 0


def test_a_standby_stays_one_while_it_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    harness = Harness(_raising(FencedError("epoch 4 is owned by b")), standby_retry_ms=100)
    harness.wait_for(lambda: len(harness.seen) > 3)
    assert harness.service.condition.state is RunState.STANDBY
    assert harness.stop() == 0
    assert caplog.messages.count("state standby") == 1 and "state following" not in caplog.messages


def test_a_writer_that_lost_its_archive_is_fenced() -> None:
    harness = Harness(_raising(FencedError("epoch 5 is owned by b"), owned=True), standby_retry_ms=60_000)
    harness.wait_for(lambda: harness.service.condition.state is RunState.FENCED)
    assert harness.stop() == 0


@pytest.mark.parametrize(
    "error", [AccessDeniedError("s3://a/b: denied"), NotFoundError("bucket a"), RefusedRequestError("clock")]
)
def test_what_the_object_store_refuses_while_running_blocks_and_serving_continues(error: Exception) -> None:
    """Credentials may expire; clients are served all the while. At the start they end the process."""
    blocked = after_failure(error, Settings(), 1, 0.0, has_owned=True)
    assert (blocked.condition.text, blocked.exit_code) == ("blocked: object store", None)
    assert after_failure(error, Settings(), 1, 0.0).exit_code in (2, 3)
    harness = Harness(_raising(error, owned=True))
    harness.wait_for(lambda: harness.service.condition.text == "blocked: object store")
    assert harness.service.health()[0] and harness.stop() == 0
    standby = Harness(_raising(FencedError("epoch 4 is owned by b")), _raising(error), standby_retry_ms=1)
    standby.wait_for(lambda: standby.service.condition.text == "blocked: object store")
    assert standby.service.health()[0] and standby.stop() == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (CorruptionError("x"), 1),
        (FencedError("x"), 5),
        (OSError(), 70),
    ],
)
def test_errors_that_retrying_cannot_cure_end_the_process(error: Exception, code: int) -> None:
    assert Harness(_raising(error), process__when_fenced="exit").join() == code


def test_reload_applies_new_settings_to_a_new_job(harness: Harness) -> None:
    harness.wait_for(lambda: len(harness.seen) == 1)
    harness.next_loaded = _loaded(topics__exclude="noise-*", admin__port=0)
    harness.service.post(Event.RELOAD)
    harness.wait_for(lambda: len(harness.seen) == 2)
    assert harness.seen[1].topics.exclude == ("noise-*",)
    harness.wait_for(lambda: harness.service.condition.state is RunState.FOLLOWING)
    assert harness.stop() == 0


def test_reload_of_what_the_uploader_does_not_use_leaves_it_running(harness: Harness) -> None:
    reloaded = harness.applied
    harness.wait_for(lambda: len(harness.seen) == 1)
    harness.next_loaded = _loaded(read__policy="FORCE", admin__port=0)
    harness.service.post(Event.RELOAD)
    harness.wait_for(lambda: len(reloaded) == 1)
    assert reloaded[0].read.policy == "FORCE"
    harness.next_loaded = _loaded(read__policy="FORCE", topics__exclude="noise-*", admin__port=0)
    harness.service.post(Event.RELOAD)
    harness.wait_for(lambda: len(harness.seen) == 2)
    assert [settings.read.policy for settings in (harness.seen[1], reloaded[1])] == ["FORCE", "FORCE"]
    assert harness.stop() == 0 and len(harness.seen) == 2


def test_reloaded_rules_of_topics_reach_the_uploader_and_readers(harness: Harness) -> None:
    reloaded = harness.applied
    harness.wait_for(lambda: len(harness.seen) == 1)
    rules = '[{"pattern": "orders-*", "ttl": "7d", "read_policy": "DISABLE"}]'
    harness.next_loaded = _loaded(topics__rules=rules, admin__port=0)
    harness.service.post(Event.RELOAD)
    harness.wait_for(lambda: len(harness.seen) == 2)
    assert [one.topics.rules[0].ttl for one in (harness.seen[1], reloaded[0])] == ["7d", "7d"]
    assert harness.stop() == 0


def test_what_needs_a_restart_stays_as_it_was_whatever_else_is_reloaded() -> None:
    """The lock, the identity and what clients are served are of the archive and store that the process began with."""
    before = {"archive__url": "file:///one", "broker__store_path": "/one", "admin__port": 0}
    harness = Harness(_until_stopped, **before)
    harness.wait_for(lambda: len(harness.seen) == 1)
    harness.next_loaded = _loaded(
        topics__exclude="noise-*", archive__url="file:///two", broker__store_path="/two", admin__port=0
    )
    harness.service.post(Event.RELOAD)
    harness.wait_for(lambda: len(harness.seen) == 2)
    assert harness.seen[1].topics.exclude == ("noise-*",)
    assert (harness.seen[1].archive.url, harness.seen[1].broker.store_path) == ("file:///one", "/one")
    assert harness.stop() == 0


@pytest.mark.parametrize("bad", [True, False])
def test_reload_without_effect_leaves_the_job_alone(harness: Harness, bad: bool) -> None:
    harness.wait_for(lambda: len(harness.seen) == 1)
    if bad:
        harness.next_loaded = UsageError("offload.batch_bytes = -1 is invalid")
    harness.service.post(Event.RELOAD)
    assert harness.stop() == 0
    assert len(harness.seen) == 1


def test_reload_while_standing_by_starts_at_once() -> None:
    harness = Harness(_raising(FencedError("x")), _until_stopped, standby_retry_ms=3_600_000)
    harness.wait_for(lambda: harness.service.condition.state is RunState.STANDBY)
    harness.next_loaded = _loaded(archive__take_over=True)
    harness.service.post(Event.RELOAD)
    harness.wait_for(lambda: harness.seen[-1].archive.take_over)
    harness.wait_for(lambda: harness.service.condition.state is RunState.FOLLOWING)
    assert harness.stop() == 0


def test_a_reload_that_drains_late_is_reported_and_applies_then(caplog: pytest.LogCaptureFixture) -> None:
    drained = threading.Event()
    harness = Harness(lambda stop: _wait(drained), _until_stopped)
    harness.wait_for(lambda: len(harness.seen) == 1)
    harness.next_loaded = _loaded(topics__exclude="noise-*", process__drain_timeout_ms=50)
    harness.service.post(Event.RELOAD)
    harness.service.post(Event.RELOAD)
    harness.wait_for(lambda: "has not finished its uploads within" in caplog.text)
    assert len(harness.seen) == 1
    drained.set()
    harness.wait_for(lambda: len(harness.seen) == 2)
    assert harness.seen[1].topics.exclude == ("noise-*",)
    assert harness.stop() == 0 and caplog.text.count("has not finished its uploads within") == 1


@pytest.mark.parametrize(
    "error", [UsageError("no address"), NotFoundError("no such file"), ValueError("unforeseen")]
)
def test_settings_that_no_job_can_be_built_with_are_taken_back(harness: Harness, error: Exception) -> None:
    """As those of a wrong file, which are refused as it is read."""
    harness.wait_for(lambda: len(harness.seen) == 1)
    harness.refused["noise-*"] = error
    for _ in range(2):
        harness.next_loaded = _loaded(topics__exclude="noise-*")
        harness.service.post(Event.RELOAD)
        harness.wait_for(lambda: len(harness.seen) % 2 == 1 and len(harness.seen) > 1)
        assert harness.seen[-2].topics.exclude == ("noise-*",)
        assert harness.seen[-1] is harness.seen[0] is harness.applied[-1]
        harness.seen[1:] = []
    harness.next_loaded = _loaded(topics__exclude="quiet-*")
    harness.service.post(Event.RELOAD)
    harness.wait_for(lambda: harness.seen[-1].topics.exclude == ("quiet-*",))
    assert harness.stop() == 0


def test_stop_does_not_wait_for_a_reload_that_does_not_drain() -> None:
    """Its time is bounded by what kills the process at its end, whatever came before."""
    drained = threading.Event()
    harness = Harness(lambda stop: _wait(drained), process__drain_timeout_ms=60_000)
    harness.wait_for(lambda: len(harness.seen) == 1)
    harness.next_loaded = _loaded(topics__exclude="noise-*", process__drain_timeout_ms=60_000)
    harness.service.post(Event.RELOAD)
    harness.service.post(Event.STOP)
    harness.wait_for(lambda: harness.service.condition.state is RunState.STOPPING)
    drained.set()
    assert harness.join() == 0 and len(harness.seen) == 1
