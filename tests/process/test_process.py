"""`tiered run` as a process: ready, asked, refused twice, reloaded, drained, killed and started again."""

import json
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rocketmq_tiered.process.instance import running_instance
from tests.broker_store.unprivileged import run_unprivileged
from tests.process.sidecar import ROOT, TIERED, TIMEOUT_S, Sidecar
from tiered.broker_store.pins import PinLimits, measure_disk

pytestmark = pytest.mark.integration

MESSAGES = 18_004


def _command(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*TIERED, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _archived_messages(home: Path) -> int:
    listed = _command("ls", f"file://{home}/archive", "--json")
    return sum(queue["messages"] for queue in json.loads(listed.stdout)["queues"])


def test_follow_answer_drain_and_continue(home: Path) -> None:
    with Sidecar(home) as sidecar:
        sidecar.wait_archived()
        assert sidecar.get("/ready")[0] == 200
        assert sidecar.get("/health")[0] == 200
        metrics = sidecar.get("/metrics")[1]
        assert "rocketmq_tiered_store_messages_dispatch_total{" in metrics and f" {MESSAGES}.0" in metrics
        assert "rocketmq_tiered_store_provider_upload_bytes_sum" in metrics
        exported = re.findall(r"^# HELP rocketmq_tiered_store_(\w+)", metrics, re.MULTILINE)
        documented = (Path(__file__).parents[2] / "docs" / "METRICS.md").read_text("utf-8")
        assert not [name for name in exported if f"| `{name}` |" not in documented]
        asked = _command("status", "--state-dir", sidecar.state_dir)
        assert asked.returncode == 0 and "following" in asked.stdout and "0 messages" in asked.stdout

        assert Sidecar(home).process.wait(TIMEOUT_S) == 2
        assert "another instance uses" in sidecar.log.read_text()

        assert sidecar.end(signal.SIGTERM) == 0
    assert _archived_messages(home) == MESSAGES
    assert _command("status", "--state-dir", home / "state").returncode == 3
    with Sidecar(home) as again:
        again.wait_archived()
        assert again.report()["messages"] == 0, "a second run uploads nothing"
        assert again.end(signal.SIGINT) == 0


def _modes(directory: Path, but: Collection[str] = ()) -> set[str]:
    """Kind and mode of everything below and including ``directory``, except files of these names."""
    found = [directory, *(path for path in directory.rglob("*") if path.name not in but)]
    return {stat.filemode(path.stat().st_mode) for path in found}


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


PRIVATE = {"drwx------", "-rw-------"}


def test_no_other_user_reads_what_run_and_serve_write(home: Path, no_umask: None) -> None:
    log = home / "store" / "commitlog"
    brokers = {path.name: path.stat() for path in log.iterdir()}
    with Sidecar(home) as sidecar:
        sidecar.wait_archived()
        assert "Umask:\t0077" in Path(f"/proc/{sidecar.process.pid}/status").read_text()
        assert _modes(sidecar.state_dir, but=brokers) == PRIVATE == _modes(home / "archive")
        deadline_s, pins = time.monotonic() + 20, dict[str, os.stat_result]()
        # A fuller disk has no pins.
        is_roomy = measure_disk(home).used_ratio <= PinLimits().create_below_ratio
        while is_roomy and not pins:  # the first are made within seconds
            assert time.monotonic() < deadline_s, "nothing was pinned"
            time.sleep(0.1)
            pins = {
                path.name: path.stat()
                for path in (sidecar.state_dir / "pins").glob("*")
                if path.name in brokers
            }
        for name, pin in pins.items():
            was = brokers[name]
            assert (pin.st_ino, pin.st_mode, pin.st_uid) == (was.st_ino, was.st_mode, was.st_uid)

        def attack() -> str:
            for path in (
                sidecar.state_dir / "lock",
                home / "archive",
                *(sidecar.state_dir / "pins" / n for n in pins),
            ):
                with pytest.raises(PermissionError):
                    os.open(path, os.O_RDONLY)
            return "locked out"

        assert run_unprivileged(attack, home) == "locked out"
        assert sidecar.end(signal.SIGTERM) == 0
    served = subprocess.Popen(
        [
            *TIERED,
            "serve",
            f"file://{home}/archive",
            "--bind",
            "127.0.0.1:0",
            "--set",
            "admin.port=0",
            "--set",
            f"fetch.disk_cache_path={home}/cache",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    with served:
        assert served.stderr is not None
        assert any(line.startswith("serving ") for line in served.stderr)
        assert "Umask:\t0077" in Path(f"/proc/{served.pid}/status").read_text()
        served.terminate()
    assert list((home / "archive").rglob("state/serve/*")), "group offsets"
    assert _modes(home / "archive") == PRIVATE and _modes(home / "cache") == {"drwx------"}


def test_an_archive_that_others_read(home: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    given = ("--set", f"broker.conf_path={home}/broker.conf", "--set", "object_store.file_readers=all")
    code, _, problem = run("backfill", home / "store", f"file://{home}/shared", *given)
    assert code == 0, problem
    assert _modes(home / "shared") == {"drwxr-xr-x", "-rw-r--r--"}
    (home / "after").touch()
    assert stat.S_IMODE((home / "after").stat().st_mode) == 0o644, "the umask of this program is its own"


def test_killed_and_started_again(home: Path) -> None:
    with Sidecar(home) as sidecar:
        sidecar.wait_archived()
        epoch = sidecar.report()["epoch"]
        assert sidecar.end(signal.SIGKILL) == -signal.SIGKILL
    with Sidecar(home) as again:
        again.wait_archived()
        assert again.report()["epoch"] > epoch, "the same instance needs no permission to continue"
    assert _archived_messages(home) == MESSAGES


def test_another_instance_stands_by_or_exits_with_5(home: Path) -> None:
    with Sidecar(home) as owner:
        owner.wait_archived()
        with Sidecar(home, name="other") as standby:
            standby.wait_until(lambda: standby.state_dir.exists() and "standby" in standby.log.read_text())
            code, text = standby.get("/ready")
            assert code == 503 and "epoch 1, which has not released it; this process takes over" in text
            assert standby.get("/health")[0] == 200
            report = standby.report()
            assert (report["state"], report["lagMessages"]) == ("standby", 0)
            labels = 'state="standby",storage_medium="blob",storage_type="tiered"'
            assert f"store_state{{{labels}}} 1.0" in standby.get("/metrics")[1]
            assert standby.end(signal.SIGTERM) == 0
        assert Sidecar(home, "--set", "process.when_fenced=exit", name="third").process.wait(TIMEOUT_S) == 5
        assert owner.get("/ready")[0] == 200


def test_a_reload_with_a_wrong_file_changes_nothing_and_a_right_one_applies(home: Path) -> None:
    config = home / "tiered.toml"
    config.write_text("")
    with Sidecar(home, "--config", str(config)) as sidecar:
        sidecar.wait_archived()
        config.write_text("[offload]\nbatch_byte = 1\n")
        sidecar.process.send_signal(signal.SIGHUP)
        sidecar.wait_until(lambda: "previous ones stay" in sidecar.log.read_text())
        assert sidecar.get("/ready")[0] == 200
        config.write_text('[topics]\nexclude = ["t_k_one"]\n')
        sidecar.process.send_signal(signal.SIGHUP)
        sidecar.wait_until(lambda: sidecar.report().get("epoch", 0) == 2)
        assert sidecar.end(signal.SIGTERM) == 0
        refused = [
            line
            for line in sidecar.lines()
            if line["message"]
            == "settings not reloaded, the previous ones stay in force: correct them and send SIGHUP again"
        ]
        assert "offload.batch_byte" in refused[0]["cause"] and refused[0]["error"] == "UsageError"


def test_an_admin_port_in_use_is_one_line_and_exit_2(home: Path) -> None:
    with Sidecar(home) as sidecar:
        sidecar.wait_archived()
        port = urlsplit(running_instance(sidecar.state_dir).admin_url).port
        other = Sidecar(home, "--set", f"admin.port={port}", name="other")
        assert other.process.wait(TIMEOUT_S) == 2
        assert "cannot listen" in other.log.read_text()


@pytest.mark.integration
def test_idle_costs_nearly_nothing_and_no_request(home: Path) -> None:
    def requests(text: str) -> float:
        counts = [line for line in text.splitlines() if "provider_rpc_latency_count" in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in counts)

    with Sidecar(home) as sidecar:
        sidecar.wait_archived()
        time.sleep(7)  # the broker's tables are archived in the first seconds
        asked = requests(sidecar.get("/metrics")[1])
        stat = Path(f"/proc/{sidecar.process.pid}/stat")
        ticks = os.sysconf("SC_CLK_TCK")
        before_s, began_s = sum(map(int, stat.read_text().split()[13:15])) / ticks, time.monotonic()
        time.sleep(10)
        spent_s = sum(map(int, stat.read_text().split()[13:15])) / ticks - before_s
        share = spent_s / (time.monotonic() - began_s)
        assert requests(sidecar.get("/metrics")[1]) == asked
        assert share <= 0.01, f"{share:.1%} of a core while idle"


def test_files_that_a_stopped_broker_preallocated_hold_up_no_task(home: Path) -> None:
    last = max((home / "store" / "commitlog").iterdir())
    size_bytes = last.stat().st_size
    with last.with_name(f"{int(last.name) + size_bytes:020d}").open("wb") as file:
        file.truncate(size_bytes)
    with Sidecar(
        home, "--set", "compaction.every_ms=100", "--set", f"offload.batch_bytes={size_bytes // 8}"
    ) as sidecar:
        sidecar.wait_archived()
        sidecar.wait_until(lambda: sidecar.report()["compaction"]["level"] == "full")


def test_status_exits_with_1_in_trouble(home: Path) -> None:
    with Sidecar(home) as sidecar:
        sidecar.wait_archived()
        (home / "store").rename(home / "unmounted")
        sidecar.wait_until(lambda: sidecar.get("/ready")[0] != 200)
        asked = _command("status", "--state-dir", sidecar.state_dir)
        assert asked.returncode == 1 and "blocked" in asked.stdout
