"""Sends beside scrub: ``python -m benchmarks.scrub_live --out scrub_live.jsonl``.

A broker takes messages at a steady rate; `tiered run` archives them. Scrub reads as much as its settings allow, and is
paused by turns, so that each window with it has a neighbour without. Compared are the medians of the p99 of the sends
of each second. Every pair is a JSON line, the last one the summary. Needs Java and Maven. Owns the order and the limit.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine import note
from benchmarks.recording import loaded
from benchmarks.report import Row
from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.servers.store_directory import StoreDirectory

SETTINGS = {"TIERED_SCRUB__EVERY_MS": 1000, "TIERED_SCRUB__CYCLE_MS": 60_000}
"""The shortest cycle: scrub is always behind its time, and reads at its byte rate."""
SETTLE_S = 3
"""Excluded from every window."""
RATIO_MAX = 1.1


def main() -> int:
    """Measure; returns 1 when the limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scrub_live", description=main.__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=12, help="of a window")
    parser.add_argument("--fill-seconds", type=int, default=60, help="of messages before")
    parser.add_argument("--rate", type=int, default=2_000, help="messages of 1 KiB a second")
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench-scrub-live"), help="emptied")
    parser.add_argument("--out", type=Path, default=Path("scrub_live.jsonl"))
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    try:
        rows = list(measure(options))
    finally:
        shutil.rmtree(options.work, ignore_errors=True)
    with options.out.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(loaded(row)) + "\n" for row in rows)
    print(json.dumps(rows[-1], indent=2))
    return int(not rows[-1]["ok"])


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each pair, and the summary."""
    work: Path = options.work
    gate, scene = work / "gate-scrub", Scene(settings=SETTINGS)
    load = Load(1 << 30, body_bytes=1024, per_second=options.rate)
    ratios = []
    with beside_broker(scene, work, StoreDirectory(work / "objects")) as sidecar:
        sidecar.command = (
            sys.executable,
            "-m",
            "benchmarks.gated_run",
            str(work / "gate"),
            str(work / "events"),
        )
        sidecar.start()
        sidecar.wait_until_following(120)
        with Producer(sidecar.broker, scene, load, work / "load.log") as producer:
            time.sleep(options.fill_seconds)
            for pair in range(options.pairs):
                p99_us: dict[bool, float] = {}
                for is_scrubbing in (False, True) if pair % 2 == 0 else (True, False):
                    if is_scrubbing:
                        gate.touch()
                    else:
                        gate.unlink(missing_ok=True)
                    time.sleep(SETTLE_S)
                    before = len(producer.p99_us_by_second())
                    time.sleep(options.seconds)
                    p99_us[is_scrubbing] = statistics.median(producer.p99_us_by_second()[before:])
                ratios.append(p99_us[True] / p99_us[False])
                status = sidecar.status().get("scrub") or {}
                row: Row = {
                    "what": "pair",
                    "without_us": p99_us[False],
                    "with_us": p99_us[True],
                    "scrub": status,
                }
                note(json.dumps(row))
                yield row
            sent = producer.finish(60, now=True)
    ratio = round(statistics.median(ratios), 3)
    yield {
        "what": "scrub_live",
        "ratio": ratio,
        "ratios": [round(one, 2) for one in sorted(ratios)],
        "ratio_max": RATIO_MAX,
        "acked": sent.acked,
        "failed": sent.failed,
        "ok": ratio <= RATIO_MAX,
    }


if __name__ == "__main__":
    sys.exit(main())
