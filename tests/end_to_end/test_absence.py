"""What cannot be seen is not taken for what is not there: archives of which a part is gone, or cannot be read by this
program, and what each command makes of them. Nothing is deleted, and the one command that the answer names brings every
message back."""

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import fastcrc
import pytest

from rocketmq_tiered.maintenance.repair.abandonment import abandon
from rocketmq_tiered.maintenance.repair.repair import apply_repair, plan_repair
from rocketmq_tiered.process.instance import ArchiveMarker
from rocketmq_tiered.server.mount.membership import Membership
from rocketmq_tiered.server.mount.mounted_archive import MountedArchive, MountPlace
from rocketmq_tiered.server.mount.node_lease import BrokerName
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, backfill
from tests.maintenance.damaged_archive import Truth, messages
from tests.process.sidecar import Sidecar
from tests.servers.running_store import RunningStore
from tests.uploader.small_broker import FILE_BYTES, SmallBroker
from tiered.archive import verify_listing
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load, read_commit
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.clock import Clock
from tiered.errors import ArchiveDamagedError, CatalogLostError, TieredError
from tiered.formats.container import HEADER
from tiered.formats.keys import archive_prefix, catalog_key, state_key
from tiered.formats.segment_layout import TRAILER_BYTES
from tiered.formats.state_object import encode_state
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.memory import MemoryStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import ObjectStoreSettings, Settings
from tiered.timestamps import wall_ms

Run = Callable[..., tuple[int, str, str]]
STORE = "H2"
OTHER = "another"
TEN_DAYS_S = 10 * 86_400
KEPT = ("data/", "sets/", "state/", "timer/")


def without(*prefixes: str) -> Callable[[ObjectStore], None]:
    def damage(store: ObjectStore) -> None:
        store.delete([info.key for prefix in prefixes for info in store.list(prefix)])

    return damage


def without_newest_messages(store: ObjectStore) -> None:
    """The newest commit that names messages is gone, with those after it."""
    head = version = load(store).version
    while not len(read_commit(store, version).draft.runs):
        version -= 1
    store.delete([catalog_key(one) for one in range(version, head + 1)])


def without_commit(after_root: int) -> Callable[[ObjectStore], None]:
    def damage(store: ObjectStore) -> None:
        store.delete([catalog_key(load(store).root.version + after_root)])

    return damage


def in_format_3(store: ObjectStore) -> None:
    """Every commit, page, table and segment as another program's."""
    for info in list(store.list("")):
        data = bytearray(store.get(info.key))
        if info.key.startswith(("data/", "sets/")):
            trailer = data[-TRAILER_BYTES:]
            trailer[20:22], trailer[24:28] = (3).to_bytes(2, "little"), bytes(4)
            trailer[24:28] = fastcrc.crc32.iscsi(bytes(trailer)).to_bytes(4, "little")
            data[-TRAILER_BYTES:] = trailer
        elif not info.key.startswith("index/"):
            data[8:10] = (3).to_bytes(2, "little")
            data[HEADER.size - 4 : HEADER.size] = fastcrc.crc32.iscsi(
                bytes(data[: HEADER.size - 4])
            ).to_bytes(4, "little")
        store.delete([info.key])
        store.put_if_absent(info.key, [bytes(data)])


@dataclass(frozen=True)
class Scene:
    """How an archive is damaged; the state of `tiered run` beside the broker's whole log, and its exit code after
    SIGTERM; the exit codes of the commands in the order of COMMANDS; what all refusals say."""

    damage: Callable[[ObjectStore], None]
    state: str
    run: int
    codes: tuple[int, ...]
    says: str = ""
    broker: str = BROKER


COMMANDS = (
    "backfill",
    "verify",
    "verify --full",
    "repair",
    "gc",
    "gc --apply",
    "doctor",
    "ls",
    "restore",
    "mount",
)
SEEN = (0, 1, 1, 0, 0, 0, 0, 0, 0, 2)
"""The exit codes where readers see an archive (which is not retired, so that it cannot be mounted)."""
REFUSED = (1, 1, 1, 0, 1, 1, 1, 1, 1, 1)
LOST, DAMAGED = "the catalog is lost", "tiered repair"
SCENES = {
    # Backfill and restore: as far as the catalog says, a writer has committed some seconds ago.
    "head commit gone": Scene(without_newest_messages, "following", 0, (5, 1, 1, 0, 0, 0, 1, 0, 2, 2)),
    "middle commit gone": Scene(without_commit(-1), "following", 0, SEEN),
    "pages gone": Scene(without("pages/"), "following", 0, SEEN),
    "state gone": Scene(without("state/"), "following", 0, (0, 1, 1, 0, 0, 0, 0, 1, 1, 2)),
    "commit after the root gone": Scene(without_commit(1), "damaged", 1, REFUSED, DAMAGED),
    "catalog gone": Scene(without("catalog/"), "catalog lost", 1, REFUSED, LOST),
    "all but data gone": Scene(
        without("catalog/", "pages/", "state/", "index/"), "catalog lost", 1, REFUSED, LOST
    ),
    "other major format": Scene(
        in_format_3, "foreign format", 2, (2, 2, 2, 2, 2, 2, 1, 2, 2, 2), "reads format 3.x"
    ),
    "other broker's objects": Scene(
        without("catalog/", "pages/"),
        "catalog lost",
        1,
        (1, 1, 1, 2, 1, 1, 1, 1, 1, 1),
        f"{CLUSTER}/{BROKER}",
        OTHER,
    ),
    "empty": Scene(without(""), "following", 0, (0, 3, 3, 3, 3, 3, 0, 3, 3, 3)),
}


@dataclass(frozen=True)
class Place:
    """A copy of the archive, and the broker's store."""

    home: Path
    scene: Scene
    truth: Truth
    url: str
    options: StoreOptions = field(default_factory=lambda: StoreOptions(ObjectStoreSettings()))

    @property
    def names(self) -> tuple[str, ...]:
        return "--cluster", CLUSTER, "--broker", self.scene.broker

    @property
    def store(self) -> ObjectStore:
        return PrefixedStore(open_store(self.url, self.options), archive_prefix(CLUSTER, self.scene.broker))

    def kept(self) -> set[str]:
        return {info.key for prefix in KEPT for info in self.store.list(prefix)}


@pytest.fixture(scope="module")
def whole(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    home = tmp_path_factory.mktemp("whole")
    source = real_store(STORE)
    shutil.copytree(source / "store", home / "store")
    shutil.copy(source / "broker.conf", home / "broker.conf")
    small = replace(SMALL, batch_bytes=128 << 10, split_bytes=48 << 10)
    root = FileStore(home / "archive")
    backfill(home / "store", root, settings=small)
    return home, messages(PrefixedStore(root, archive_prefix(CLUSTER, BROKER)))


@pytest.fixture
def place(whole: tuple[Path, Truth], name: str, tmp_path: Path) -> Place:
    """A damaged copy whose objects are ten days old."""
    (home, truth), scene = whole, SCENES[name]
    copy = tmp_path / "copy"
    shutil.copytree(home, copy)
    scene.damage(PrefixedStore(FileStore(copy / "archive"), archive_prefix(CLUSTER, BROKER)))
    if scene.broker != BROKER:
        shutil.move(copy / "archive" / CLUSTER / BROKER, copy / "archive" / CLUSTER / scene.broker)
    then = time.time() - TEN_DAYS_S
    for path in (copy / "archive").rglob("*"):
        os.utime(path, (then, then))
    return Place(copy, scene, {} if name == "empty" else truth, f"file://{copy}/archive")


def answers(place: Place, run: Run, tmp_path: Path) -> Iterator[tuple[str, int, str]]:
    """(command, exit code, what it says) of all commands but `run`."""
    named = (place.url, *place.names)
    lines = {
        "verify": ("verify", *named),
        "verify --full": ("verify", "--full", *named),
        "repair": ("repair", *named),
        "gc": ("gc", *named),
        "gc --apply": ("gc", "--apply", *named),
        "doctor": ("doctor", *named),
        "ls": ("ls", *named),
        "restore": ("restore", place.url, str(tmp_path / "restored"), *place.names),
        "backfill": ("backfill", str(place.home / "store"), *named, "--take-over"),
    }
    yield "mount", *mounted(place)
    for command, line in lines.items():  # the backfill is the last one
        code, out, err = run(*line)
        yield command, code, out + err


def mounted(place: Place) -> tuple[int, str]:
    """What `tiered mount` gets when it takes the broker."""
    store = open_store(place.url, place.options)
    member = Membership(store, "node", Clock())
    settings = Settings(object_store=place.options.settings)
    whole = MountPlace(place.url, store, settings, member, "127.0.0.1", ())
    try:
        asyncio.run(MountedArchive.take(whole, BrokerName(CLUSTER, place.scene.broker), 0))
    except TieredError as error:
        return error.exit_code, str(error)
    return 0, ""


@pytest.mark.parametrize("name", SCENES)
def test_every_command_answers_deletes_nothing_and_one_brings_all_back(
    place: Place, name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_listing, "SETTLE_S", 0.01)  # no writer runs whose commits are to be awaited
    check(place, run, tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["catalog gone"])
def test_the_same_on_minio(
    place: Place, minio_url: RunningStore, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in minio_url.environment().items():
        monkeypatch.setenv(name, value)
    there = replace(place, url=minio_url.fresh_bucket(), options=minio_url.options())
    for info in place.store.list(""):
        there.store.put_if_absent(info.key, [place.store.get(info.key)])
    check(there, run, tmp_path)


def check(place: Place, run: Run, tmp_path: Path) -> None:
    before = place.kept()
    found = {command: (code, text) for command, code, text in answers(place, run, tmp_path)}
    codes = tuple(found[command][0] for command in COMMANDS)
    assert codes == place.scene.codes, found
    assert place.kept() >= before, "nothing is deleted"
    for command, code in zip(COMMANDS, codes, strict=True):
        assert code == 0 or place.scene.says in found[command][1], (command, found[command])
    if place.scene.codes[COMMANDS.index("repair")] == 0:
        code, out, _ = run("repair", place.url, *place.names, "--apply")
        assert code == 0, out
        assert messages(place.store) == place.truth
        code, out, _ = run("verify", place.url, *place.names)
        assert code == 0, out
        code, out, _ = run("gc", "--apply", place.url, *place.names)
        assert code == 0, out
        assert messages(place.store) == place.truth


@pytest.mark.parametrize("name", ["head commit gone"])
def test_gc_keeps_messages_that_no_commit_names_until_they_are_committed(
    place: Place, name: str, run: Run
) -> None:
    """Another writer has claimed the archive since: the epoch of the object is fenced."""
    clock_ms = wall_ms() + 3_600_000
    writer = CatalogWriter(
        place.store,
        cluster=CLUSTER,
        broker=BROKER,
        instance="next",
        kind="run",
        clock=Clock(wall_ms=lambda: clock_ms),
    )
    writer.load()
    writer.claim(take_over=True)
    writer.release()
    before = place.kept()
    code, out, _ = run("gc", "--apply", place.url, *place.names)
    assert code == 1 and " 83 messages that no commit names: it has messages beyond the end" in out
    assert place.kept() == before
    quarantine = json.loads(run("ls", "--quarantine", "--json", place.url, *place.names)[1])["quarantine"]
    assert quarantine and {*quarantine} <= before
    version = load(place.store).version
    assert run("gc", "--apply", place.url, *place.names)[0] == 1 and load(place.store).version == version
    assert run("backfill", str(place.home / "store"), place.url, *place.names)[0] == 0
    assert messages(place.store) == place.truth
    code, out, _ = run("gc", "--apply", place.url, *place.names)
    assert code == 0 and before - place.kept() >= {*quarantine}, out
    assert not load(place.store).pending_deletions.keys() & {*quarantine}
    assert messages(place.store) == place.truth


@pytest.mark.parametrize("has_log", [True, False])
def test_a_writer_records_no_gap_where_its_newest_commits_are_missing(tmp_path: Path, has_log: bool) -> None:
    """The broker's log gives their messages again; without these a start is refused until a repair has adopted them."""
    broker, root = SmallBroker(tmp_path / "store"), MemoryStore()
    store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    broker.send(300)
    backfill(broker.path, root)
    before = load(store)
    broker.send(300)
    backfill(broker.path, root)
    truth = messages(store)
    store.delete([catalog_key(one) for one in range(before.version + 1, load(store).version + 1)])
    if not has_log:
        broker.expire(before.cursor.phys // FILE_BYTES + 2)
        with pytest.raises(ArchiveDamagedError, match=r"300 messages in 1 object.*tiered repair"):
            backfill(broker.path, root)
        assert load(store).version == before.version, "no claim, and no gap"
        apply_repair(plan_repair(store, (CLUSTER, BROKER), wall_ms(), applies=True))
        assert messages(store) == truth
    broker.send(10)
    backfill(broker.path, root)
    found = messages(store)
    assert {queue: len(rows) for queue, rows in found.items()} == {
        queue: len(rows) + 10 for queue, rows in truth.items()
    }
    assert not len(load(store).gaps)
    assert verify_archive(store, depth="full").anomalies == []


@pytest.mark.parametrize("name", ["catalog gone"])
def test_a_lost_archive_is_abandoned_only_by_its_number_of_objects_and_kept(
    place: Place, name: str, run: Run
) -> None:
    names = CLUSTER, BROKER
    before = {info.key for info in place.store.list("")}
    with pytest.raises(CatalogLostError, match=f"--new-archive --abandon {len(before)}$"):
        abandon(place.store, names, len(before) - 1, wall_ms())
    abandon(place.store, names, len(before), wall_ms())
    assert run("backfill", str(place.home / "store"), place.url, *place.names)[0] == 0
    assert run("gc", "--apply", place.url, *place.names)[0] == 0
    assert {info.key for info in place.store.list("")} > before
    assert json.loads(run("ls", "--quarantine", "--json", place.url, *place.names)[1])[
        "quarantine"
    ] == sorted(before)
    assert run("verify", "--full", place.url, *place.names)[0] == 0
    assert messages(place.store) == place.truth


@pytest.mark.parametrize("name", ["catalog gone"])
def test_a_deleted_topic_is_not_shown_again_without_its_name(
    place: Place, whole: tuple[Path, Truth], run: Run
) -> None:
    """Its records are in data objects, but the broker's newest archived table lacks it."""
    store, table = place.store, encode_state("topics", {"t_plain": {}, "t_compact_hot": {}})
    store.delete([info.key for info in store.list("pages/")])
    store.put_if_absent(state_key("topics", 2, 1, "abc"), [table])
    code, out, _ = run("repair", "--apply", place.url, *place.names)
    assert (
        code == 0
        and "unknown: it is not known whether the broker has deleted 1 topic with 480 messages: t_compact_cold"
        in out
    )
    assert load(store).state_objects["topics"] == state_key("topics", 2, 1, "abc")


@pytest.mark.integration
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("name", SCENES)
def test_run_names_the_state_and_begins_only_where_nothing_is(
    place: Place, name: str, has_state: bool
) -> None:
    before = place.kept()
    expected = "catalog lost" if has_state and name == "empty" else place.scene.state
    if has_state:
        ArchiveMarker(place.home / "state", place.store.url).create()
    sidecar = Sidecar(place.home, *place.names, "--take-over")
    try:
        sidecar.wait_until(lambda: sidecar.report().get("state", "").startswith(expected))
        if expected == "following":
            sidecar.wait_archived()
        else:
            assert sidecar.get("/ready")[0] == 503
            word = expected.partition(":")[0]
            assert re.search(rf'_state{{state="{word}"[^}}]*}} 1\.0', sidecar.get("/metrics")[1])
    finally:
        code = sidecar.end(signal.SIGTERM)
    assert code == (place.scene.run if expected == place.scene.state else 1)
    assert place.kept() >= before
    if expected == "following" and name != "empty":
        assert messages(place.store) == place.truth
