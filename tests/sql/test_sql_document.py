"""The commands and the program of docs/SQL.md, run as they stand there but for the archive's address."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

DOCUMENT = (Path(__file__).parents[2] / "docs" / "SQL.md").read_text()
COMMANDS = re.findall(r"^    (tiered .*)$", DOCUMENT, flags=re.MULTILINE)
PROGRAM, ICEBERG_PROGRAM = (
    re.sub("^    ", "", block, flags=re.MULTILINE)
    for block in re.findall(r"(?:^    .*\n|^\n)+", DOCUMENT, flags=re.MULTILINE)
    if "import " in block
)
URL = "s3://bucket/prefix"


def test_commands_run_as_they_are_written(
    run: Callable[..., tuple[int, str, str]],
    orders: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) >= 9
    for written in COMMANDS:
        command = re.sub(r" > \S+$", "", written.replace(URL, orders).replace("/tables", str(tmp_path)))
        code, out, err = run(*shlex.split(command)[1:])
        assert (code, err) == (0, ""), command
        assert out or "COPY" in command
    exec(ICEBERG_PROGRAM.replace("/tables", str(tmp_path)), {"__name__": "__main__"})
    assert capsysbinary.readouterr().out == b"200\n"


def test_the_program_runs_as_it_is_written(orders: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(PROGRAM.replace(URL, orders), {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("[('t0', 67), ('t1', 67), ('t2', 66)]\n")
