"""An archive of a keyed queue, its rounds of key compaction, and a check of what is left against a dict."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from fetcher.io.waiting import run_sync
from fetcher.pulls.message_fetcher import TieredMessageFetcher
from fetcher.rows.pull import PullRequest, PullResult
from rocketmq_tiered.maintenance.compaction_round import plan_rounds
from rocketmq_tiered.maintenance.key_job import KeyCompactionReport, compact_keys
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.archive.queue_reader import QueueReader, records_of
from tests.catalog.collection import run_gc
from tests.fetcher.reading_fakes import plain_fetcher
from tests.maintenance.compaction_scene import EVERYTHING, LIMITS, a_round
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.pages import RunIndex
from tiered.catalog.writer_limits import CatalogLimits
from tiered.formats.record import decode_record
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE, RunKind
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import Settings

KEYED, OTHER, LIGHT = QueueKey("keyed", 0, 0), QueueKey("other", 0, 0), QueueKey("%LMQ%light", 0, 0)
NO_LIMIT = 1 << 40
LIMITS_OF_CATALOG = CatalogLimits(
    root_every=4, spill_runs=12, page_runs_max=9, merge_sequences=6, merge_spills=6
)


def pull(fetcher: TieredMessageFetcher, offset: int, count: int = 32, queue: QueueKey = KEYED) -> PullResult:
    """One pull, in this thread."""
    return run_sync(fetcher.pull(PullRequest(queue.topic, queue.queue_id, offset, count, NO_LIMIT)))


class Table:
    """An archive of a keyed queue beside another one, and a dict."""

    def __init__(self, spool: Path, seed: int = 1, store: ObjectStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.owner = ArchiveBuilder(self.store, limits=LIMITS_OF_CATALOG)
        self.random = random.Random(seed)
        self.spool = spool
        self.floor = 0
        own = replace(Settings().key_compaction, min_age_ms=-(10**15))
        self.settings = replace(Settings(), key_compaction=own)
        self.sent: list[tuple[str, bytes]] = []
        self.ends: list[tuple[int, int]] = []
        """Versions, and where the log ends there, to which it may be cut."""

    def write(self, cycles: int, *, keys: int = 12, tombstones: float = 0.2) -> None:
        self.owner.writer.refresh()
        for _ in range(cycles):
            cycle = []
            for _ in range(self.random.randint(2, 9)):
                queue = self.random.choice([KEYED, KEYED, OTHER])
                key = f"k{self.random.randrange(keys)}" if self.random.random() > 0.03 else ""
                body = b"" if self.random.random() < tombstones else self.random.randbytes(60)
                lmq = [LIGHT] if queue == KEYED and self.random.random() < 0.3 else []
                cycle.append(Sent(queue, body, keys=[key] if key else [], lmq=lmq))
                if queue == KEYED:
                    self.sent.append((key, body))
            state = self.owner.commit(cycle, as_set=self.random.random() < 0.5)
            self.ends.append((state.version, state.cursor.phys))

    def restart(self) -> None:
        """Another process takes the archive over."""
        self.owner.restart(self.random.random())

    def cut_log(self) -> None:
        """The broker's log loses its end, above what key compaction saw."""
        if len(self.ends) < 2:
            return
        at = self.random.randrange(len(self.ends) - 1)
        version, phys = self.ends[at]
        self.owner.writer.refresh()
        self.owner.writer.append_history(common_version=version, phys=phys)
        self.owner.forget_above(phys)
        del self.ends[at + 1 :]
        del self.sent[self.owner.truth[KEYED].end :]

    def compact(self, store: ObjectStore | None = None, *, apply: bool = True) -> KeyCompactionReport:
        options = RewriteOptions(self.spool, 10**8, BlockCodec(block_bytes=600), wait=lambda _: None)
        archive = store or self.store
        self.ends = self.ends[-1:] if apply else self.ends
        return compact_keys(
            archive, load(archive), self.settings, options, lambda topic: topic == KEYED.topic, apply=apply
        )

    def join(self) -> None:
        """A round of object compaction, if there is one."""
        planned = next(plan_rounds(self.store, load(self.store), LIMITS, before_version=EVERYTHING), None)
        if planned is not None:
            a_round(self.store, load(self.store), planned, self.spool)

    def collect(self) -> list[str]:
        clock = lambda: self.store.clock_ms() + 10  # noqa: E731
        return run_gc(self.store, load(self.store), apply=True, grace_ms=0, clock=clock).delete

    def expire(self) -> None:
        """The oldest run of the queue expires, or a part of a plain one."""
        runs = RunIndex(self.store).runs_of(load(self.store), KEYED).runs
        if len(runs) < 2:
            return
        begin, end = max(self.floor, int(runs["base_queue_offset"][0])), int(runs["end_queue_offset"][0])
        floor = np.zeros(1, FLOOR_DTYPE)
        if runs["kind"][0] == RunKind.PLAIN:
            end = self.random.randint(begin + 1, end)
            floor["rows"] = end - begin
        else:
            floor["rows"] = runs["rows"][0]
        self.floor = floor["min_queue_offset"] = end
        self.owner.writer.refresh()
        self.owner.writer.append(CommitDraft(CommitKind.MAINTENANCE, queues=[KEYED], floors=floor))

    # -- what readers find --------------------------------------------------------------------------------

    def rows(self, begin: int = 0) -> dict[int, bytes]:
        """Records by offset, from ``begin`` on."""
        reader = QueueReader(self.store, load(self.store), KEYED)
        rows = records_of(reader, begin, max_rows=self.random.randint(1, 40))
        return {offset: record for offset, _, record in rows}

    def pulled(self, begin: int = 0, queue: QueueKey = KEYED) -> dict[int, bytes]:
        """The same by pulls of a consumer."""
        fetcher = plain_fetcher(self.store)
        found: dict[int, bytes] = {}
        offset = begin
        while True:
            result = pull(fetcher, offset, self.random.randint(1, 40), queue)
            if result.next_offset <= offset:
                return found
            for at, record in zip(result.batch.queue_offsets.tolist(), result.batch.records(), strict=True):
                assert at >= offset
                found[at] = bytes(record)
            offset = result.next_offset

    def check(self) -> dict[int, bytes]:
        """The archive is sound; what is left is what was sent, and gives the dict of all that did not expire."""
        report = verify_archive(self.store, depth="full")
        assert report.anomalies == [], report.anomalies[:3]
        found = self.rows()
        truth = {row.offset: row.record for row in self.owner.truth[KEYED].rows}
        assert all(truth[offset] == record for offset, record in found.items())
        state: dict[str, bytes] = {}
        for offset in sorted(found):
            key, body = self.sent[offset]
            record = decode_record(found[offset])
            assert (key, body) == (" ".join(record.keys), record.body())
            state[key] = body
        latest = {key: at for at, (key, _) in enumerate(self.sent) if key and at >= self.floor}
        wanted = {key: self.sent[at][1] for key, at in latest.items() if self.sent[at][1]}
        assert {key: body for key, body in state.items() if key and body} == wanted
        row = load(self.store).queue(KEYED)
        assert row is not None and int(row["row_count"]) == len(found)
        if LIGHT in self.owner.truth:
            light = self.owner.truth[LIGHT].rows
            alive = {
                row.offset: row.record for row in light if decode_record(row.record).queue_offset in found
            }
            assert self.pulled(0, LIGHT) == alive, "rows of an LMQ live as long as their messages"
        begin = self.random.randrange(len(self.sent))
        expected = {offset: record for offset, record in found.items() if offset >= begin}
        assert self.pulled(begin) == self.rows(begin) == expected
        return found
