"""Every command of the benchmark of many queues runs, and what misses its bound is bold."""

import json
from pathlib import Path

import pytest

from benchmarks import many_queues
from benchmarks.many_queues import summarized, table
from benchmarks.report import MIB, Row
from benchmarks.stores import StoreProfile


def a_row(what: str, profile: str, queues: int, cpu_s: float, mib: int = 100) -> Row:
    """As the benchmark measures it; twin A."""
    twin = "" if profile == "A" else "A"
    row = {"what": what, "profile": profile, "queues": queues, "twin": twin}
    return row | {"cpu_s": cpu_s, "peak_bytes": mib * MIB}


@pytest.mark.parametrize(
    ("what", "queues", "cpu_s", "missed"),
    [
        ("ls", 10_000, 3.0, False),
        ("ls", 10_000, 3.2, True),
        ("walk-1", 10_000, 6.0, False),
        ("walk-1", 10_000, 6.2, True),
        ("ls", 100_000, 5.0, False),
        ("ls", 100_000, 5.2, True),
        ("cat --all", 100_000, 12.0, False),
        ("cat --all", 100_000, 12.2, True),
    ],
)
def test_processor_time_has_bounds_by_queues(what: str, queues: int, cpu_s: float, missed: bool) -> None:
    summary = summarized([a_row(what, "A", 16, 2.0), a_row(what, "X", queues, cpu_s)])[1]
    assert summary["missed"] == ["cpu_s"] * missed
    assert summary["ratio"] == cpu_s / 2


def test_what_misses_a_bound_is_bold() -> None:
    rows = [
        a_row("ls", "A", 16, 1.0, 513),
        a_row("ls", "D", 10_000, 2.0),
        a_row("gc", "D", 10_000, 2.0),
    ]
    assert table(summarized(rows)).splitlines()[2:] == [
        "| `ls` | 1.0 s, **513 MiB** | **2.0 s, 2.0 ×**, 100 MiB |",
        "| `gc` |  | 2.0 s, 100 MiB |",
    ]


@pytest.mark.soak
def test_every_command_runs_and_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "A": StoreProfile("A", 2_000, 256, 1, 1),
        "D": StoreProfile("D", 2_000, 256, 25, 4, twin="A"),
    }
    monkeypatch.setattr(many_queues, "PROFILES", small)
    out = tmp_path / "out.jsonl"
    many_queues.main(["--profiles", "A,D", "--work", str(tmp_path), "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    measured = [row for row in rows if "ratio" not in row]
    for profile in "AD":
        own = [row["what"] for row in measured if row["profile"] == profile]
        assert own[0] == "backfill" and own[-1] == "gc" and len(own) == 16
    assert all(row["cpu_s"] > 0 and row["peak_bytes"] > 0 for row in measured)
