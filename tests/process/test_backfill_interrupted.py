"""Ctrl-C in `tiered backfill`: the first ends it in order, the second at once. The same command continues."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_tiered.cli import main
from tests.process.message_counts import MESSAGES

Command = list[str]

RUN = """
import signal, sys, threading, time
from rocketmq_tiered.cli import main
from rocketmq_tiered.process.uploader_job import UploaderJob
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may ignore it
offload = UploaderJob.offload
def held(job, stop, *, follow):
    print("working", file=sys.stderr, flush=True)
    {hold}
    return offload(job, stop, follow=follow)
UploaderJob.offload = held
sys.exit(main(sys.argv[1:]))
"""


def _interrupted(command: Command, hold: str, times: int) -> tuple[int, str, str]:
    """Exit code and output of the command, sent SIGINT so many times while it archives."""
    script = [sys.executable, "-c", RUN.format(hold=hold), *command]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = ""
        while "working" not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        for _ in range(times):
            os.kill(process.pid, signal.SIGINT)
            try:
                process.wait(1)
            except subprocess.TimeoutExpired:
                continue
        out, error = process.communicate(timeout=30)
    return process.returncode, out, error


@pytest.fixture
def command(real_store: Callable[[str], Path], tmp_path: Path) -> Command:
    """Archives store F."""
    store = real_store("F")
    return [
        "backfill",
        str(store / "store"),
        f"file://{tmp_path}/a",
        "--broker-conf",
        str(store / "broker.conf"),
    ]


def test_ctrl_c_ends_orderly_and_the_same_command_continues(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = _interrupted(command, "assert stop.wait(20)", times=1)
    assert (code, error) == (130, "")
    assert "interrupted; the same command continues where it stopped" in out
    assert main(command) == 0
    assert f"{MESSAGES:,} messages" in capsys.readouterr().out
    assert main(["verify", command[2], "--full", "--strict"]) == 0


def test_the_second_ctrl_c_ends_at_once(command: Command) -> None:
    code, out, error = _interrupted(command, "time.sleep(60)", times=2)
    assert (code, out) == (130, "")
    assert error == "tiered: interrupted; the same command continues where it stopped\n"
    assert main(command) == 0
    assert main(["verify", command[2], "--full", "--strict"]) == 0
