"""The notebook-style example does what it says, on a real store's archive."""

import runpy
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

pytestmark = [pytest.mark.integration]
NOTEBOOK = Path(__file__).parents[3] / "examples" / "spark_notebook.py"


def test_the_notebook_runs_from_top_to_bottom(
    spark: SparkSession,
    small_archive: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [str(NOTEBOOK), f"file://{small_archive}", "t_one"])
    runpy.run_path(str(NOTEBOOK), run_name="__main__")
    said = capsys.readouterr().out
    (exported, nothing) = [line for line in said.splitlines() if line.startswith("exported")]
    rows = exported.split()[1]
    assert int(rows) > 100
    assert nothing == "exported 0 rows"
    assert f"read back {rows} rows" in said
    assert f"of {rows} messages" in said
