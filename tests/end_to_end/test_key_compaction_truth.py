"""Key compaction of real brokers' compaction topics, at the cuts of their rounds: what stays, and pulls."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fetcher.io.waiting import run_sync
from fetcher.rows.pull import PullRequest, PullStatus
from rocketmq_tiered.maintenance.compaction_job import limits_of
from rocketmq_tiered.maintenance.compaction_round import run_round
from rocketmq_tiered.maintenance.key_rounds import KeyedQueue, KeyPass, planned_key_rounds, read_queues
from tests.archive.queue_reader import QueueReader, records_of
from tests.end_to_end.ground_truth import read_jsonl
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.fetcher.reading_fakes import plain_fetcher
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.pages import RunIndex
from tiered.catalog.requirements import histories_of
from tiered.catalog.state import selected
from tiered.clock import Clock
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings

HOT = "t_compact_hot"
LAST_OFFSETS = {  # of each queue, that a round of the broker compacted
    ("H", "after1"): (7995, 5996),
    ("H", "after2"): (15991, 13992),
    ("H2", "after1"): (1998, 1998),
    ("H2", "after2"): (5996, 5996),
}
PHYSICAL_OFFSET = slice(28, 36)
EVERYTHING = 1 << 40


def compact(store: ObjectStore, cuts: dict[QueueKey, int], spool: Path) -> None:
    """Rounds with ``cuts``, which may be inside a run, also in the newest one."""
    maintenance = MaintenanceCommit.opened(store, load(store), "test", Clock(wall_ms=store.clock_ms))
    settings, state = Settings(), maintenance.state
    limits, index = limits_of(settings, state.settings), RunIndex(store)
    found = KeyPass(histories_of(state))
    for queue, cut in cuts.items():
        chunk = index.runs_of(state, queue)
        chunk = selected(chunk, np.flatnonzero(chunk.runs["base_queue_offset"] < cut))
        read_queues(store, [KeyedQueue(queue, chunk, cut)], found, spool, 1 << 16, keeps_keyless=False)
    while True:
        rounds = planned_key_rounds(index, maintenance.refresh(), found, limits, before_version=EVERYTHING)
        planned = next(rounds, None)
        if planned is None:
            return
        result = run_round(
            store,
            maintenance.state,
            planned,
            RewriteOptions(spool, 1 << 30),
            clock=Clock(wall_ms=store.clock_ms),
            maintenance=maintenance,
        )
        assert result is not None
        found.made |= set(result.object_keys)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Those of the compacted topic."""
    return [line for line in read_jsonl(path) if line["topic"] == HOT]


@pytest.mark.parametrize("name", ["H", "H2"])
def test_what_stays_is_what_the_broker_kept(
    name: str, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    directory, root = real_store(name), MemoryStore()
    backfill(directory / "store", root)
    store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    for truth in ("after1", "after2"):
        cuts = {QueueKey(HOT, queue, 0): last + 1 for queue, last in enumerate(LAST_OFFSETS[name, truth])}
        compact(store, cuts, tmp_path)
        lines = lines_of(directory / "truth" / truth / "messages.jsonl.zst")
        state = load(store)
        for queue in cuts:
            mine = [line for line in lines if line["queueId"] == queue.queue_id]
            last = mine[-1]["queueOffset"]
            found = [row for row in records_of(QueueReader(store, state, queue)) if row[0] <= last]
            assert [offset for offset, _, _ in found] == [line["queueOffset"] for line in mine]
            for (_, _, record), line in zip(found, mine, strict=True):
                served = bytearray(record)
                served[PHYSICAL_OFFSET] = struct.pack(">q", line["commitLogOffset"])
                assert zlib.crc32(served) == line["recCrc32"]
        check_edges(store, directory / "truth" / truth / "pull_edges.jsonl.zst", is_last=truth == "after2")
        assert verify_archive(store, depth="full").anomalies == []


def check_edges(store: ObjectStore, path: Path, *, is_last: bool) -> None:
    """Pulls as the broker answered; in its first round, when it had fewer messages, those before its end."""
    fetcher = plain_fetcher(store)
    compared = 0
    for line in lines_of(path):
        request = PullRequest(HOT, line["queueId"], line["reqOffset"], line["maxMsgNums"], 1 << 30)
        reply = run_sync(fetcher.pull(request))
        offsets = reply.batch.queue_offsets.tolist()
        if not is_last:
            if len(line["recQueueOffsets"]) == line["maxMsgNums"]:
                assert (offsets, reply.next_offset, reply.min_offset) == (
                    line["recQueueOffsets"],
                    line["next"],
                    line["min"],
                )
                compared += 1
            continue
        names = {
            PullStatus.FOUND: "FOUND",
            PullStatus.OFFSET_OVERFLOW_ONE: "OFFSET_OVERFLOW_ONE",
            PullStatus.OFFSET_OVERFLOW_BADLY: "OFFSET_OVERFLOW_BADLY",
        }
        assert (names[reply.status], offsets, reply.next_offset, reply.min_offset, reply.max_offset) == (
            line["remark"],
            line["recQueueOffsets"],
            line["next"],
            line["min"],
            line["max"],
        ), line
        compared += 1
    assert compared >= 6
