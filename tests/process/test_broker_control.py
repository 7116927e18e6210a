"""What a broker that is retired still holds, of which pops take a part.

One instance per state directory, and finding the one that runs; logs and progress of the process.
"""

import errno
import fcntl
import json
import logging
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.cli.status import _instance
from rocketmq_tiered.process.broker_control import (
    BrokerControl,
    Leftover,
)
from rocketmq_tiered.process.findings import after_failure
from rocketmq_tiered.process.instance import (
    DESCRIPTION_FILE,
    IDENTITY_FILE,
    LOCK_FILE,
    InstanceDescription,
    StateDirectory,
    running_instance,
    running_instances,
    state_root,
)
from rocketmq_tiered.process.logs import JsonFormatter
from rocketmq_tiered.process.progress import Progress
from tests.broker_store.unprivileged import run_unprivileged
from tiered.clock import Clock
from tiered.errors import AccessDeniedError, NotFoundError, StoreFullError, UnavailableError, UsageError
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand, RequestCode
from tiered.settings.sections import BrokerSettings, Settings

REVIVE = "rmq_sys_REVIVE_LOG_c"
TOPICS = {
    "t": 2,
    "c": 16,
    "rmq_sys_wheel_timer": 1,
    REVIVE: 8,
    "%RETRY%g": 1,
    "%RETRY%g_t": 1,
    "%RETRY%g+u": 1,
}


@dataclass
class ClientDouble(BrokerClient):
    """``ends``: of queue 0 of each topic; ``offsets``: as the broker's table; ``timers``: pending, by topic."""

    ends: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, dict[int, int]] = field(default_factory=dict)
    timers: dict[str, int] = field(default_factory=dict)

    def topics(self) -> dict[str, Any]:
        return {name: {"writeQueueNums": count} for name, count in TOPICS.items()}

    def runtime_info(self) -> dict[str, str]:
        return {"timerCongestNum": str(sum(self.timers.values()))}

    def call(
        self, code: int, ext_fields: Mapping[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        fields = ext_fields or {}
        if code == RequestCode.GET_MAX_OFFSET:
            end = self.ends.get(fields["topic"], 0) if fields["queueId"] == "0" else 0
            return RemotingCommand(0, 0, ext_fields={"offset": str(end)})
        table: dict[str, Any] = {"offsetTable": {}}
        if code == RequestCode.GET_ALL_CONSUMER_OFFSET:
            table = {"offsetTable": self.offsets}
        if code == RequestCode.GET_TIMER_METRICS:
            table = {"timingCount": {name: {"count": count} for name, count in self.timers.items()}}
        return RemotingCommand(0, 0, body=json.dumps(table).encode())


def control(**state: Any) -> BrokerControl:
    return BrokerControl(ClientDouble(**state), "c")


def test_producers_queues_are_those_of_users() -> None:
    ends = {"t": 7, REVIVE: 9, "%RETRY%g_t": 3, "rmq_sys_wheel_timer": 4}
    assert control(ends=ends).produced() == {("t", 0): 7, ("t", 1): 0}


def test_notes_of_pops_are_no_timers() -> None:
    assert control(timers={REVIVE: 5, "t": 2}).leftovers() == [Leftover("timers", 2)]
    assert control(timers={REVIVE: 5}).leftovers() == []


def test_popped_are_those_whose_time_has_not_passed() -> None:
    assert control(ends={REVIVE: 9}, timers={REVIVE: 2}).popped() == [Leftover("popped messages", 2)]
    assert control(ends={REVIVE: 9}, timers={REVIVE: -1}).popped() == []


def test_what_only_pops_read_is_left_until_it_is_consumed() -> None:
    """A retry topic of a group alone is served by a mount."""
    ends = {"%RETRY%g": 8, "%RETRY%g_t": 3, "%RETRY%g+u": 1}
    found = control(ends=ends, offsets={"t@g": {0: 1}, "%RETRY%g_t@g": {0: 2}}).leftovers()
    assert found == [Leftover("messages to be popped again", 2)]
    assert control(ends=ends, offsets={"%RETRY%g_t@g": {0: 3}, "%RETRY%g+u@g": {0: 1}}).leftovers() == []


DESCRIPTION = InstanceDescription(1, "http://127.0.0.1:1", "file:///a", "C", "b", "/store", 5)


def test_a_second_instance_is_refused(tmp_path: Path) -> None:
    with StateDirectory(tmp_path / "state") as first:
        first.describe(DESCRIPTION)
        with pytest.raises(UsageError, match="another instance uses"), StateDirectory(tmp_path / "state"):
            pass
        assert running_instance(tmp_path / "state") == DESCRIPTION
    with StateDirectory(tmp_path / "state"):
        pass


def test_an_identity_survives_restarts_and_a_fresh_directory_has_a_new_one(tmp_path: Path) -> None:
    with StateDirectory(tmp_path / "a") as state:
        identity = state.identity()
        assert state.identity() == identity
    with StateDirectory(tmp_path / "a") as state:
        assert state.identity() == identity
    with StateDirectory(tmp_path / "b") as state:
        assert state.identity() != identity


def test_status_names_the_state_directories_of_two_sidecars_of_one_broker(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    root = tmp_path / "xdg-state" / "rocketmq-tiered"
    with StateDirectory(tmp_path / "one") as one, StateDirectory(tmp_path / "two") as two:
        for state in (one, two):
            state.describe(DESCRIPTION, root)
        code, _, error = run("status")
        assert code == 2 and all(f"C/b in {tmp_path}/{name}" in error for name in ("one", "two"))
        assert error.rstrip().endswith("choose one with --state-dir")
        two.describe(replace(DESCRIPTION, broker="c"), root)
        assert "choose one with --cluster and --broker, or --state-dir" in run("status")[2]
        conf = tmp_path / "broker.conf"
        conf.write_text("brokerClusterName=C\nbrokerName=c\n")
        assert "choose one" not in run("status", "--broker-conf", str(conf))[2], "it names the sidecar"


@pytest.mark.parametrize("left", [b"", bytes(16), b"\xff\xfe\x80", b"\n"])
def test_an_identity_that_a_power_loss_destroyed_is_created_again(left: bytes, tmp_path: Path) -> None:
    (tmp_path / IDENTITY_FILE).write_bytes(left)
    with StateDirectory(tmp_path) as state:
        fresh = state.identity()
        assert len(fresh) == 16
        assert state.identity() == fresh


def test_what_a_killed_instance_left_is_not_running(tmp_path: Path) -> None:
    with StateDirectory(tmp_path):
        pass
    (tmp_path / DESCRIPTION_FILE).write_text("{}")
    with pytest.raises(NotFoundError, match="no instance uses"):
        running_instance(tmp_path)
    with pytest.raises(NotFoundError):
        running_instance(tmp_path / "never")


def test_running_instances_are_found_wherever_their_state_directory_is(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for _ in range(2):
        with StateDirectory(other) as state:
            state.describe(DESCRIPTION, root)
            assert running_instances(root) == [DESCRIPTION]
        assert running_instances(root) == []


def test_an_instance_is_chosen_by_the_names_in_broker_conf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "broker.conf").write_text("brokerClusterName=C\nbrokerName=b\n")
    root, other = state_root(os.environ), replace(DESCRIPTION, broker="other")
    with StateDirectory(root / "C" / "b") as one, StateDirectory(root / "C" / "other") as two:
        one.describe(DESCRIPTION)
        two.describe(other)
        settings = Settings(broker=BrokerSettings(conf_path=str(tmp_path / "broker.conf")))
        assert _instance(settings) == DESCRIPTION
        with pytest.raises(UsageError, match="several instances"):
            _instance(Settings())


def test_a_full_disk_of_the_state_directory_is_not_the_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    with StateDirectory(Path("state")) as state, pytest.raises(StoreFullError) as found:
        monkeypatch.setattr("tiered.whole_file.replace_whole", full)
        state.describe(DESCRIPTION)
    assert after_failure(found.value, Settings(), 1, 0.0).condition.text == "blocked: local disk"


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(AccessDeniedError, match="No locks available"), StateDirectory(tmp_path):
        pass


def test_an_unusable_state_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AccessDeniedError, match="file/state"), StateDirectory(tmp_path / "file" / "state"):
        pass


def test_no_other_user_takes_the_lock_or_reads_what_is_there(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    state_dir.chmod(0o755)  # as made under a common umask
    (state_dir / LOCK_FILE).touch(0o644)
    with StateDirectory(state_dir) as state:
        state.identity()
        state.describe(DESCRIPTION)

    def work() -> str:
        for name in (LOCK_FILE, IDENTITY_FILE):
            with pytest.raises(PermissionError):
                os.open(state_dir / name, os.O_RDONLY)
        with pytest.raises(AccessDeniedError, match="run this command as the user of the instance"):
            running_instance(state_dir)
        return "locked out"

    assert run_unprivileged(work, tmp_path) == "locked out"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (state_dir, state_dir / LOCK_FILE)] == [
        0o700,
        0o600,
    ]


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_lock_that_is_another_file_is_refused(tmp_path: Path, kind: str) -> None:
    other, state_dir = tmp_path / "other", tmp_path / "state"
    other.touch()
    state_dir.mkdir()
    if kind == "link":
        (state_dir / LOCK_FILE).symlink_to(other)
    elif kind == "hard link":
        (state_dir / LOCK_FILE).hardlink_to(other)
    else:
        os.mkfifo(state_dir / LOCK_FILE)
    with pytest.raises(AccessDeniedError, match="state/lock"), StateDirectory(state_dir):
        pass
    assert stat.S_IMODE(other.stat().st_mode) == 0o644


def _logged(error: BaseException | None, level: int, **extra: object) -> dict[str, object]:
    info = (type(error), error, error.__traceback__) if error is not None else None
    record = logging.LogRecord("sidecar", level, "x.py", 1, "PUT %s\nfailed", ("key",), info)
    vars(record).update(extra)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    document: dict[str, object] = json.loads(line)
    return document


def test_a_failure_is_one_json_line() -> None:
    document = _logged(UnavailableError("bucket away", hint="wait"), logging.ERROR, retry_in_s=1.5)
    assert document["message"] == "PUT key\nfailed"
    assert (document["error"], document["cause"]) == ("UnavailableError", "bucket away; wait")
    assert document["retry_in_s"] == 1.5 and document["level"] == "error"
    assert "trace" not in document
    assert "trace" in _logged(ValueError("bug"), logging.CRITICAL)


def test_progress_says_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with (
        caplog.at_level(logging.INFO),
        Progress(
            "backfill", 100 << 20, is_terminal=False, clock=Clock(monotonic_s=lambda: now[0])
        ) as progress,
    ):
        now[0] = 5.0
        progress.update(10 << 20, 100 << 20)
        assert not caplog.messages
        now[0] = 10.0
        progress.update(20 << 20, 100 << 20)
    assert caplog.messages == ["backfill 20% 20.0 of 100.0 MiB, 2.0 MiB/s, 40 s left"]
