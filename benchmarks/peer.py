"""The Java peer, RocketMQ's own tiered store, run by its harness when there is one.

The harness is a directory with ``run_baseline.sh STORE TOPICS QUEUES COUNT SIZE STEPS`` that prints results
as JSON lines; jars come from the cache the integration tests fill. Owns calling it and reading its answer.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import note
from benchmarks.stores import BenchStore, StoreProfile

PEER_VERSION = "5.3.3"


@dataclass(frozen=True)
class PeerResult:
    """One dispatch of a whole store by the peer, key index on; the start of its JVM is not counted."""

    messages: int
    register_s: float
    """Making its files for every queue."""
    dispatch_s: float
    """Until all messages are committed; its index threads may still be busy."""
    with_index_s: float
    cpu_us_per_message: float
    """Registration and index included."""
    peak_rss_bytes: int
    others_cores: float
    metadata_mb: float

    @property
    def messages_per_s(self) -> float:
        """Until the last commit, without queued index work."""
        return self.messages / (self.register_s + self.dispatch_s)

    @property
    def messages_per_s_with_index(self) -> float:
        """Until its index threads have nothing left to do; without the compaction of its index at shutdown."""
        return self.messages / (self.register_s + self.with_index_s)


@dataclass(frozen=True)
class Peer:
    """Where the harness, its jars (one directory a version) and a directory for its classes are."""

    harness: Path
    jars: Path
    work: Path

    def missing(self) -> str:
        """Why it cannot run, or ""."""
        if not (self.harness / "run_baseline.sh").is_file():
            return f"no run_baseline.sh in {self.harness}"
        if not (self.jars / PEER_VERSION).is_dir():
            return f"no jars of {PEER_VERSION} in {self.jars}"
        return "" if shutil.which("javac") else "no javac"

    def make_store(self, path: Path, profile: StoreProfile) -> None:
        """Write a store with the real DefaultMessageStore, JSON bodies."""
        self._run(path, profile, "build")

    def dispatch(self, store: BenchStore, *, tuned: bool = True) -> PeerResult:
        """Ship ``store`` with the peer; what it wrote is deleted."""
        tier = self.work / "tier"
        try:
            rows = self._run(store.path, store.profile, "tuned" if tuned else "dispatch", tier=tier)
        finally:
            for left in self.work.glob("tier*"):
                shutil.rmtree(left, ignore_errors=True)
        (row,) = [row for row in rows if row["op"] == "dispatch"]
        if not row["complete"]:
            raise RuntimeError(f"the peer did not finish: {row}")
        return parse_dispatch(row)

    def _run(
        self, path: Path, profile: StoreProfile, steps: str, *, tier: Path | None = None
    ) -> list[dict[str, object]]:
        self.work.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "JARS": str(self.jars),
            "WORK": str(self.work),
            "VERSION": PEER_VERSION,
            "COMPRESSIBLE": "1",
            "OUT": str(self.work / "peer.jsonl"),
        }
        if tier is not None:
            environment["TIER"] = str(tier)
        numbers = (profile.topics, profile.queues_per_topic, profile.messages, profile.body_bytes)
        done = subprocess.run(
            ["bash", str(self.harness / "run_baseline.sh"), str(path), *map(str, numbers), steps],
            env=environment,
            cwd=self.work,
            stdout=subprocess.PIPE,
            check=True,
        )
        return [json.loads(line) for line in done.stdout.decode("utf-8").splitlines() if line.startswith("{")]


def peer_at(harness: Path | None, jars: Path, work: Path) -> Peer | None:
    """The peer of ``harness``; None, with a note, if there is none or a requirement is missing."""
    if harness is None:
        return None
    peer = Peer(harness.resolve(), jars.resolve(), (work / "peer-work").resolve())
    if missing := peer.missing():
        note(f"without the peer: {missing}")
        return None
    return peer


def parse_dispatch(row: dict[str, object]) -> PeerResult:
    """One RESULT line of a dispatch."""

    def number(name: str) -> float:
        return float(str(row[name]))

    messages = int(number("messages"))
    cpu_s = number("registerCpuSec") + number("withIndexCpuSec")
    return PeerResult(
        messages=messages,
        register_s=number("registerSec"),
        dispatch_s=number("dispatchSec"),
        with_index_s=number("withIndexSec"),
        cpu_us_per_message=cpu_s * 1e6 / messages,
        peak_rss_bytes=int(number("peakRssMB")) << 20,
        others_cores=number("othersCores"),
        metadata_mb=number("metaMBWritten") + number("registerMetaMB"),
    )
