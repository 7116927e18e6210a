"""Archive and broker as one queue: residency, fall-backs, files that are hidden or gone, the ends of real queues.

The archive's side of a pull is the real fetcher over a plain block source, whose failures can be ordered; the broker's
are its own files. Every policy at every offset, and what is held until it is archived: tests/server/proxy/test_pull.py.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fetcher.io.waiting import run_sync
from fetcher.policy.broker_files import PageResidency
from fetcher.policy.read_policy import HeldOffsets, LocalView, ReadPolicies, ReadPolicy, ReadSource, Residency
from fetcher.policy.read_router import ReadCounters, ReadRouter
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from tests.broker_store.page_cache import evict, resident_bytes
from tests.broker_store.unprivileged import run_unprivileged
from tests.end_to_end.ground_truth import TRUTH_OF_ROUND, read_jsonl
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, backfill
from tests.fetcher.broker_store_writer import FILE_BYTES, WrittenStore
from tests.fetcher.hot_reader import HotReader
from tests.fetcher.reading_fakes import plain_fetcher
from tests.fetcher.store_growth import grows
from tests.sweeps import sweep
from tiered.broker_store.store import open_broker_store
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import CorruptionError, NotFoundError, TieredError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey, TopicFilter
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore

S = PullStatus
BODY = b"x" * 900
ARCHIVED, STORED = 300, 400


@dataclass
class Scene:
    """A broker with 400 messages in ``t``, 300 of them archived, and a reader of both."""

    store: WrittenStore
    root: MemoryStore
    archive: Backend
    hot: HotReader
    reader: PolicyReader

    def pull(self, offset: int, *, topic: str = "t", count: int = 32) -> PullResult:
        result = run_sync(self.reader.get(topic, 0, offset, count=count, max_bytes=1 << 20))
        records = self.store.records.get((topic, 0), {})
        for number, record in zip(result.batch.queue_offsets.tolist(), result.batch.records(), strict=True):
            assert bytes(record) == records[number]
        return result

    def policy(self, name: str) -> None:
        self.reader.apply(ReadPolicies(ReadPolicy(name)))

    def expire(self, offset: int) -> int:
        """Delete the commitlog files below the record at ``offset``; the broker's new minimum."""
        phys, minimum = 0, 0
        for number in sorted(self.store.records["t", 0]):
            phys = int.from_bytes(self.store.records["t", 0][number][28:36], "big")
            if number == offset:
                break
        first = phys // FILE_BYTES * FILE_BYTES
        for path in (self.store.path / "commitlog").iterdir():
            if int(path.name) < first:
                path.unlink()
        for number in sorted(self.store.records["t", 0]):
            if int.from_bytes(self.store.records["t", 0][number][28:36], "big") >= first:
                minimum = number
                break
        self.hot._fresh_until_s = 0  # its clock has not moved
        return minimum

    def served(self) -> tuple[int, int, int]:
        counters = self.reader.counters
        return counters.local, counters.tiered, counters.retried


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    store = WrittenStore(tmp_path / "store")
    for _ in range(ARCHIVED):
        store.put("t", 0, BODY)
    root = MemoryStore("memory://policy")
    backfill(store.path, root)
    for _ in range(STORED - ARCHIVED):
        store.put("t", 0, BODY)
    archive = Backend(root)
    hot = HotReader(open_broker_store(store.path))
    return Scene(store, root, archive, hot, PolicyReader(archive, hot, topics=FILTER))


# -- in memory or not -----------------------------------------------------------------------------------------


def test_residency_is_checked_at_every_pull(scene: Scene) -> None:
    scene.policy("NOT_IN_MEM")
    path = scene.store.log_file(0)
    assert scene.pull(0).max_offset == STORED, "just written, so in memory"
    evict(path)
    if resident_bytes(path):
        pytest.skip("this file system does not let go of pages (tmpfs?)")
    assert scene.pull(0).max_offset == ARCHIVED, "on disk, so from the archive"
    assert resident_bytes(path) == 0, "asking loads nothing"
    path.read_bytes()
    assert scene.pull(0).max_offset == STORED
    assert scene.served() == (2, 1, 0) and scene.reader.counters.residency_unknown == 0


class Ignorant(PageResidency):
    """A kernel that tells nothing."""

    def of(self, path: Path, ranges: object) -> Residency:
        return Residency.UNKNOWN


class Gone(PageResidency):
    """The broker deletes the file just before the question."""

    def of(self, path: Path, ranges: object) -> Residency:
        raise NotFoundError(f"{path} does not exist")


def test_a_file_deleted_while_asking_is_not_in_memory(scene: Scene) -> None:
    scene.hot._residency = Gone()
    scene.policy("NOT_IN_MEM")
    assert scene.pull(0).max_offset == ARCHIVED


def test_not_in_mem_is_not_in_disk_loudly_where_residency_is_unknown(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.hot._residency = Ignorant()
    scene.policy("NOT_IN_MEM")
    with caplog.at_level(logging.WARNING):
        assert scene.pull(0).max_offset == scene.pull(32).max_offset == STORED
    assert scene.reader.counters.residency_unknown == 2
    assert [
        record.message for record in caplog.records if "NOT_IN_MEM acts as NOT_IN_DISK" in record.message
    ] != []
    assert len(caplog.records) == 1, "said once, counted every time"


def test_as_a_user_who_may_only_read(scene: Scene) -> None:
    """uid 65534: the kernel tells it lies by mincore and nothing by cachestat; the answers are the broker's files'."""
    for path in scene.store.path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    scene.store.path.chmod(0o755)
    scene.policy("NOT_IN_MEM")
    evict(scene.store.log_file(0))

    def pull() -> str:
        hot = HotReader(open_broker_store(scene.store.path))
        reader = PolicyReader(scene.archive, hot, settings=ReadPolicies(ReadPolicy.NOT_IN_MEM))
        result = run_sync(reader.get("t", 0, 0, count=8, max_bytes=1 << 20))
        return f"{len(result.batch)} {result.max_offset} {reader.counters.residency_unknown}"

    answer = run_unprivileged(pull, scene.store.path)
    # From Linux 6.5 to 6.13 cachestat tells every user the truth: it is on disk, so the archive answers.
    assert answer in (f"8 {STORED} 1", f"8 {ARCHIVED} 0")


# -- fall-backs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [UnavailableError("away"), CorruptionError("data/x: block 3 fails its CRC32C")]
)
def test_an_archive_that_fails_is_replaced_by_the_broker_where_it_can(
    scene: Scene, error: UnavailableError, caplog: pytest.LogCaptureFixture
) -> None:
    scene.archive.error = error
    scene.policy("FORCE")
    assert scene.pull(5).status is S.FOUND
    assert scene.reader.counters.fallbacks == {f"tiered {type(error).__name__}": 1}
    assert "cannot be read from tiered; what follows instead: local" in caplog.text
    scene.expire(100)
    with pytest.raises(type(error), match=error.message):
        scene.pull(5)


def test_the_broker_is_read_while_the_object_store_is_away(scene: Scene) -> None:
    def refused() -> None:
        """Like CatalogView.look: it only begins to look."""

    scene.archive.look = refused  # type: ignore[method-assign]
    scene.archive.error = UnavailableError("away")
    assert [scene.pull(offset).status for offset in (0, 299, 300, 400)] == [
        S.FOUND,
        S.FOUND,
        S.FOUND,
        S.OFFSET_OVERFLOW_ONE,
    ]


def test_a_file_deleted_between_look_and_read_sends_to_the_archive(scene: Scene) -> None:
    look = scene.hot.local_view

    def look_then_delete(topic: str, queue_id: int, offset: int) -> object:
        view = look(topic, queue_id, offset)
        for path in sorted((scene.store.path / "commitlog").iterdir())[:-1]:
            path.unlink()
        scene.hot._store.commit_log.close()
        return view

    scene.hot.local_view = look_then_delete  # type: ignore[method-assign,assignment]
    assert scene.pull(10).max_offset == ARCHIVED
    assert scene.reader.counters.fallbacks == {"local RecordGoneError": 1}
    assert scene.pull(310).status is S.OFFSET_FOUND_NULL


def test_a_log_cut_back_below_the_archive_does_not_send_consumers_back(scene: Scene) -> None:
    """The broker lost its disk's last minutes: it ends at 200, the archive at 300."""
    for offset in range(200, STORED):
        scene.store.put_unit("t", 0, offset, bytes(20))
    assert scene.pull(ARCHIVED).status is S.OFFSET_OVERFLOW_ONE
    assert scene.pull(ARCHIVED).next_offset == ARCHIVED
    assert scene.pull(STORED).next_offset == ARCHIVED
    assert scene.pull(250).status is S.FOUND


def test_a_recreated_topic_is_not_mixed_with_its_earlier_generation(scene: Scene) -> None:
    shutil.rmtree(scene.store.path / "consumequeue" / "t")
    scene.store.records.pop(("t", 0))
    for _ in range(50):
        scene.store.put("t", 0, b"new" * 300)
    hot = HotReader(open_broker_store(scene.store.path))
    scene.reader = PolicyReader(scene.archive, hot, topics=FILTER)
    result = scene.pull(0)
    assert (result.status, result.next_offset, result.max_offset) == (S.FOUND, 32, 50)
    result = scene.pull(50)
    assert (result.status, result.next_offset, result.max_offset) == (S.OFFSET_OVERFLOW_ONE, 50, 50)
    assert scene.pull(60).next_offset == 0, "its consumer read the earlier generation"
    assert scene.reader.counters.tiered == 0


# -- hidden broker, settings ----------------------------------------------------------------------------------


def _hide_consume_queues(store: WrittenStore) -> None:
    (store.path / "consumequeue").rename(store.path / "away")
    (store.path / "consumequeue").mkdir()
    (store.path / "consumequeue" / "CURRENT").write_text("MANIFEST-000001\n")
    (store.path / "lock").unlink()  # no way to tell whether that broker runs


def test_hidden_files_never_send_a_consumer_back_to_the_archives_end(scene: Scene) -> None:
    _hide_consume_queues(scene.store)
    scene.reader = PolicyReader(scene.archive, HotReader(open_broker_store(scene.store.path)))
    for policy in ("NOT_IN_DISK", "FORCE"):
        scene.policy(policy)
        assert scene.pull(0).status is S.FOUND
        for offset in (ARCHIVED, 350):
            assert (scene.pull(offset).status, scene.pull(offset).next_offset) == (
                S.OFFSET_FOUND_NULL,
                offset,
            )


@pytest.mark.parametrize("is_deleted", [False, True])
def test_hidden_files_hold_what_only_the_broker_may_have_before_the_archive(
    tmp_path: Path, is_deleted: bool
) -> None:
    """The archive begins later than the broker's log did: while that goes back further, no consumer skips it."""
    store = WrittenStore(tmp_path / "store")
    for _ in range(STORED):
        store.put("t", 0, BODY)
    root = MemoryStore("memory://late")
    commit_log = store.path / "commitlog"
    away = tmp_path / "away"
    away.mkdir()
    for path in sorted(commit_log.iterdir())[:2]:
        path.rename(away / path.name)
    backfill(store.path, root)
    if not is_deleted:
        for path in away.iterdir():
            path.rename(commit_log / path.name)
    _hide_consume_queues(store)
    archive = Backend(root)
    scene = Scene(store, root, archive, HotReader(open_broker_store(store.path)), None)  # type: ignore[arg-type]
    scene.reader = PolicyReader(archive, scene.hot, topics=FILTER)
    for policy in ("NOT_IN_DISK", "NOT_IN_MEM", "FORCE"):
        scene.policy(policy)
        result = scene.pull(5)
        if is_deleted:
            assert result.status is S.OFFSET_TOO_SMALL and result.next_offset == result.min_offset > 5
        else:
            assert (result.status, result.next_offset) == (S.OFFSET_FOUND_NULL, 5)
        assert scene.pull(result.min_offset).status is S.FOUND


def _late_archive(tmp_path: Path) -> tuple[Scene, int]:
    """An archive that begins in the broker's third file; and its first offset."""
    store = WrittenStore(tmp_path / "store")
    for _ in range(STORED):
        store.put("t", 0, BODY)
    root, commit_log, away = MemoryStore("memory://late"), store.path / "commitlog", tmp_path / "away"
    away.mkdir()
    early = sorted(commit_log.iterdir())[:2]
    for path in early:
        path.rename(away / path.name)
    backfill(store.path, root)
    for path in early:
        (away / path.name).rename(path)
    archive = Backend(root)
    # It never looks again on its own.
    hot = HotReader(open_broker_store(store.path), clock=Clock(monotonic_s=lambda: 0.0))
    scene = Scene(store, root, archive, hot, PolicyReader(archive, hot, topics=FILTER))
    scene.policy("FORCE")
    row = archive.state.queue(QueueKey("t", 0, 0))
    assert row is not None
    begin = int(row["min_queue_offset"])
    assert scene.pull(STORED - 1).min_offset == 0 < begin
    return scene, begin


@pytest.mark.parametrize("policy", ["NOT_IN_DISK", "NOT_IN_MEM", "FORCE"])
def test_the_brokers_minimum_moves_with_its_files_however_they_are_noticed(
    tmp_path: Path, policy: str
) -> None:
    scene, begin = _late_archive(tmp_path)
    scene.policy(policy)
    assert scene.pull(5).status is S.FOUND
    sorted((scene.store.path / "commitlog").iterdir())[0].unlink()
    known = len(list((scene.store.path / "commitlog").iterdir()))
    while len(list((scene.store.path / "commitlog").iterdir())) == known:
        last = scene.store.put("t", 0, BODY)
    assert scene.pull(last).status is S.FOUND  # in a file that was not listed: all are, again
    offset = 5
    while (result := scene.pull(offset)).status is not S.FOUND:
        assert result.next_offset > offset
        offset = result.next_offset
    assert offset < begin, "the broker has it, and the archive never will"


@pytest.mark.parametrize("policy", ["NOT_IN_DISK", "NOT_IN_MEM", "FORCE"])
def test_a_file_that_is_missing_in_the_middle_moves_no_consumer_past_what_is_behind_it(
    tmp_path: Path, policy: str
) -> None:
    """Nor is it skipped itself: it may be mounted again."""
    scene, begin = _late_archive(tmp_path)
    scene.policy(policy)
    missing = sorted((scene.store.path / "commitlog").iterdir())[1]
    missing.rename(tmp_path / "later")
    scene.hot._store.commit_log.refresh()
    result = scene.pull(begin - 2)
    assert (result.status, result.next_offset) == (S.OFFSET_FOUND_NULL, begin - 2)
    (tmp_path / "later").rename(missing)
    scene.hot._store.commit_log.refresh()
    assert scene.pull(begin - 2).status is S.FOUND


def test_policies_by_topic_change_without_a_restart(scene: Scene) -> None:
    scene.reader.apply(ReadPolicies(patterns=(("t", ReadPolicy.FORCE),)))
    assert scene.pull(0).max_offset == ARCHIVED
    scene.reader.apply(ReadPolicies(ReadPolicy.FORCE, (("t", ReadPolicy.NOT_IN_DISK),)))
    assert scene.pull(0).max_offset == STORED


def test_the_broker_s_own_topics_are_read_from_its_files(scene: Scene) -> None:
    scene.store.put("rmq_sys_wheel_timer", 0, b"timer")
    scene.hot._fresh_until_s = 0
    scene.policy("FORCE")
    assert scene.pull(0, topic="rmq_sys_wheel_timer").status is S.FOUND
    assert scene.archive.pulls == 0


def test_bounds_are_those_of_both_sides(scene: Scene) -> None:
    minimum = scene.expire(100)
    archived, local = scene.reader.bounds("t", 0)
    assert archived == HeldOffsets(0, ARCHIVED)
    assert local == HeldOffsets(minimum, STORED)
    assert scene.reader.bounds("unknown", 0) == (None, None)
    scene.policy("DISABLE")
    assert scene.reader.bounds("t", 0) == (None, local)


# -- real stores ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["NOT_IN_DISK", "FORCE"])
@pytest.mark.parametrize(
    "name",
    sweep(["A", "B", "C", "D", "F", "G", "H", "H2", "K"], fast=["C", "F", "K"], rest="integration"),
)
def test_pulls_at_and_beyond_the_ends_are_answered_as_by_the_broker(
    name: str, policy: str, real_store: Callable[[str], Path]
) -> None:
    """FORCE: what the archive has is read from it; the ends are the broker's all the same."""
    directory = real_store(name)
    truth = directory / "truth" / TRUTH_OF_ROUND.get(name, "")
    compacted = {
        line["topic"] for line in read_jsonl(truth / "topics.jsonl.zst") if "COMPACTION" in str(line)
    }
    root = MemoryStore("memory://edges")
    backfill(directory / "store", root)
    archive = Backend(root)
    with open_broker_store(directory / "store") as store:
        reader = PolicyReader(
            archive, HotReader(store), topics=FILTER, settings=ReadPolicies(ReadPolicy(policy))
        )
        answers = 0
        for line in read_jsonl(truth / "pull_edges.jsonl.zst"):
            topic = line["topic"]
            if topic in compacted or grows(name, topic):
                continue
            if name == "F" and FILTER.is_system(topic):
                continue  # its broker recovered units that the killed one had not flushed
            result = run_sync(
                reader.get(
                    topic, line["queueId"], line["reqOffset"], count=line["maxMsgNums"], max_bytes=1 << 20
                )
            )
            moved = (
                {line["min"]}
                if topic.endswith("recreated") and line["remark"] == S.OFFSET_OVERFLOW_BADLY.value
                else set()
            )
            assert result.status.value == line["remark"], line
            assert result.next_offset in {line["next"]} | moved, line
            assert (result.min_offset, result.max_offset) == (line["min"], line["max"]), line
            assert len(result.batch) == len(line["recQueueOffsets"]), line
            answers += 1
        assert answers >= 10
        assert (reader.counters.tiered > 0) == (policy == "FORCE" or name in ("F", "G"))
        assert reader.counters.retried == 0


class Backend:
    """Reads the archive in ``root``; every refresh finds the newest version."""

    def __init__(self, root: ObjectStore) -> None:
        store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
        self.fetcher = plain_fetcher(store, refresh_ms=0)
        self.error: TieredError | None = None
        self.pulls = 0

    @property
    def state(self) -> CatalogState:
        """See KnownCatalog."""
        return self.fetcher.catalog.state

    def refresh_if_due(self) -> None:
        """See KnownCatalog."""
        self.fetcher.catalog.refresh_if_due()

    async def get(self, topic: str, queue_id: int, offset: int, **arguments: Any) -> PullResult:
        """See TieredReader."""
        self.pulls += 1
        if self.error is not None:
            raise self.error
        return await self.fetcher.pull(PullRequest(topic, queue_id, offset, **arguments))


class PolicyReader:
    """Answers pulls by policy. ``topics``: what the uploader archives."""

    def __init__(
        self,
        tiered: Backend,
        hot: HotReader,
        *,
        settings: ReadPolicies | None = None,
        topics: TopicFilter | None = None,
    ) -> None:
        self._tiered = tiered
        self._hot = hot
        self._router = ReadRouter(tiered, settings, topics)

    @property
    def counters(self) -> ReadCounters:
        """How pulls were answered so far."""
        return self._router.counters

    def apply(self, settings: ReadPolicies) -> None:
        """Put other policies in force from the next pull on."""
        self._router.apply(settings)

    async def get(self, topic: str, queue_id: int, offset: int, *, count: int, max_bytes: int) -> PullResult:
        """A pull. OFFSET_FOUND_NULL means: ask the same offset again, its messages are neither here nor gone.

        Raises what reading the archive raises when the broker's files cannot answer instead.
        """
        sides = _FileSides(self._tiered, self._hot, topic, queue_id, offset, count, max_bytes)
        plan = await self._router.plan(sides, topic, queue_id, offset)
        return (await self._router.pull(sides, plan)).joined

    def bounds(self, topic: str, queue_id: int) -> tuple[HeldOffsets | None, HeldOffsets | None]:
        """Of the archive and of the broker's files."""
        sides = _FileSides(self._tiered, self._hot, topic, queue_id, 0, 1, 1)
        situation = run_sync(self._router.situation(sides, topic, queue_id, 0))
        return situation.archived, situation.local


@dataclass(frozen=True, slots=True)
class _FileSides:
    """One pull of the archive or of the broker's files; see read_router.PullSources."""

    tiered: Backend
    hot: HotReader
    topic: str
    queue_id: int
    offset: int
    count: int
    max_bytes: int

    async def local_view(self) -> LocalView:
        return self.hot.local_view(self.topic, self.queue_id, self.offset)

    async def residency(self) -> Residency:
        place = self.topic, self.queue_id, self.offset
        try:
            return self.hot.residency(*place, count=self.count, max_bytes=self.max_bytes)
        except NotFoundError:
            return Residency.COLD  # deleted since

    async def read(self, source: ReadSource, local: HeldOffsets | None) -> PullResult:
        place = self.topic, self.queue_id, self.offset
        if source is ReadSource.LOCAL:
            return self.hot.get(*place, count=self.count, max_bytes=self.max_bytes, queue=local)
        result = await self.tiered.get(*place, count=self.count, max_bytes=self.max_bytes)
        return counted(result, self.count)


def counted(result: PullResult, count: int) -> PullResult:
    """At most ``count`` messages, those of an inner batch counted each, as a broker does; but one record at least."""
    batch = result.batch
    if len(batch) <= 1 or int(batch.inner_num.sum()) <= count:
        return result
    rows = max(1, int(np.searchsorted(np.cumsum(batch.inner_num), count, side="right")))
    end = int(batch.queue_offsets[rows - 1]) + int(batch.inner_num[rows - 1])
    return result._replace(batch=batch.select(np.arange(rows)), next_offset=end)
