"""Places of the commitlog that the disk does not give: what stands before is archived, nothing is taken for damage, and
only what the broker has deleted can be lost.

A consume queue whose file cannot be read: the others and the confirm offset bound the log, and nothing is hidden.
"""

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from tests.broker_store.bad_sectors import BadSectors
from tests.broker_store.opened_store import consume_queues_of
from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, archive_of, backfill, state_of
from tests.sweeps import sweep
from tests.uploader.living_broker import LivingBroker
from tiered.archive.verify import verify_archive
from tiered.broker_store.commit_log import CommitLog, LogFile
from tiered.broker_store.pins import PinKeeper, PinLimits
from tiered.broker_store.store import open_broker_store
from tiered.catalog.state import CatalogState
from tiered.errors import UnreadableError
from tiered.model.tables import GapReason
from tiered.object_store.memory import MemoryStore
from tiered.residency import PAGE_BYTES
from uploader.offload import Environment, Offloader, OffloadIdentity

FILE_BYTES = 1 << 20
SPEC = StoreSpec(topics=2, queues_per_topic=2, body_bytes=200, file_bytes=FILE_BYTES)
MESSAGES = 10_000
RECORD = SPEC.record_bytes
BAD_AT = 300_000
TIMEOUT_S = 30.0


def visible_in(state: CatalogState) -> dict[object, bytes]:
    return {key: row.tobytes() for key, row in state.queues()}


class Scene:
    """A log of four files and a broker that runs beside it; ``disk`` breaks and mends."""

    def __init__(self, directory: Path, disk: BadSectors) -> None:
        self.store = directory / "store"
        write_store(self.store, SPEC, messages=MESSAGES)
        self.sound = MemoryStore("memory://sound")
        backfill(self.store, self.sound)
        self.end_phys = max(int(row["end_phys"]) for _, row in state_of(self.sound).queues())
        self.files = CommitLog([self.store / "commitlog"]).files
        assert len(self.files) == 4
        self.disk = disk
        self.pins = PinKeeper([directory / "pins"], PinLimits(0.9999, 0.99999))
        self.broker = LivingBroker(self.store)
        self.broker.end_phys = self.end_phys

    def deleted_but_pinned(self) -> LogFile:
        """The first file as only a pin holds it."""
        self.pins.step(self.files, 0)
        self.files[0].path.unlink()
        return CommitLog([self.store / "commitlog"], pinned=self.pins.files).files[0]

    def follow(self, memory: MemoryStore) -> None:
        """Until everything is archived. Raises what ends it before."""
        stop = threading.Event()
        ended = threading.Timer(TIMEOUT_S, stop.set)

        def look(state: CatalogState) -> None:
            if state.cursor.phys >= self.end_phys:
                stop.set()

        ended.start()
        try:
            with open_broker_store(self.store, pinned=self.pins.files) as opened:
                Offloader(
                    opened,
                    memory,
                    OffloadIdentity(CLUSTER, BROKER, "test", "run"),
                    replace(SMALL, batch_age_ms=50),
                    topic_filter=FILTER,
                    offsets_source=self.broker.offsets,
                    pins=self.pins,
                    environment=Environment(committed=look),
                ).run(stop, follow=True)
        finally:
            ended.cancel()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BadSectors:
    return BadSectors(monkeypatch)


@pytest.fixture
def scene(tmp_path: Path, disk: BadSectors) -> Iterator[Scene]:
    made = Scene(tmp_path, disk)
    yield made
    made.broker.close()


def last_end_before(phys: int) -> int:
    return phys // RECORD * RECORD


@pytest.mark.parametrize(
    ("gives_the_front", "follows"),
    sweep([(True, True), (False, False), (True, False), (False, True)], fast=[(True, True), (False, False)]),
)
def test_records_before_an_unreadable_sector_are_archived_and_the_rest_once_it_is_readable(
    follows: bool, gives_the_front: bool, scene: Scene, disk: BadSectors
) -> None:
    """Nothing is skipped or reported as damaged while the broker has the file."""
    memory = MemoryStore(f"memory://front-{follows}-{gives_the_front}")
    if not follows:
        scene.broker.close()

    def archive() -> None:
        if follows:
            scene.follow(memory)
        else:
            backfill(scene.store, memory)

    disk.may_give_the_front = gives_the_front
    bad_phys = disk.break_page(scene.files[0].path, BAD_AT)
    for _ in range(2):
        with pytest.raises(UnreadableError, match="00000000000000000000 cannot be read: Input/output error"):
            archive()
        state = state_of(memory)
        assert state.cursor.phys == last_end_before(bad_phys)
        assert [gap for key in state.visible_queues() for gap in state.gaps_of(key)] == []
    disk.mend()
    archive()
    assert visible_in(state_of(memory)) == visible_in(state_of(scene.sound))
    assert verify_archive(archive_of(memory), depth="full").anomalies == []


@pytest.mark.parametrize("gives_the_front", sweep([True, False], fast=[True]))
@pytest.mark.parametrize("pages", [[BAD_AT], [BAD_AT, BAD_AT + 5 * PAGE_BYTES, FILE_BYTES - 100_000]])
def test_a_pin_that_is_broken_costs_what_stands_in_its_broken_pages(
    pages: list[int], gives_the_front: bool, scene: Scene, disk: BadSectors, caplog: pytest.LogCaptureFixture
) -> None:
    disk.may_give_the_front = gives_the_front
    pin = scene.deleted_but_pinned()
    bad = [disk.break_page(pin.path, at) for at in pages]
    memory = MemoryStore("memory://broken-pin")
    scene.follow(memory)
    state = state_of(memory)
    assert state.cursor.phys == scene.end_phys
    gaps = [gap for key in state.visible_queues() for gap in state.gaps_of(key)]
    assert {GapReason(int(gap["reason"])) for gap in gaps} == {GapReason.BROKER_DELETED}
    lost = sum(int(gap["end_queue_offset"] - gap["begin_queue_offset"]) for gap in gaps)
    touched = {number for at in bad for number in range(at // RECORD, -(-(at + PAGE_BYTES) // RECORD))}
    assert lost == len(touched)
    losses = [vars(line)["error"] for line in caplog.records if "lost to the archive" in line.getMessage()]
    assert any(f"{pin.path} cannot be read" in error for error in losses)
    assert all(line.levelname == "ERROR" for line in caplog.records if "lost to the" in line.getMessage())
    assert not pin.path.exists(), "it is let go"
    assert verify_archive(archive_of(memory), depth="full").anomalies == []


@pytest.mark.parametrize("bad_at", [0, FILE_BYTES - 1])
def test_a_pin_may_be_broken_anywhere(bad_at: int, scene: Scene, disk: BadSectors) -> None:
    """Its begin is looked at before anything else."""
    disk.break_page(scene.deleted_but_pinned().path, bad_at)
    memory = MemoryStore(f"memory://broken-pin-{bad_at}")
    scene.follow(memory)
    assert state_of(memory).cursor.phys == scene.end_phys


def test_the_brokers_own_file_is_read_before_its_pin(
    scene: Scene, disk: BadSectors, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker may be able to read the sector, and its file comes first."""
    scene.pins.step(scene.files, 0)
    bad_phys = disk.break_page(scene.files[0].path, BAD_AT)
    memory = MemoryStore("memory://both")
    with pytest.raises(UnreadableError):
        scene.follow(memory)
    assert state_of(memory).cursor.phys == last_end_before(bad_phys)
    assert "lost" not in caplog.text
    scene.files[0].path.unlink()  # it deletes the file
    scene.follow(memory)
    assert state_of(memory).cursor.phys == scene.end_phys


def test_the_start_of_the_only_file_may_be_partly_unreadable(tmp_path: Path, disk: BadSectors) -> None:
    """The readable part shows whether it is a log."""
    store = tmp_path / "store"
    write_store(store, SPEC, messages=1000)
    (file,) = CommitLog([store / "commitlog"]).files
    disk.break_page(file.path, PAGE_BYTES)
    with open_broker_store(store) as opened:
        assert opened.commit_log.files == (file,)
    disk.break_page(file.path, 0)
    with pytest.raises(UnreadableError):
        open_broker_store(store)


CODES = pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])


def copy_without_holes(store: Path, copy: Path) -> None:
    """As by most ways of copying: only its bytes tell whether a queue has units."""
    for path in store.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(store)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


def fullest_queue(store: Path) -> tuple[tuple[str, int], Path]:
    """Whose last record is the last of all, and its file."""
    with open_broker_store(store) as opened:
        index = consume_queues_of(opened)
        records = {queue: found for queue, found in index.last_records().items() if FILTER.admits(queue[0])}
    topic, queue_id = max(records, key=lambda queue: records[queue])
    return (topic, queue_id), max((store / "consumequeue" / topic / str(queue_id)).iterdir())


@CODES
def test_a_backfill_archives_and_hides_the_same(
    code: int, real_store: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    copy_without_holes(real_store("B") / "store", store)
    sound = MemoryStore(f"memory://sound-{code}")
    expected = backfill(store, sound)
    queue, path = fullest_queue(store)
    disk = BadSectors(monkeypatch)
    disk.code = code
    disk.break_all(path)
    memory = MemoryStore(f"memory://queue-{code}")
    result = backfill(store, memory)
    assert disk.reads > 0
    assert (result.messages, result.damaged, result.hidden) == (expected.messages, 0, expected.hidden)
    assert {key: row.tobytes() for key, row in state_of(memory).queues()} == {
        key: row.tobytes() for key, row in state_of(sound).queues()
    }
    assert queue in {key[:2] for key in state_of(memory).visible_queues()}
    disk.mend()
    assert check_against_truth(memory, real_store("B"), "B") > 400


@CODES
def test_beside_a_broker_its_word_bounds(
    code: int, real_store: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("B") / "store", store)
    sound = MemoryStore(f"memory://sound-live-{code}")
    backfill(store, sound)
    broker = LivingBroker(store)
    broker.behind_bytes = None  # so that queues are searched
    broker.end_phys = max(int(row["end_phys"]) for _, row in state_of(sound).queues())
    disk = BadSectors(monkeypatch)
    disk.code = code
    disk.break_all(fullest_queue(store)[1])
    memory, stop = MemoryStore(f"memory://live-{code}"), threading.Event()
    ended = threading.Timer(TIMEOUT_S, stop.set)

    def look(state: CatalogState) -> None:
        if state.cursor.phys >= broker.end_phys:
            stop.set()

    ended.start()
    with open_broker_store(store) as opened:
        Offloader(
            opened,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            replace(SMALL, batch_age_ms=50),
            topic_filter=FILTER,
            offsets_source=broker.offsets,
            environment=Environment(committed=look),
        ).run(stop, follow=True)
    ended.cancel()
    broker.close()
    assert disk.reads > 0
    assert state_of(memory).cursor.phys == broker.end_phys
