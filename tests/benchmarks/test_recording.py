"""What a benchmark writes down, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import recording
from benchmarks.recording import record
from benchmarks.report import Row


def _table(summaries: Sequence[Row]) -> str:
    return f"{len(summaries)} summaries"


@pytest.mark.parametrize("missed", [[], ["rate"]])
def test_rows_summaries_and_the_verdict(
    tmp_path: Path, missed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([0.4, 1.5])
    monkeypatch.setattr(recording.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    out = tmp_path / "out.jsonl"
    out.write_text('{"of": "the run before"}\n')
    rows: list[Row] = [{"n": 1, "requests": {"PutObject": 3}}, {"n": 2}]

    def summarize(measured: Sequence[Row]) -> list[Row]:
        return [{"sum": sum(row["n"] for row in measured), "missed": missed}]

    assert record(out, rows, summarize, _table, quiet=("requests",)) == len(missed)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    first, second = rows[0] | {"load": 0.4}, rows[1] | {"load": 1.5, "busy": True}
    assert lines == [{"of": "the run before"}, first, second, {"sum": 3, "missed": missed}]
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "1 summaries",
        "1 of 2 figures were measured on a busy machine (load above 1)",
    ]
    assert [json.loads(line) for line in shown.err.splitlines()] == [{"n": 1, "load": 0.4}, second]
