"""The Markdown of results: the newest counts, a missed limit is loud and is the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results_table import main

ROW = {
    "what": "idle",
    "at": "2026-01-02T03:04:05Z",
    "ok": False,
    "missed": ["cores"],
    "cores": 0.02,
    "asked": ["GET a|b"],
}


def test_a_missed_limit_is_named_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "soak.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "| result | at | limits |",
        "|---|---|---|",
        "| idle | 2026-01-02T03:04:05Z | **missed: cores** |",
        "",
        "### idle",
        "",
        "| figure | value |",
        "|---|---|",
        "| cores | 0.02 |",
        "| asked | GET a\\|b |",
    ]
    path.write_text(json.dumps({**ROW, "ok": True, "missed": []}) + "\n")
    assert main([str(path)]) == 0
    assert "| held |" in capsys.readouterr().out
