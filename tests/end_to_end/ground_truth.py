"""What a real broker said is in its queues, and the comparison of an archive with it, byte for byte."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from tiered.broker_store.commit_log import CommitLog
from tiered.model.queue import TopicFilter

TRUTH_OF_ROUND = {"H": "after2", "H2": "after2"}


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a zstd-packed JSON lines file."""
    with zstandard.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


@dataclass
class GroundTruth:
    """Messages by queue, in offset order; system topics and COMPACTION topics left aside."""

    queues: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)
    compaction_topics: set[str] = field(default_factory=set)
    unstable_topics: set[str] = field(default_factory=set)

    @property
    def messages(self) -> int:
        """Messages to be found in the archive."""
        return sum(len(lines) for lines in self.queues.values())


def load_truth(directory: Path, name: str, topic_filter: TopicFilter) -> GroundTruth:
    """The truth of one unpacked store."""
    truth_dir = directory / "truth"
    if name in TRUTH_OF_ROUND:
        truth_dir /= TRUTH_OF_ROUND[name]
    truth = GroundTruth()
    for line in read_jsonl(truth_dir / "topics.jsonl.zst"):
        if "COMPACTION" in json.dumps(line):
            truth.compaction_topics.add(line["topic"])
    for line in read_jsonl(truth_dir / "messages.jsonl.zst"):
        topic = line["topic"]
        if topic_filter.admits(topic) and topic not in truth.compaction_topics:
            truth.queues.setdefault((topic, line["queueId"]), []).append(line)
    return truth


def difference(record: bytes, line: dict[str, Any], log: CommitLog) -> str:
    """Empty when ``record`` is the one the broker delivered; ``log`` is its own commitlog."""
    if len(record) != line["storeSize"]:
        return f"{len(record)} bytes, not {line['storeSize']}"
    if "recCrc32" in line:
        crc = zlib.crc32(record)
        return "" if crc == line["recCrc32"] else f"CRC {crc}, not {line['recCrc32']}"
    # The slim truth has no checksum: the bytes at the physical offset it names are what was delivered.
    stored = log.read(line["commitLogOffset"], line["storeSize"])
    return "" if record == stored else "bytes differ from the commitlog"
