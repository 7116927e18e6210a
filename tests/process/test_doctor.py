"""`tiered doctor`: each check on good and on planted bad inputs, and the command's output and exit codes."""

import errno
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.doctor import examination
from rocketmq_tiered.doctor.broker_store import StoreSubject, margin, store_checks
from rocketmq_tiered.doctor.bucket_rules import judge_lifecycle, judge_lock, judge_versioning
from rocketmq_tiered.doctor.check import (
    Check,
    CheckFinding,
    Outcome,
    PolicyLines,
    exit_code,
    failed,
    not_checked,
    ok,
    run_checks,
)
from rocketmq_tiered.doctor.examination import (
    BrokerSubject,
    broker_checks,
    judge_clock,
    judge_version,
    usable,
)
from rocketmq_tiered.doctor.store_trial import StoreTrial
from rocketmq_tiered.process import uploader_job
from tests.object_store.imperfect_stores import (
    ForgetfulStore,
    OverwritingStore,
    RacyStore,
    RangelessStore,
    ReadOnlyStore,
    UndeletableStore,
    UnsortedStore,
)
from tiered.broker_store.liveness import Liveness, LivenessReport
from tiered.broker_store.pins import PinLimits
from tiered.broker_store.retention import DiskUse
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.clock import Clock
from tiered.errors import RefusedRequestError, UnavailableError, UsageError
from tiered.object_store.bucket_probe import LifecycleRule, LockRule, lifecycle_rule
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.sealed import SealedStore
from tiered.remoting.command import RemotingCommand

NOW_MS = 1_763_900_000_000
Run = Callable[..., tuple[int, str, str]]


def results_of(checks: list[Check]) -> dict[str, CheckFinding]:
    return {check.id: finding for check, finding in run_checks(checks, PolicyLines("BUCKET", "PREFIX/"))}


def failures(results: Mapping[str, CheckFinding]) -> list[str]:
    return [name for name, result in results.items() if result.outcome is Outcome.FAILED]


def trial_of(store: ObjectStore) -> StoreTrial:
    return StoreTrial(
        store, None, PolicyLines("BUCKET", "PREFIX/"), clock=Clock(wall_ms=MemoryStore().clock_ms)
    )


# -- checks and exit codes ----------------------------------------------------


def test_a_check_whose_condition_failed_is_not_checked_and_says_why() -> None:
    def broken() -> Any:
        raise UnavailableError("nothing answers", hint="start it")

    results = results_of(
        [
            Check("one", "first", broken),
            Check("two", "second", lambda: ok(""), ("one",)),
            Check("three", "third", lambda: ok(""), ("two",)),
            Check("four", "fourth", lambda: ok("")),
        ]
    )
    assert [result.outcome for result in results.values()] == [
        Outcome.FAILED,
        Outcome.NOT_CHECKED,
        Outcome.NOT_CHECKED,
        Outcome.OK,
    ]
    assert results["one"].fix == "start it"
    assert results["two"].detail == "first failed"
    assert results["three"].detail == "second was not checked"
    assert exit_code(list(results.values())) == 4


def test_exit_codes() -> None:
    good, skipped, bad = ok(""), not_checked(""), failed("", "")
    away = replace(bad, is_temporary=True)
    for findings, code in (
        ([good, skipped], 0),
        ([good, bad], 1),
        ([away, bad], 1),
        ([good, away], 4),
        ([], 0),
    ):
        assert exit_code(findings) == code


def test_policy_lines_are_statements_of_iam() -> None:
    lines = PolicyLines("logs", "rmq/")
    assert json.loads(lines.line("s3:PutObject")) == {
        "Effect": "Allow",
        "Action": "s3:PutObject",
        "Resource": "arn:aws:s3:::logs/rmq/*",
    }
    assert json.loads(lines.line("s3:ListBucket"))["Condition"] == {"StringLike": {"s3:prefix": ["rmq/*"]}}
    assert "Condition" not in json.loads(PolicyLines("logs").line("s3:ListBucket"))


# -- the object store ---------------------------------------------------------


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), lambda path: FileStore(path / "a")])
def test_a_good_store_has_no_failure_and_nothing_stays(
    make: Callable[[Path], ObjectStore], tmp_path: Path
) -> None:
    store = make(tmp_path)
    store.put_if_absent("catalog/1", [b"x"])
    results = results_of(trial_of(store).checks())
    assert {result.outcome for result in results.values()} == {Outcome.OK}
    assert [info.key for info in store.list("")] == ["catalog/1"]


@pytest.mark.parametrize(
    ("store", "expected", "says"),
    [
        (RacyStore(), "bucket-create-race", "concurrent creates succeeded where only one may"),
        (OverwritingStore(), "bucket-create-again", "two writers would replace"),
        (RangelessStore(), "bucket-range", "a range read returns other bytes"),
        (UnsortedStore(), "bucket-order", "in order of their bytes"),
        (ForgetfulStore(), "bucket-order", "7 of 8 objects"),
        (UndeletableStore(), "bucket-delete", "s3:DeleteObject: AccessDenied"),
        (ReadOnlyStore(), "bucket-create", "Read-only file system"),
    ],
)
def test_a_defect_of_the_store_is_one_failure(store: ObjectStore, expected: str, says: str) -> None:
    results = results_of(trial_of(store).checks())
    assert expected in failures(results)
    own = {"bucket-multipart", "bucket-copy-part"} if isinstance(store, RangelessStore) else set()
    assert set(failures(results)) - own == {expected}
    assert says in results[expected].detail
    assert results[expected].fix


def test_objects_that_stay_are_named_with_the_missing_statement() -> None:
    fix = results_of(trial_of(UndeletableStore()).checks())["bucket-delete"].fix
    assert '"Action": "s3:DeleteObject", "Resource": "arn:aws:s3:::BUCKET/PREFIX/*doctor/*.check"' in fix
    assert "then delete the objects of this check below memory:///doctor/" in fix


def test_an_interrupted_trial_removes_its_objects() -> None:
    store = MemoryStore()
    trial = trial_of(store)
    for check, _ in run_checks(trial.checks()):
        if check.id == "bucket-order":
            break
    assert list(store.list(""))
    trial.remove()
    assert not list(store.list(""))


def test_a_clock_that_differs_is_a_failure() -> None:
    trial = StoreTrial(
        MemoryStore(clock=Clock(wall_ms=lambda: NOW_MS)),
        None,
        None,
        clock=Clock(wall_ms=lambda: NOW_MS + 360_000),
    )
    found = results_of(trial.checks())["bucket-clock"]
    assert found.outcome is Outcome.FAILED and "360.0 s ahead" in found.detail


# -- rules of the bucket ------------------------------------------------------


def test_lifecycle_rules_that_destroy_an_archive_are_failures() -> None:
    delete = lifecycle_rule({"ID": "tidy", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}})
    found = judge_lifecycle([delete], "rmq/", is_aws=True)
    assert found.outcome is Outcome.FAILED and "rule tidy deletes objects after 30 days" in found.detail
    move = lifecycle_rule(
        {
            "ID": "cold",
            "Prefix": "rmq/",
            "Transitions": [{"Days": 90, "StorageClass": "DEEP_ARCHIVE"}],
        }
    )
    assert judge_lifecycle([move], "rmq/", is_aws=False).outcome is Outcome.FAILED
    elsewhere = replace(delete, prefix="other/")
    abort = lifecycle_rule(
        {"ID": "parts", "Filter": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}
    )
    assert judge_lifecycle([elsewhere, abort], "rmq/", is_aws=True).outcome is Outcome.OK
    assert (
        judge_lifecycle([elsewhere], "rmq/", is_aws=True).fix
        == "add the lifecycle rule of deploy/s3/lifecycle.json"
    )
    assert judge_lifecycle([], "", is_aws=False).outcome is Outcome.OK


def test_what_stays_of_deleted_objects_and_until_when() -> None:
    assert judge_versioning("", [], "").outcome is Outcome.OK
    assert judge_versioning("Enabled", [], "").outcome is Outcome.FAILED
    kept = LifecycleRule("old", "", noncurrent_expires="14 days")
    assert "14 days (rule old)" in judge_versioning("Enabled", [kept], "rmq/").detail
    assert "30 days (COMPLIANCE)" in judge_lock(LockRule("COMPLIANCE", "30 days")).detail
    assert "not locked" in judge_lock(LockRule("", "")).detail


# -- the broker's store -------------------------------------------------------


@pytest.fixture
def subject(real_store: Callable[[str], Path], tmp_path: Path) -> StoreSubject:
    store = open_broker_store(real_store("F") / "store")
    pins = (tmp_path / "state" / "pins",)
    return StoreSubject(lambda: store, pins, PinLimits(), lambda: None, disk_use=lambda _: ROOMY)


ROOMY = DiskUse(0.25, 100 << 30)


def test_a_good_store_directory(subject: StoreSubject, tmp_path: Path) -> None:
    results = results_of(store_checks(subject))
    assert not failures(results), results
    assert margin(subject).outcome is Outcome.NOT_CHECKED
    assert "25% of the disk is used, 75.0 GiB are free; no pins above 65%" in results["disk-space"].detail
    assert not (tmp_path / "state").exists(), "the check leaves no directory"


@pytest.mark.parametrize(
    ("code", "fix"),
    [(errno.EXDEV, "set pins.directory"), (errno.EPERM, "run as the owner of the broker's files")],
)
def test_links_that_fail_name_the_reason(subject: StoreSubject, code: int, fix: str) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    found = results_of(store_checks(replace(subject, link=link)))["pins"]
    assert found.outcome is Outcome.FAILED and fix in found.fix


def test_a_store_that_does_not_open_is_one_failure(tmp_path: Path) -> None:
    def missing() -> BrokerStore:
        return open_broker_store(tmp_path / "absent")

    results = results_of(store_checks(StoreSubject(missing, (), PinLimits(), lambda: None)))
    assert failures(results) == ["broker-store"]


def test_a_directory_that_others_can_write_to_is_a_failure(tmp_path: Path) -> None:
    exposed = tmp_path / "state"
    exposed.mkdir()
    exposed.chmod(0o777)
    assert usable(exposed, "process.state_dir").outcome is Outcome.FAILED
    assert usable(exposed / "below" / "it", "process.state_dir").outcome is Outcome.FAILED
    exposed.chmod(0o700)
    assert usable(exposed, "process.state_dir").outcome is Outcome.OK


# -- the broker ---------------------------------------------------------------


@dataclass
class Answers:
    """A broker, or a name server, that answers at one address."""

    at: str = "10.0.0.1:10911"
    registered: str = "b"

    def __call__(self, address: str, *_: object) -> Any:
        return _Client(address, self)


class _Client:
    def __init__(self, address: str, answers: Answers) -> None:
        self._address, self._answers = address, answers

    def _reach(self) -> None:
        if self._address not in (self._answers.at, "ns:9876"):
            raise UnavailableError(f"broker {self._address} does not answer: refused")

    def broker_config(self) -> dict[str, str]:
        self._reach()
        return {"brokerName": "b", "namesrvAddr": "ns:9876"}

    def runtime_info(self) -> dict[str, str]:
        return {
            "brokerVersionDesc": "V5_3_3",
            "bootTimestamp": str(NOW_MS - 65_000),
            "runtime": "[ 0 days, 0 hours, 1 minutes, 5 seconds ]",
        }

    def call(self, code: int) -> RemotingCommand:
        self._reach()
        body = f'{{"brokerAddrTable":{{"{self._answers.registered}":{{"brokerAddrs":{{0:"x"}}}}}}}}'
        return RemotingCommand(0, 1, body=body.encode())

    def close(self) -> None:
        pass


def broker_results(
    address: str, answers: Answers, liveness: Liveness = Liveness.ALIVE, name: str = "b"
) -> dict[str, CheckFinding]:
    report = LivenessReport(liveness, 7, False, "process 7 holds lock")
    subject = BrokerSubject(address, "--broker-address", name, 1.0, answers, lambda: report)
    return results_of(broker_checks(subject, Clock(wall_ms=lambda: NOW_MS)))


def test_a_broker_that_answers() -> None:
    results = broker_results("10.0.0.1:10911", Answers())
    assert {result.outcome for result in results.values()} == {Outcome.OK}
    assert results["broker-version"].detail == "V5_3_3"


def test_a_wrong_port_names_the_address_that_was_tried() -> None:
    results = broker_results("10.0.0.1:10912", Answers())
    assert failures(results) == ["broker"]
    assert results["broker"].detail == "10.0.0.1:10912 (--broker-address) does not answer: refused"
    assert "--broker-address" in results["broker"].fix
    assert exit_code(list(results.values())) == 4


def test_an_unknown_address_of_a_running_broker_is_a_failure() -> None:
    assert failures(broker_results("", Answers())) == ["broker"]
    assert failures(broker_results("", Answers(), Liveness.DEAD)) == []
    assert failures(broker_results("10.0.0.1:1", Answers(), Liveness.DEAD)) == []


def test_another_broker_at_the_address_is_a_failure() -> None:
    results = broker_results("10.0.0.1:10911", Answers(), name="c")
    assert "is b, but the store is that of c" in results["broker"].detail


def test_a_broker_that_is_not_registered_is_a_failure() -> None:
    results = broker_results("10.0.0.1:10911", Answers(registered="other"))
    assert failures(results) == ["name-servers"]
    assert "broker b is not registered at name server ns:9876" in results["name-servers"].detail


def test_versions_and_clocks() -> None:
    assert judge_version({"brokerVersionDesc": "V4_3_0"}).outcome is Outcome.FAILED
    assert judge_version({}).outcome is Outcome.NOT_CHECKED
    info = {
        "runtime": "[ 1 days, 0 hours, 0 minutes, 0 seconds ]",
        "bootTimestamp": str(NOW_MS - 86_400_000 - 90_000),
    }
    found = judge_clock(info, NOW_MS)
    assert found.outcome is Outcome.FAILED and found.detail == "this host's clock is 90 s ahead"


# -- the command --------------------------------------------------------------


@pytest.fixture
def any_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However full the disk of the tests is."""
    subject = partial(StoreSubject, disk_use=lambda _path: DiskUse(0.1, 1 << 40))
    monkeypatch.setattr(examination, "StoreSubject", subject)


@pytest.mark.usefixtures("any_disk")
def test_the_command_prints_a_line_each_and_ends_with_0(
    run: Run, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    arguments = ("--store", real_store("F") / "store")
    code, out, err = run("doctor", f"file://{tmp_path}/archive", *arguments)
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("FAIL")] == [], out
    assert code == 0 and not err
    assert any(
        line.startswith(
            "ok   one of many simultaneous creates wins: one of 16 creates succeeded, in each of 3 rounds"
        )
        for line in lines
    )
    assert lines[-1].endswith(" not checked")
    code, out, _ = run("doctor", f"file://{tmp_path}/archive", *arguments, "--json")
    document = json.loads(out)
    assert code == document["exitCode"] == 0
    assert len({check["id"] for check in document["checks"]}) == len(document["checks"]) > 20


def test_a_log_that_the_archive_does_not_continue_with_is_named_by_doctor_and_status(
    run: Run, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    url, names = f"file://{tmp_path}/archive", ("--cluster", "c", "--broker", "b")
    own, foreign = ("--store", real_store("F") / "store"), ("--store", real_store("E") / "store")
    assert run("backfill", own[1], url, *names)[0] == 0
    doctored, shown = run("doctor", url, *names, *foreign), run("status", url, *foreign)
    assert (
        doctored[0] == 1
        and "FAIL log of the broker: the broker's log differs from the archive" in doctored[1]
    )
    assert shown[0] == 1 and "diverged" in shown[1].splitlines()[0]
    assert "ok   log of the broker" in run("doctor", url, *names, *own)[1]
    assert run("status", url, *own)[0] == 0


@pytest.mark.usefixtures("any_disk")
def test_a_bucket_that_does_not_answer_is_one_failure(
    run: Run, real_store: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    arguments = ("--store", real_store("F") / "store", "--set", "pins.enabled=false")
    arguments += ("--endpoint-url", "http://127.0.0.1:9")
    code, out, _ = run("doctor", "s3://bucket/x", *arguments, "--json")
    checks = {check["id"]: check for check in json.loads(out)["checks"]}
    assert [name for name, check in checks.items() if check["outcome"] == "failed"] == ["bucket"]
    assert checks["retention-margin"]["detail"] == "archive was not checked" and code == 4


def test_names_of_files_are_escaped_and_failures_end_with_1(run: Run, tmp_path: Path) -> None:
    store = tmp_path / "st\x1b[31more"
    code, out, _ = run("doctor", "--store", store)
    assert code == 1
    assert "\x1b" not in out and "FAIL store directory" in out and "\\x1b[31more" in out


def test_wrong_settings_end_with_2(run: Run) -> None:
    code, _, err = run("doctor", "http://bucket")
    assert code == UsageError.exit_code and "is not an archive URL" in err


# -- before the first commit --------------------------------------------------


def test_a_store_that_lets_two_writers_win_gets_no_commit(
    run: Run, real_store: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RacyStore()
    monkeypatch.setattr(uploader_job, "open_store", lambda url, options, metrics: SealedStore(store, None))
    code, _, err = run("backfill", real_store("F") / "store", "memory://racy")
    assert code == RefusedRequestError.exit_code
    assert "concurrent creates succeeded where only one may; use a store with atomic conditional PUTs" in err
    assert not list(store.list("")), "nothing was written to the archive, and the trial's objects are gone"
