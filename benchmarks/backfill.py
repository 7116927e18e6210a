"""Measures ``tiered backfill`` of one store into one target as a whole process.

Owns the command line and the figures (wall, CPU, memory, page cache, requests, objects); report.py evaluates them.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.archive_targets import ArchiveTarget, StoredObjects
from benchmarks.machine import ChildRun, hot_control_file, log_files, resident_bytes, run_child
from benchmarks.stores import BenchStore

TIERED = Path(sys.executable).parent / "tiered"
NAMES = ["--cluster", "BenchCluster", "--broker", "bench-a"]


class BackfillFailedError(RuntimeError):
    """The archiver or the verification of its output failed."""


@dataclass(frozen=True)
class BackfillResult:
    """One whole run."""

    run: ChildRun
    stored: StoredObjects
    requests: dict[str, int] | None
    resident_before_bytes: int
    resident_after_bytes: int
    """The store's commitlog in the page cache."""
    control_kept: float
    """Share of an unused hot file that is still in the page cache afterwards: some kernels reclaim idle pages."""

    @property
    def memory_growth(self) -> float:
        """Peak of the second half of the run over the peak of the first: 1.0 is flat."""
        samples = self.run.rss_samples
        middle_s = self.run.wall_s / 2
        early = max((rss for at, rss in samples if at <= middle_s), default=0)
        late = max((rss for at, rss in samples if at > middle_s), default=0)
        return late / early if early else 0.0


def run_backfill(
    store: BenchStore, target: ArchiveTarget, work: Path, settings: Sequence[str] = ()
) -> BackfillResult:
    """Archive ``store`` into ``target``, with ``settings`` as ``--set`` takes them.

    Raises BackfillFailedError with the program's output.
    """
    files = log_files(store.path)
    control = hot_control_file(work / "control")
    before, control_before = resident_bytes(files), resident_bytes([control])
    requests_before = target.requests()
    child = _run(
        ["backfill", str(store.path), target.url, *NAMES, *(f"--set={setting}" for setting in settings)],
        target,
        work,
    )
    requests_after = target.requests()
    requests = None
    if requests_before is not None and requests_after is not None:
        served = {name: count - requests_before.get(name, 0) for name, count in requests_after.items()}
        requests = {name: count for name, count in served.items() if count}
    after, control_kept = resident_bytes(files), resident_bytes([control]) / control_before
    return BackfillResult(child, target.stored(), requests, before, after, control_kept)


def verify(target: ArchiveTarget, work: Path) -> ChildRun:
    """``tiered verify --full --strict``: every checksum, contiguity, no leftovers."""
    return _run(["verify", target.url, "--full", "--strict", *NAMES], target, work)


def _run(arguments: list[str], target: ArchiveTarget, work: Path) -> ChildRun:
    command = [str(TIERED), *arguments, *target.arguments]
    environment = {**target.environment, "XDG_STATE_HOME": str(work / "state")}
    child = run_child(
        command, environment=environment, friends=target.server_pids, bytecode_cache=work / "pycache"
    )
    if child.exit_code != 0:
        raise BackfillFailedError(f"{' '.join(command)}: exit code {child.exit_code}\n{child.output[-4000:]}")
    return child
