"""`tiered run` that compacts on command and records it: ``python -m benchmarks.gated_run GATE EVENTS run …``.

While the file GATE is absent, compaction waits as it does beside uploads that are behind; while GATE-scrub is, so do
scrub and key compaction. EVENTS gets a JSON line for each commit of messages, each version that was lost to another
writer, each round, and the start and end of work on index files. Owns what is added to the process, by replacing
methods; the rest is `tiered run` itself.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rocketmq_tiered.cli import main as tiered
from rocketmq_tiered.maintenance.compaction_task import CompactionTask
from rocketmq_tiered.process.archive_tasks import ArchiveTasks
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitKind
from tiered.catalog.commit_attempt import CommitAttempt
from uploader.index_builder import IndexBuilder


class Events:
    """Lines of a file, from any thread."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def add(self, what: str, **values: object) -> None:
        """One line, with the time."""
        with self._lock:
            self._file.write(
                json.dumps({"what": what, "at_ms": time.time_ns() // 1_000_000, **values}) + "\n"
            )


def report_commits(events: Events) -> None:
    """Commits of messages, when they have become visible, and commits that another writer was faster with."""
    append, is_won = CatalogWriter.append, CommitAttempt.is_won

    def appending(self: CatalogWriter, draft: Any) -> Any:
        state = append(self, draft)
        if draft.kind == CommitKind.APPEND and len(draft.runs):
            oldest_ms = int(draft.runs["min_store_timestamp"].min())
            events.add("commit", publish_ms=time.time_ns() // 1_000_000 - oldest_ms)
        return state

    def winning(self: CommitAttempt, commit: Any, body: Any) -> bool:
        if won := is_won(self, commit, body):
            return won
        events.add("lost", kind=commit.draft.kind)
        return won

    CatalogWriter.append, CommitAttempt.is_won = appending, winning  # type: ignore[method-assign]


def gate_compaction(gate: Path, events: Events) -> None:
    """Compaction, only while the gate is open; its rounds."""
    share, run_round = CompactionTask._share, CompactionTask._round

    def gated(self: CompactionTask) -> float:
        return share(self) if gate.exists() else 0.0

    def running(self: CompactionTask, state: Any, planned: Any) -> Any:
        result = run_round(self, state, planned)
        moved = 0 if result is None else result.cost.bytes_read + result.cost.bytes_sent
        events.add("round", sources=len(planned.plan.sources), bytes=moved, is_void=result is None)
        return result

    CompactionTask._share, CompactionTask._round = gated, running  # type: ignore[method-assign]


def gate_scrub(gate: Path) -> None:
    """Scrub, only while the gate is open."""
    share = ArchiveTasks._keys_share

    def gated(self: ArchiveTasks) -> float:
        return share(self) if gate.exists() else 0.0

    ArchiveTasks._keys_share = gated  # type: ignore[method-assign]


def report_indexing(events: Events) -> None:
    """Start and end of work on index files."""

    def reported(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: IndexBuilder, *arguments: Any) -> Any:
            events.add("indexing", has_ended=False)
            try:
                return step(self, *arguments)
            finally:
                events.add("indexing", has_ended=True)

        return run

    for name in ("_build", "_merge_or_rebuild"):
        setattr(IndexBuilder, name, reported(getattr(IndexBuilder, name)))


if __name__ == "__main__":
    events = Events(Path(sys.argv[2]))
    report_commits(events)
    report_indexing(events)
    gate_compaction(Path(sys.argv[1]), events)
    gate_scrub(Path(f"{sys.argv[1]}-scrub"))
    sys.exit(tiered(sys.argv[3:]))
