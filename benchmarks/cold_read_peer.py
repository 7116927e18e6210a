"""The Java peer reads back what it archived: its own benchmark program, one JVM for each way of reading.

Owns the commands and reading the answers. The harness, its jars and its store are those of peer.py.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cold_read_parts import drop_directory
from benchmarks.peer import PEER_VERSION, Peer
from benchmarks.report import Row
from benchmarks.stores import BenchStore

HEAP = ("-Xms1g", "-Xmx4g", "-XX:+UseG1GC")
CACHE_OFF = "cfg.readAheadCacheEnable=false"


@dataclass(frozen=True)
class PeerRead:
    """One way of reading: the arguments of the peer's program."""

    name: str
    arguments: tuple[str, ...]


READS = (
    PeerRead("seq-1", ("op=seq", "consumers=1")),
    PeerRead("seq-16", ("op=seq", "consumers=16")),
    PeerRead("seq-1-cache-off", ("op=seq", "consumers=1", CACHE_OFF)),
    PeerRead("seq-16-cache-off", ("op=seq", "consumers=16", CACHE_OFF)),
    PeerRead("random", ("op=random", "n=2000")),
    PeerRead("time", ("op=bytime", "n=500")),
    PeerRead("key", ("op=query", "n=500")),
)


def ship(peer: Peer, store: BenchStore, tier: Path) -> None:
    """Archive ``store`` with the peer into ``tier``, index included."""
    shutil.rmtree(tier, ignore_errors=True)
    profile = store.profile
    numbers = (profile.topics, profile.queues_per_topic, profile.messages, profile.body_bytes)
    environment = {
        **os.environ,
        "JARS": str(peer.jars),
        "WORK": str(peer.work),
        "VERSION": PEER_VERSION,
        "COMPRESSIBLE": "1",
        "OUT": str(peer.work / "peer.jsonl"),
        "TIER": str(tier),
    }
    peer.work.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["bash", str(peer.harness / "run_baseline.sh"), str(store.path), *map(str, numbers), "dispatch"],
        env=environment,
        cwd=peer.work,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    shutil.rmtree(tier / "state" / "tiered_index_file", ignore_errors=True)


def reads(peer: Peer, store: BenchStore, tier: Path, wanted: tuple[PeerRead, ...] = READS) -> Iterator[Row]:
    """One row for each way of reading, the page cache of its files dropped before."""
    command = [
        "java",
        *HEAP,
        f"-Drmq.logback.configurationFile={peer.harness / 'conf' / 'logback.xml'}",
        "-Dbench.level=ERROR",
        "-cp",
        f"{peer.work / f'classes-{PEER_VERSION}'}:{peer.jars / PEER_VERSION}/*",
        "TierBench",
        "read",
        f"store={store.path}",
        f"tier={tier}",
    ]
    for read in wanted:
        drop_directory(tier)
        done = subprocess.run(
            [*command, *read.arguments], cwd=peer.work, stdout=subprocess.PIPE, check=True, text=True
        )
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        yield {"what": "peer", "read": read.name, **parse(json.loads(line.removeprefix("RESULT ")))}


def parse(result: Row) -> Row:
    """The figures compared with ours, under our names."""
    row: Row = {
        "messages": result["messages"],
        "wrong": result["wrong"],
        "messages_per_s": result["msgPerSec"],
        "mb_per_s": result["MBPerSec"],
        "cpu_us_per_message": result["cpuUsPerMsg"],
        "peak_rss_mib": result["peakRssMB"],
        "others_cores": result["othersCores"],
    }
    for name, value in result.items():
        for rank in (50, 99):
            if name.endswith(f"P{rank}ms"):
                row[f"p{rank}_ms"] = value
    return row
