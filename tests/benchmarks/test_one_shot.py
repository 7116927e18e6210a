"""The benchmark of one-shot commands runs, and says so when a command is too slow."""

import json
from pathlib import Path

import pytest

from benchmarks import one_shot


@pytest.mark.parametrize(
    ("limit_s", "code"),
    [pytest.param(60.0, 0, marks=pytest.mark.soak), pytest.param(0.0, 1, marks=pytest.mark.integration)],
)
def test_it_writes_a_line_a_command_and_judges_it(
    limit_s: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_shot, "WALL_S_MAX", limit_s)
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.argv", ["one_shot", "--runs", "1", "--out", str(out)])
    assert one_shot.main() == code
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert {"tiered cat", "tiered offset", "tiered query, key"} < {row["what"] for row in rows}
    assert all(row["wall_s"] > 0 and row["ok"] == (code == 0) for row in rows)
