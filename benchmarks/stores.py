"""The stores of the benchmarks: their profiles, and how each is created once.

Owns names, sizes and the note of what a store holds (``bench.properties``, which the Java peer's harness
reads too). Does not own record bytes (synthetic_store.py) nor the peer (peer.py), which makes stores by
the real ``DefaultMessageStore``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.synthetic_store import StoreSpec, write_store

PEER_QUEUES_MAX = 2_000
"""The Java peer is not measured with more."""
PROPERTIES_NAME = "bench.properties"
SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class StoreProfile:
    """One input: ``messages`` of ``body_bytes`` over ``topics`` × ``queues_per_topic``."""

    name: str
    messages: int
    body_bytes: int
    topics: int
    queues_per_topic: int
    twin: str = ""
    """The store of the same size in 16 queues it is compared with."""

    @property
    def queues(self) -> int:
        """All queues of all topics."""
        return self.topics * self.queues_per_topic

    def scaled(self, factor: float) -> StoreProfile:
        """The same shape with fewer (or more) messages."""
        return StoreProfile(
            self.name,
            max(1, round(self.messages * factor)),
            self.body_bytes,
            self.topics,
            self.queues_per_topic,
            self.twin,
        )


PROFILES = {
    profile.name: profile
    for profile in (
        StoreProfile("A", 2_000_000, 256, 4, 4),
        StoreProfile("B", 500_000, 1024, 4, 4),
        StoreProfile("C", 200_000, 1024, 500, 4),
        StoreProfile("D", 2_000_000, 256, 2_500, 4, twin="A"),
        StoreProfile("E", 500_000, 1024, 2_500, 4, twin="B"),
        StoreProfile("F", 2_000_000, 256, 2_500, 40, twin="A"),
        StoreProfile("L", 8_900_000, 1024, 4, 4),
    )
}
"""A, B, C: compared with the Java peer; D, E: 10,000 queues; F: 100,000; L: 10 GiB, for memory and page cache."""


@dataclass(frozen=True)
class BenchStore:
    """A store that is there. ``log_bytes`` ends at the last record."""

    profile: StoreProfile
    path: Path
    log_bytes: int
    made_by: str


StoreMaker = Callable[[Path, StoreProfile], None]


def ensure_store(directory: Path, profile: StoreProfile, make: StoreMaker | None = None) -> BenchStore:
    """The store of ``profile`` below ``directory``, made unless it is there (default: by our own writer)."""
    maker = SYNTHETIC if make is None else "peer"
    path = directory / f"{profile.name}-{profile.messages}-{maker}"
    if not (path / PROPERTIES_NAME).exists():
        if path.exists():
            raise FileExistsError(f"{path} is an unfinished store: delete it")
        (make or make_synthetic)(path, profile)
    return BenchStore(profile, path, int(read_properties(path)["bytes"]), maker)


def make_synthetic(path: Path, profile: StoreProfile) -> None:
    """Write the store with our own generator."""
    spec = StoreSpec(profile.topics, profile.queues_per_topic, profile.body_bytes)
    totals = write_store(path, spec, messages=profile.messages)
    properties = {
        "topics": profile.topics,
        "queues": profile.queues_per_topic,
        "count": totals.messages,
        "size": profile.body_bytes,
        "bytes": totals.end_phys,
        "first": spec.start_ms,
        "last": totals.last_store_timestamp_ms,
    }
    text = "".join(f"{name}={value}\n" for name, value in properties.items())
    (path / PROPERTIES_NAME).write_text(text, "ascii")


def read_properties(path: Path) -> dict[str, str]:
    """What the store's maker wrote down about it."""
    lines = (path / PROPERTIES_NAME).read_text("ascii").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
