"""Reads the ground truth that lies beside a real store."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a ``.jsonl.zst`` file."""
    with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as stream:
        for line in io.TextIOWrapper(stream, "utf-8"):
            yield json.loads(line)


def truth_directories(store: Path) -> list[Path]:
    """``truth/``, or its parts where the truth was taken several times."""
    return sorted(path.parent for path in (store / "truth").rglob("messages.jsonl.zst"))


def compaction_topics(truth: Path) -> set[str]:
    """Topics whose truth is of compactionLog, not of the commitlog."""
    return {
        line["topic"]
        for line in read_lines(truth / "topics.jsonl.zst")
        if (line.get("attributes") or {}).get("cleanup.policy") == "COMPACTION"
    }


def archived_messages(truth: Path) -> Iterator[dict[str, Any]]:
    """Lines of messages.jsonl whose records are in the commitlog as they were pulled."""
    compacted = compaction_topics(truth)
    return (line for line in read_lines(truth / "messages.jsonl.zst") if line["topic"] not in compacted)
