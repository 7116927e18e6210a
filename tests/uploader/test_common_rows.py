"""A log that diverges inside joined objects: what is below stays, what is above is superseded, nothing is left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.archive.archive_builder import NOW_MS
from tests.faults.crashing_store import CrashError
from tests.maintenance.compaction_scene import QUEUES
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tests.sweeps import sweep
from tests.uploader.joined_scene import SETS, STREAMS, JoinedScene, contents
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind
from tiered.catalog.hidden_history import history_state, list_histories
from tiered.catalog.joined_objects import CommonRows, JoinedObject, WriteCommonRows, joined_objects
from tiered.catalog.living_runs import living_runs
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError
from tiered.formats.keys import is_compacted
from tiered.model.tables import FLOOR_DTYPE
from tiered.object_store.interface import Body, ObjectStore, Piece
from tiered.object_store.wrapper import StoreWrapper
from uploader.common_rows import CommonRowsWriter

COMMITS = 24


class Mortal(StoreWrapper):
    """Its user dies at request number ``crash_at``, before or after the effect, and is dead from then on."""

    def __init__(self, store: ObjectStore, crash_at: int, *, after_effect: bool) -> None:
        super().__init__(store)
        self._crash_at, self._after_effect = crash_at, after_effect
        self.requests = self.puts = 0

    def _do(self, act: Callable[[], Any]) -> Any:
        self.requests += 1
        if self.requests > self._crash_at or (self.requests == self._crash_at and not self._after_effect):
            raise CrashError
        answer = act()
        if self.requests == self._crash_at:
            raise CrashError
        return answer

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self.puts += 1
        self._do(lambda: self._store.put_if_absent(key, body))

    def compose_if_absent(self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None) -> None:
        self.puts += 1
        self._do(lambda: self._store.compose_if_absent(key, pieces))

    def get(self, key: str, max_bytes: int = 1 << 30) -> bytes:
        return bytes(self._do(lambda: self._store.get(key, max_bytes)))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return bytes(self._do(lambda: self._store.get_range(key, offset, length)))

    def get_tail(self, key: str, length: int) -> bytes:
        return bytes(self._do(lambda: self._store.get_tail(key, length)))


class BeforeHistory(StoreWrapper):
    """Calls ``act`` before the PUT of the root of a new log history."""

    def __init__(self, store: ObjectStore, act: Callable[[], object]) -> None:
        super().__init__(store)
        self._act: Callable[[], object] | None = act

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        if key.startswith("pages/line-") and self._act is not None:
            act, self._act = self._act, None
            act()
        super().put_if_absent(key, body, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], JoinedScene]:
    """By limits and runs in memory: an archive of joined objects."""
    found = {}
    for name, limits in (("sets", SETS), ("streams", STREAMS)):
        for spill_runs in (12, 10**6):
            scene = JoinedScene(tmp_path_factory.mktemp("spool"), commits=COMMITS, spill_runs=spill_runs)
            assert scene.compact(limits) > 0
            found[name, spill_runs] = scene
    return found


@pytest.mark.parametrize("commit", sweep(range(COMMITS), fast=[0, 7, 12, 22, 23]))
@pytest.mark.parametrize("spill_runs", [12, 10**6], ids=["pages", "memory"])
@pytest.mark.parametrize("limits", ["sets", "streams"])
def test_a_log_may_diverge_at_the_end_of_every_commit(
    scenes: dict[tuple[str, int], JoinedScene], limits: str, spill_runs: int, commit: int
) -> None:
    scene = scenes[limits, spill_runs].copy()
    version, phys = scene.ends[commit]
    superseded = scene.sent(phys)
    scene.diverge(version, phys)
    scene.forget(phys)
    for _ in range(6):
        scene.grow()
    scene.collect(diverged_grace_ms=1 << 40)
    scene.check()
    rows = {queue: int(row["row_count"]) for queue, row in load(scene.store).queues()}
    assert rows == {queue: len(known.rows) for queue, known in scene.builder.truth.items()}
    if superseded:
        assert contents(scene.store, history_state(scene.store, load(scene.store), 1)) == superseded
        assert list_histories(scene.store, load(scene.store))[0].messages > 0
    scene.check_no_leftovers()
    scene.check()
    assert [found.messages for found in list_histories(scene.store, load(scene.store))][:-1] == [0]


SAMPLE = 9
"""A commit of which objects have rows below and above."""


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("limits", "step"), sweep([("sets", 4), ("streams", 1), ("sets", 1)], fast=[("sets", 4)])
)
def test_a_crash_at_each_request_is_recovered_from(
    scenes: dict[tuple[str, int], JoinedScene], limits: str, step: int, after_effect: bool
) -> None:
    """The next owner begins the history where the dead one did not; a history that was begun stays."""
    joined = scenes[limits, 12]
    version, phys = joined.ends[SAMPLE]
    clean = Mortal(joined.copy().store, 1 << 30, after_effect=False)
    joined.copy().diverge(version, phys, clean)
    assert clean.puts >= 4, "a claim, an object, a root page, a commit"
    for crash_at in range(1 + 2 * after_effect * (step > 1), clean.requests + 1, step):
        scene = joined.copy()
        with pytest.raises(CrashError):
            scene.diverge(version, phys, Mortal(scene.store, crash_at, after_effect=after_effect))
        if load(scene.store).cursor.history == 1:
            scene.diverge(version, phys)
        scene.forget(phys)
        if crash_at % 3 == 0:
            scene.check()
        scene.check_no_leftovers()
        scene.grow()
        assert contents(scene.store, load(scene.store)) == scene.sent()


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.THROTTLED])
def test_an_object_without_a_response_goes_to_another_key(
    scenes: dict[tuple[str, int], JoinedScene], fault: Fault
) -> None:
    scene = scenes["sets", 12].copy()
    version, phys = scene.ends[SAMPLE]
    store = FaultStore(scene.store, [FaultRule(fault, frozenset({"compose"}), "sets/*", times=2)])
    scene.diverge(version, phys, store)
    assert sum(store.hits().values()) == 2
    scene.forget(phys)
    scene.check()
    scene.grow()
    scene.collect()  # in the same epoch: the next commit made what was abandoned a pending deletion
    report = verify_archive(scene.store)
    assert (report.anomalies, report.leftovers) == ([], [])


def test_another_compaction_may_win_the_version(tmp_path: Path) -> None:
    """It moves what was just copied: the copy is garbage, and the new object is copied."""
    scene = JoinedScene(tmp_path)
    assert scene.compact(before_version=scene.ends[14][0]) > 0
    version, phys = scene.ends[SAMPLE]
    compacted: list[int] = []

    def compact() -> None:
        compacted.append(scene.compact())

    scene.diverge(version, phys, BeforeHistory(scene.store, compact))
    assert compacted[0] > 0
    scene.forget(phys)
    scene.check()
    scene.grow()
    scene.collect()
    report = verify_archive(scene.store)
    assert (report.anomalies, report.leftovers) == ([], [])


def test_a_log_may_diverge_inside_what_was_copied(scenes: dict[tuple[str, int], JoinedScene]) -> None:
    scene = scenes["sets", 12].copy()
    everything = scene.sent()
    for commit in (18, 12, 3):
        version, phys = scene.ends[commit]
        scene.diverge(version, phys)
        scene.forget(phys)
        scene.check()
        for _ in range(2):
            scene.grow()
    scene.collect(diverged_grace_ms=1 << 40)
    state = load(scene.store)
    hidden = [contents(scene.store, history_state(scene.store, state, number)) for number in (1, 2, 3)]
    found = [(queue, row) for part in hidden for queue, rows in part.items() for row in rows]
    common = scene.sent()
    gone = [
        (queue, row) for queue, rows in everything.items() for row in rows if row not in common.get(queue, [])
    ]
    assert gone and set(gone) <= set(found) and len(set(found)) == len(found)
    scene.check_no_leftovers()


def test_expired_runs_do_not_come_back(scenes: dict[tuple[str, int], JoinedScene]) -> None:
    """A queue whose joined run has expired ends at the common version: what was expired stays so."""
    scene = scenes["sets", 12].copy()
    state = load(scene.store)
    version, phys = scene.ends[SAMPLE]
    rows = {queue: known.rows for queue, known in scene.builder.truth.items()}
    queue = next(one for one in QUEUES[1:] if one in rows and rows[one][0].phys < phys < rows[one][-1].phys)
    row = state.queue(queue)
    assert row is not None
    floors = np.zeros(1, FLOOR_DTYPE)
    floors[0] = (0, row["end_queue_offset"], row["row_count"])
    draft = CommitDraft(CommitKind.MAINTENANCE, queues=[queue], floors=floors, created_ms=NOW_MS)
    scene.owner(scene.store).maintain(lambda _state: draft)
    scene.diverge(version, phys)
    scene.forget(phys)
    expired = scene.builder.truth[queue].rows[:]
    scene.builder.truth[queue].rows.clear()
    assert expired
    while queue not in scene.sent():
        scene.grow()
    assert scene.sent()[queue][0][0] == expired[-1].offset + expired[-1].inner_num
    scene.check()
    scene.check_no_leftovers()


def test_a_damaged_block_is_an_error_and_nothing_begins(scenes: dict[tuple[str, int], JoinedScene]) -> None:
    scene = scenes["sets", 12].copy()
    version, phys = scene.ends[SAMPLE]
    for key, (data, at) in list(scene.store._objects.items()):
        if is_compacted(key):
            scene.store._objects[key] = data[:16] + bytes(byte ^ 1 for byte in data[16:48]) + data[48:], at
    with pytest.raises(CorruptionError, match="block 0 fails its CRC32C"):
        scene.diverge(version, phys)
    assert load(scene.store).cursor.history == 1


def test_a_copy_that_a_commit_made_a_pending_deletion_is_not_used(
    scenes: dict[tuple[str, int], JoinedScene],
) -> None:
    scene = scenes["sets", 12].copy()
    _, phys = scene.ends[SAMPLE]
    state = load(scene.store)
    objects = joined_objects(state, lambda: living_runs(RunIndex(scene.store), state), phys)
    write = CommonRowsWriter(scene.store, writer="test", clock_ms=lambda: NOW_MS)
    unnamed: list[str] = []
    (first,) = write(state, phys, objects, unnamed)
    assert write(state, phys, objects, unnamed) == [first] and unnamed == [first.key]
    unnamed.clear()
    (second,) = write(state, phys, objects, unnamed)
    assert second.key != first.key and unnamed == [second.key]


def test_common_rows_that_are_others_are_refused(scenes: dict[tuple[str, int], JoinedScene]) -> None:
    scene = scenes["sets", 12].copy()
    version, phys = scene.ends[SAMPLE]
    right = CommonRowsWriter(scene.store, writer="test", clock_ms=lambda: NOW_MS)

    def wrong(column: str) -> WriteCommonRows:
        def write(
            state: CatalogState, phys: int, objects: Sequence[JoinedObject], unnamed: list[str]
        ) -> list[CommonRows]:
            found = right(state, phys, objects, unnamed)
            runs = found[0].runs.copy()
            runs[column] += 1
            return [replace(found[0], runs=runs), *found[1:]]

        return write

    writer = scene.owner(scene.store)
    writer.claim(take_over=True)
    for column in ("base_queue_offset", "base_byte", "kind", "version", "end_phys"):
        with pytest.raises(CommitInvalidError, match="has not the rows"):
            writer.append_history(common_version=version, phys=phys, write_common=wrong(column))
    assert load(scene.store).cursor.history == 1
