"""Archives of real brokers' stores after damage: `tiered repair` restores them, and a writer continues."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.maintenance.damage import flip
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix, catalog_key
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore

Run = Callable[..., tuple[int, str, str]]
NAMES = ("--cluster", CLUSTER, "--broker", BROKER)


def lose_catalog(store: ObjectStore) -> None:
    store.delete([info.key for prefix in ("catalog/", "pages/") for info in store.list(prefix)])


def damage_much(store: ObjectStore) -> None:
    """The newest commit, its root, an index file, a table of the broker, a tail and a block."""
    state = load(store)
    objects = sorted(info.key for prefix in ("data/", "sets/") for info in store.list(prefix))
    flip(store, catalog_key(state.version), -60)
    flip(store, state.root.key, -3)
    for index in state.indexes[:1]:
        flip(store, index.key, -10)
    for key in list(state.state_objects.values())[:1]:
        flip(store, key, -3)
    flip(store, objects[1], -60)
    flip(store, objects[-1], 40)


@pytest.mark.parametrize("damage", [lose_catalog, damage_much])
@pytest.mark.parametrize("name", sweep(["C", "E", "F", "H2", "K"], fast=["E"]))
@pytest.mark.integration
def test_a_damaged_archive_is_repaired(
    name: str,
    damage: Callable[[ObjectStore], None],
    real_store: Callable[[str], Path],
    tmp_path: Path,
    run: Run,
) -> None:
    directory, root = real_store(name), FileStore(tmp_path)
    backfill(directory / "store", root)
    store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    state = load(store)
    deleted = {queue for queue, _ in state.queues()} - {*state.visible_queues()}
    damage(store)
    url, log = f"file://{tmp_path}", ("--store", str(directory / "store"))
    code, out, _ = run("repair", url, *NAMES, *log)
    assert code == 0 and "would be repaired: no message lost" in out, out
    assert run("repair", url, *NAMES, *log, "--apply")[0] == 0
    report = verify_archive(store, depth="full")
    assert report.anomalies == [], report.anomalies[:3]
    assert check_against_truth(root, directory, name, deleted=deleted) > 400
    assert run("repair", url)[1].strip().endswith("nothing to repair")
    backfill(directory / "store", root, instance="next")
    assert verify_archive(store, depth="full").anomalies == []
    assert check_against_truth(root, directory, name, deleted=deleted) > 400
    code, out, _ = run("ls", url, *NAMES, "--quarantine", "--json")
    assert code == 0 and len(json.loads(out)["quarantine"]) == (3 if damage is damage_much else 0)


@pytest.mark.integration
def test_what_the_broker_deleted_is_repaired_from_the_pins_of_a_stopped_process(
    real_store: Callable[[str], Path], tmp_path: Path, run: Run
) -> None:
    directory, root = real_store("F"), FileStore(tmp_path / "archive")
    backfill(directory / "store", root)
    store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    broker, pins = tmp_path / "broker" / "store", tmp_path / "state" / "pins"
    shutil.copytree(directory / "store", broker)
    pins.mkdir(parents=True, mode=0o700)
    first, *_ = sorted((broker / "commitlog").iterdir())
    shutil.move(first, pins / first.name)
    flip(store, min(info.key for prefix in ("data/", "sets/") for info in store.list(prefix)), 40)
    url, log = f"file://{tmp_path}/archive", ("--store", str(broker))
    assert run("repair", url, *log)[0] == 1
    code, out, _ = run("repair", url, *log, "--state-dir", str(tmp_path / "state"), "--apply")
    assert code == 0 and "no message lost" in out, out
    assert verify_archive(store, depth="full").anomalies == []
    assert check_against_truth(root, directory, "F") > 400
