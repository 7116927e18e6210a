"""Scrub reads back what was stored, and puts a whole object in the place of a damaged one while the broker has it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.maintenance.compaction_scene import Scene
from tests.maintenance.damage import flip
from tests.maintenance.scrubbed import DAY_MS, Scrubbed
from tests.object_store.sealed_scene import key_file, sealing
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.broker_store.commit_log import CommitLog
from tiered.formats.keys import archive_prefix, catalog_key
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("name", sweep(["C", "E", "F", "K"], fast=["E"]))
def test_a_flipped_bit_of_a_new_object_is_healed_from_the_log(
    name: str, is_sealed: bool, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    directory, inner = real_store(name), MemoryStore()
    root = sealing(inner, key_file(tmp_path / "ring", "k1") if is_sealed else None)
    root.keys(archive_prefix(CLUSTER, BROKER)).begin(())
    backfill(directory / "store", root)
    store, stored = (PrefixedStore(one, archive_prefix(CLUSTER, BROKER)) for one in (root, inner))
    keys = sorted(info.key for prefix in ("data/", "sets/") for info in store.list(prefix))
    for number, key in enumerate((keys[0], keys[-1], keys[len(keys) // 2])):
        size = len(stored.get(key))
        flip(stored, key, (size // 3, size - 60, 30)[number])
    store.delete([keys[1]])
    scrub = Scrubbed(store, CommitLog([directory / "store" / "commitlog"]))
    scrub.run()
    assert (scrub.task.status.healed, scrub.task.status.damaged, scrub.task.problem) == (4, 0, "")
    assert verify_archive(store, depth="full").anomalies == []
    assert check_against_truth(root, directory, name) > 400


def test_without_the_log_tails_are_healed_and_lost_blocks_are_named(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    one, other = scene.owner.keys[5], scene.owner.keys[9]
    flip(scene.store, one, len(scene.store.get(one)) - 70)
    flip(scene.store, other, 40)
    scrub = Scrubbed(scene.store)
    scrub.run()
    assert (scrub.task.status.healed, scrub.task.status.damaged) == (1, 1)
    assert {found.object_key for found in scrub.task.unreadable} == {other}
    assert "tiered repair" in scrub.task.problem
    assert {anomaly.key for anomaly in verify_archive(scene.store, depth="full").anomalies} == {other}


def test_a_cycle_is_spread_and_finds_what_new_objects_no_longer_show(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 30)
    scrub = Scrubbed(scene.store)
    scrub.run()
    first = scrub.task.status
    assert first.checked_version == scene.state.version and first.cycle_ms is None
    flip(scene.store, scene.owner.keys[2], -70)
    flip(scene.store, scene.state.root.key, -3)
    shares = []
    while scrub.task.status.cycle_ms is None:
        scrub.now_ms += 2 * DAY_MS
        scrub.run()
        shares.append(scrub.task.status.cycle_share)
    assert 8 <= len(shares) <= 14 and shares[:-1] == sorted(shares[:-1])
    assert scrub.task.status.healed == 1
    assert f"such as root: {scene.state.root.key}" in scrub.task.problem


def test_a_newest_commit_that_is_missing_is_named_once_a_cycle_beside_its_writer(tmp_path: Path) -> None:
    """To the writer its own objects beyond the archive's end are uploads in progress: the commit's number tells."""
    scene = Scene(tmp_path, 3)
    scrub = Scrubbed(scene.store)
    version = scene.state.version
    newest = catalog_key(version)
    scene.store.delete([newest])
    while scrub.task.status.cycle_ms is None:
        scrub.now_ms += 2 * DAY_MS
        scrub.run()
    assert f"such as newest: {newest}: catalog version {version} is missing" in scrub.task.problem
