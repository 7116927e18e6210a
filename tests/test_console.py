"""What commands print, wherever they print it to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tiered.console import print_json, print_json_line, time_text


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


@pytest.mark.parametrize(("call", "lines"), [(print_json, 3), (print_json_line, 1)])
def test_what_no_utf_8_spells_is_json_all_the_same(
    call: Callable[[Any], None], lines: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    document = {"path": "/store/\udcff"}
    call(document)
    sys.stdout.flush()
    out = capfdbinary.readouterr().out
    assert json.loads(out) == document and out.count(b"\n") == lines


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [
        (0, "-"),
        (-1, "-"),
        (-(1 << 63), "-"),
        (1_700_000_000_999, "2023-11-14T22:13:20Z"),
        (253_402_300_799_999, "9999-12-31T23:59:59Z"),
        (253_402_300_800_000, "253402300800000 ms"),
        (1 << 62, "4611686018427387904 ms"),
        ((1 << 63) - 1, "9223372036854775807 ms"),
    ],
)
def test_a_time_of_any_size_is_shown(time_ms: int, text: str) -> None:
    assert time_text(time_ms) == text
