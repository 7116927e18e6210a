"""What commands print, wherever they print it to."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("call", ["print_json", "print_json_line"])
def test_json_is_utf_8_whatever_the_terminal_takes(call: str) -> None:
    script = f"import sys; from tiered.console import {call}; {call}({{'key': '日志 ü'}})"
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", script],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": "latin-1"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert '"日志 ü"'.encode() in done.stdout
