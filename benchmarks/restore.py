"""`tiered restore` beside its floor: ``python -m benchmarks.restore --profile B --scale 3 --out restore.jsonl``.

The floor is reading all objects and writing as many bytes as the restored log has, with fsync, and nothing else. Owns
the figures and their limits.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.archive_targets import open_target
from benchmarks.backfill import NAMES, TIERED, run_backfill
from benchmarks.machine import run_child
from benchmarks.recording import record
from benchmarks.report import MIB, Row
from benchmarks.stores import PROFILES, ensure_store
from tiered.object_store.open_store import open_store

SHARE_MIN, RSS_BYTES_MAX = 0.6, 512 * MIB
FLOOR_BYTES = 16 * MIB


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restore", description=main.__doc__)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="B")
    parser.add_argument("--scale", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", default="file", help="file or minio")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, default=Path("restore.jsonl"))
    options = parser.parse_args(arguments)
    return record(options.out, measured(options), summarize, _table)


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each round: the floor, then the command."""
    work: Path = options.work
    store = ensure_store(work / "stores", PROFILES[options.profile].scaled(options.scale))
    with open_target(options.target, work) as target:
        run_backfill(store, target, work)
        file_bytes = max(path.stat().st_size for path in (store.path / "commitlog").iterdir())
        conf = work / "broker.conf"
        conf.write_text(f"mappedFileSizeCommitLog={file_bytes}\n")
        for _ in range(options.rounds):
            floor_s = _floor_s(target.url, store.log_bytes, work / "floor")
            restored = work / "restored"
            command = [str(TIERED), "restore", target.url, str(restored), *NAMES, "--broker-conf", str(conf)]
            child = run_child(
                [*command, *target.arguments],
                environment=target.environment,
                friends=target.server_pids,
                bytecode_cache=work / "pycache",
            )
            shutil.rmtree(restored, ignore_errors=True)
            if child.exit_code:
                raise RuntimeError(child.output[-3000:])
            yield {
                "log_bytes": store.log_bytes,
                "floor_s": floor_s,
                "restore_s": child.wall_s,
                "cpu_s": child.cpu_s,
                "peak_rss_bytes": child.peak_rss_bytes,
                "others_cores": child.others_cores,
            }


def _floor_s(url: str, log_bytes: int, directory: Path) -> float:
    archive = open_store(url)
    directory.mkdir(parents=True)
    begun_s = time.perf_counter()
    for info in archive.list(""):
        archive.get(info.key, 1 << 40)
    data = os.urandom(FLOOR_BYTES)
    with (directory / "log").open("wb") as file:
        for _ in range(0, log_bytes, FLOOR_BYTES):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    elapsed_s = time.perf_counter() - begun_s
    shutil.rmtree(directory)
    archive.close()
    return elapsed_s


def summarize(rows: Sequence[Row]) -> list[Row]:
    """The median share of the floor's speed, and the limits it misses."""
    share = median(row["floor_s"] / row["restore_s"] for row in rows)
    rss = max(row["peak_rss_bytes"] for row in rows)
    missed = [name for name, bad in (("share", share < SHARE_MIN), ("rss", rss > RSS_BYTES_MAX)) if bad]
    return [{"name": "restore", "share": share, "peak_rss_bytes": rss, "missed": missed}]


def _table(summaries: Sequence[Row]) -> str:
    (found,) = summaries
    return (
        f"{found['share']:.0%} of reading and writing alone (at least {SHARE_MIN:.0%}), "
        f"{found['peak_rss_bytes'] / MIB:.0f} MiB of memory (at most {RSS_BYTES_MAX / MIB:.0f}); "
        f"missed: {', '.join(found['missed']) or 'nothing'}"
    )


if __name__ == "__main__":
    sys.exit(main())
