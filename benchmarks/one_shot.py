"""Duration of one-shot commands, start-up included: ``python -m benchmarks.one_shot --out results.jsonl``.

A real broker's store of ``examples/`` becomes an archive in a directory; then every command runs as a process of its
own, so often, beside a bare interpreter and one that imports numpy. One JSON line a command. Owns this one experiment.
"""

import argparse
import json
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zstandard

from benchmarks.machine import ChildRun, run_child
from benchmarks.recording import loaded
from benchmarks.report import Row

PACK = Path(__file__).parents[1] / "examples" / "F-533-sigkill.tar.zst"
WALL_S_MAX = 0.7


def main() -> int:
    """Measure; returns 1 when a command takes longer than the limit in the median."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_shot", description=main.__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("one_shot.jsonl"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        message = _archive(directory)
        commands = _commands(directory, message)
        rows = [_measure(what, command, options.runs, directory) for what, command in commands]
    with options.out.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(loaded(row)) + "\n" for row in rows)
    for row in rows:
        verdict = "" if row["ok"] else f"  MISSED (at most {WALL_S_MAX} s)"
        print(
            f"{row['what']:20}{row['wall_s']:6.2f} s{row['cpu_s']:7.2f} core s{row['peak_mib']:6} MiB{verdict}"
        )
    return int(not all(row["ok"] for row in rows))


def _archive(directory: Path) -> Row:
    """Archive the example into ``directory``/archive; one of its messages."""
    with (
        PACK.open("rb") as packed,
        zstandard.ZstdDecompressor().stream_reader(packed) as stream,
        tarfile.open(fileobj=stream, mode="r|") as tar,
    ):
        tar.extractall(directory, filter="data")
    [home] = directory.iterdir()
    conf = ["--broker-conf", str(home / "broker.conf")]
    _run([*_TIERED, "backfill", str(home / "store"), _url(directory), *conf], directory)
    line = _run([*_TIERED, "cat", _url(directory), "--all", "--limit", "1"], directory).output
    message: Row = json.loads(line.splitlines()[0])
    return message


_TIERED = (sys.executable, "-m", "rocketmq_tiered.cli")


def _url(directory: Path) -> str:
    return f"file://{directory / 'archive'}"


def _commands(directory: Path, message: Row) -> list[tuple[str, Sequence[str]]]:
    url, topic, queue = _url(directory), str(message["topic"]), str(message["queueId"])
    day = ["--time", str(message["storeTimestamp"])]
    return [
        ("python", [sys.executable, "-c", "pass"]),
        ("numpy", [sys.executable, "-c", "import numpy"]),
        ("tiered ls", [*_TIERED, "ls", url]),
        ("tiered cat", [*_TIERED, "cat", url, topic, "--queue", queue, "--limit", "1"]),
        ("tiered offset", [*_TIERED, "offset", url, topic, "--queue", queue, *day]),
        ("tiered query, id", [*_TIERED, "query", url, "--id", str(message["offsetMsgId"])]),
        (
            "tiered query, key",
            [*_TIERED, "query", url, "--topic", topic, "--unique-key", str(message["uniqKey"])],
        ),
    ]


def _run(command: Sequence[str], directory: Path) -> ChildRun:
    """Modules are compiled once, as those of an installed program are."""
    done = run_child(command, bytecode_cache=directory / "pycache")
    if done.exit_code != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.exit_code}: {done.output[-500:]}")
    return done


def _measure(what: str, command: Sequence[str], runs: int, directory: Path) -> Row:
    _run(command, directory)  # compiles
    done = [_run(command, directory) for _ in range(runs)]
    wall_s = statistics.median(run.wall_s for run in done)
    return {
        "what": what,
        "runs": runs,
        "wall_s": round(wall_s, 3),
        "cpu_s": round(statistics.median(run.cpu_s for run in done), 3),
        "peak_mib": max(run.peak_rss_bytes for run in done) >> 20,
        "others_cores": max(run.others_cores for run in done),
        "wall_s_max": WALL_S_MAX,
        "ok": wall_s <= WALL_S_MAX,
    }


if __name__ == "__main__":
    sys.exit(main())
