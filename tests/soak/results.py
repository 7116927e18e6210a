"""Sizes and figures of the soak tests: knobs from the environment, results as JSON lines.

Every knob defaults to the size a published claim names. Results land in ``$RESULTS_DIR`` (build/soak); the table is
made by ``python -m benchmarks.results_table``.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

FILE_NAME = "soak.jsonl"


def knob(name: str, claimed: int) -> int:
    """``$SOAK_<name>``, or the size the claim names."""
    return int(os.environ.get(f"SOAK_{name}", str(claimed)))


def publish(what: str, *, missed: list[str], **figures: Any) -> None:
    """Write one result down, then fail if a limit was ``missed``: a figure is published either way."""
    directory = Path(os.environ.get("RESULTS_DIR", "build/soak"))
    directory.mkdir(parents=True, exist_ok=True)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    row = {"what": what, "at": at, "ok": not missed, "missed": missed, **figures}
    with (directory / FILE_NAME).open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
    assert not missed, f"{what}: {'; '.join(missed)}: {row}"


def limits(**conditions: bool) -> list[str]:
    """Names of the conditions that do not hold."""
    return [name.replace("_", " ") for name, holds in conditions.items() if not holds]
