"""`tiered run` beside a broker with a short retention: a damaged new object is whole again before the broker deletes
its messages."""

import os
from pathlib import Path

import pytest

from tests.archive.queue_reader import QueueReader
from tests.integration.client_scene import broker_config, until
from tests.integration.fault_scene import delete_old_files
from tests.integration.live import LogView, Sidecar, batches_of
from tests.integration.live_scene import Load, Producer, Scene, beside_broker, drained
from tests.maintenance.damage import flip
from tests.servers.running_store import RunningStore
from tests.servers.store_directory import StoreDirectory
from tiered.archive.run_passes import LivingRuns, Window
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_reader import load

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ROUNDS = 2
RETENTION = {"fileReservedTime": 1}
SETTINGS = {
    "TIERED_SCRUB__EVERY_MS": 2000,
    "TIERED_SCRUB__CYCLE_MS": 60_000,  # finds what was damaged after the new object had been read
    "TIERED_OFFLOAD__BATCH_AGE_MS": 1000,
}


def scrubbed(sidecar: Sidecar) -> dict[str, int]:
    """The status of scrub, once the admin server answers."""
    found: dict[str, int] = {}

    def is_known() -> bool:
        found.update(sidecar.status().get("scrub") or {})
        return bool(found)

    until(is_known, "the admin server does not answer", 60)
    return found


def damaged(sidecar: Sidecar) -> tuple[int, int]:
    """Flip a bit of a block and of a tail of objects that no scrub has read; how many, and where their rows end."""
    store, found = sidecar.open_archive(), dict[str, int]()

    def are_new() -> bool:
        state, checked = load(store), scrubbed(sidecar)["checkedVersion"]
        new = LivingRuns(store, state).objects(Window(checked + 1, state.version))
        found.update({key: int(new[key].place["end_phys"]) for key in list(new)[-2:]})
        return len(found) >= 2

    until(are_new, "nothing is archived", 30)
    for number, key in enumerate(found):
        flip(store, key, (40, -60)[number % 2])
    return len(found), max(found.values())


def keep(sidecar: Sidecar, kept: Path) -> None:
    """Links to the broker's files: what the archive must have."""
    kept.mkdir(exist_ok=True)
    for file in (sidecar.broker.store / "commitlog").iterdir():
        if not (kept / file.name).exists():
            os.link(file, kept / file.name)


@pytest.mark.parametrize("kind", ["file", "minio"])
def test_a_flipped_bit_is_healed_before_the_broker_deletes_its_copy(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    objects: RunningStore | StoreDirectory = StoreDirectory(tmp_path / "objects")
    if kind == "minio":
        objects = request.getfixturevalue("minio_url")
    scene = Scene(config=broker_config() | RETENTION, settings=SETTINGS)
    kept, log, flipped = tmp_path / "kept", tmp_path / "mq" / "store" / "commitlog", 0
    with beside_broker(scene, tmp_path, objects) as sidecar:
        sidecar.start()
        sidecar.wait_until_following(60)
        with Producer(sidecar.broker, scene, Load(1 << 30, per_second=800), tmp_path / "load.log") as load_:
            for _ in range(ROUNDS):
                count, end_phys = damaged(sidecar)
                flipped += count
                until(
                    lambda: scrubbed(sidecar)["healed"] >= flipped,  # noqa: B023
                    "the damage is not healed",
                    100,
                )
                assert min(int(file.name) for file in log.iterdir()) < end_phys, "the broker had it"
                until(
                    lambda: int(sorted(log.iterdir())[-2].name) > end_phys,  # noqa: B023
                    "no new file",
                    60,
                )
                keep(sidecar, kept)
                delete_old_files(sidecar.broker, end_phys)
            sent = load_.finish(60, now=True)
        sidecar.wait_until_archived(60)
        status = scrubbed(sidecar)
        assert (status["healed"], status["damaged"]) == (flipped, 0), status
        keep(sidecar, kept)
        drained(sidecar)
        store, count = sidecar.open_archive(), 0
        state, view = load(store), LogView(CommitLog([kept]))
        for queue in state.visible_queues():
            reader = QueueReader(store, state, queue)
            assert reader.min_offset == 0
            for batch in batches_of(reader):
                assert batch.gap is None
                assert view.difference(batch, queue) == ""
                count += len(batch) if queue.topic.startswith("live") else 0
        assert count == sent.acked
