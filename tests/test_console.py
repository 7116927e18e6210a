"""What commands print, wherever they print it to."""

import json
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from tiered.console import counted, escaped_json, print_json, print_json_line, printable, time_text

HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories: control, format (bidirectional too), surrogate, line and paragraph separator."""


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


def test_characters_that_act_on_a_terminal_are_escaped_in_text() -> None:
    hidden = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in HIDDEN]
    for character in hidden:
        escaped = printable(f"a{character}b")
        assert escaped.startswith("a\\") and escaped.isascii() and escaped.endswith("b"), hex(ord(character))
    assert printable("日志 größer\u00a0’ \\ 🎉") == "日志 größer\u00a0’ \\ 🎉"
    assert printable("\x1b\x9b\u202e\U000e0041\udcff") == r"\x1b\x9b\u202e\U000e0041\udcff"


def test_json_escapes_the_same_characters_and_keeps_values() -> None:
    text = "".join(
        chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in HIDDEN - {"Cs"}
    )
    data = escaped_json(orjson.dumps({"日志": text}))
    assert json.loads(data) == {"日志": text}
    assert not HIDDEN & {unicodedata.category(character) for character in data.decode()}


def test_counts_have_their_number() -> None:
    assert [counted(count, "gap") for count in (0, 1, 1.4, 1_234)] == [
        "0 gaps",
        "1 gap",
        "1 gap",
        "1,234 gaps",
    ]
