"""Damage at rest and what mends it, and a store made from the archive: the real scrub, repair and restore."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from rocketmq_tiered.maintenance.repair.repair import apply_repair, plan_repair
from rocketmq_tiered.maintenance.restore.restoring import FileBytes, RestoreRequest, Restoring
from rocketmq_tiered.maintenance.scrub import ScrubTask
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.fetcher.broker_store_writer import FILE_BYTES, QUEUE_UNITS
from tests.maintenance.damage import flip
from tests.world.actors import Actor
from tests.world.broker_model import BATCHES, LIGHT
from tiered.archive.run_passes import LivingRuns
from tiered.archive.task import run_pass
from tiered.archive.verify_progress import VerifyProgress
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_reader import load
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.consume_queue.file_store import FileSizes
from tiered.errors import UsageError
from tiered.formats.keys import catalog_key
from tiered.settings.sections import ScrubSettings

if TYPE_CHECKING:
    from tests.world.world import World


def log_of(world: World) -> CommitLog:
    """The broker's."""
    return CommitLog([world.broker.store.path / "commitlog"])


class Scrub(Actor):
    """A bit of an object flips at rest, and the scrub of an owner puts another object in its place. No other actor acts
    at that time; readers that keep an earlier version find its bytes as they were."""

    name = "scrub"

    def act(self) -> None:
        world = self.world
        if not (free := world.free_writers(compared=False)):
            return
        writer = free[0]
        since = max(0, writer.state.version - 9)
        pages = LivingRuns(world.archive, writer.state).between(since + 1, writer.state.version)
        if keys := sorted({key for page in pages for key in page.chunk.object_keys}):
            with self._flipped(world.random.choice(keys)):
                commits = MaintenanceCommit(self.store, writer, world.clock)
                saved = VerifyProgress(clock=world.clock)
                saved.verified = since, ""
                with closing(log_of(world)) as log:
                    task = ScrubTask(commits, ScrubSettings(), saved, log, world.clock)
                    run_pass(task, lambda: writer.state if writer.is_claimed else None)
                world.counts["objects healed"] += task.status.healed

    @contextmanager
    def _flipped(self, key: str) -> Iterator[None]:
        """One bit: of any place, or of the tail."""
        world, size = self.world, len(self.world.archive.get(key))
        at = world.random.choice((size - 60, world.random.randrange(size)))
        with world.alone():
            flip(world.archive, key, at)
            try:
                yield
            finally:
                flip(world.archive, key, at)


def damaged_and_repaired(world: World) -> None:
    """One bit of the catalog flips: a repair loses no message. What key compaction dropped it may name as lost, where
    only the damaged page knew of it."""
    archive, state = world.archive, load(world.archive)
    keys = [catalog_key(version) for version in range(max(1, state.version - 9), state.version + 1)]
    keys += [state.root.key, *(page.key.partition(":")[0] for page in state.pages)]
    keys += [one.key for one in state.indexes] + [*state.state_objects.values()]
    key = world.random.choice([key for key in keys if key])
    flip(archive, key, len(archive.get(key)) // 2)
    world.trace("repair", f"of {key}")
    with closing(log_of(world)) as log:
        repair = plan_repair(archive, (CLUSTER, BROKER), world.now_ms, log=log, applies=True)
    rules = world.invariants
    lost = [one for one in repair.lost if not all(rules.may_be_absent(one[0], at) for at in range(*one[1:]))]
    assert not lost, f"{key} is damaged: {lost[:3]} are lost"
    if repair.is_needed:
        apply_repair(repair)
        world.counts["repairs"] += 1
    rules.new_chain_begins()


def restored_as_it_was(world: World) -> None:
    """In a store made from the archive each queue has every visible record at its offset. A log that begins at 0 has no
    place for what was deleted: then records move."""
    state, sizes = load(world.archive), FileBytes(FILE_BYTES, FileSizes(QUEUE_UNITS * 20))
    target = Path(mkdtemp(dir=world.directory)) / "restored"
    request = RestoreRequest(target, state, sizes)
    try:
        Restoring(world.archive, request).run()
    except UsageError:
        Restoring(world.archive, replace(request, is_compact=True)).run()
    for queue in state.visible_queues():
        if queue.topic not in (BATCHES, LIGHT):
            folder = target / "consumequeue" / queue.topic / str(queue.queue_id)
            for offset, record in world.invariants.rows(state, queue).items():
                first, at = divmod(offset, QUEUE_UNITS)
                units = (folder / f"{first * QUEUE_UNITS * 20:020d}").read_bytes()
                phys, size = struct.unpack_from(">qi", units, at * 20)
                file, begin = divmod(phys, FILE_BYTES)
                log = (target / "commitlog" / f"{file * FILE_BYTES:020d}").read_bytes()
                found = log[begin : begin + 28] + record[28:36] + log[begin + 36 : begin + size]
                assert found == record, f"{queue} offset {offset} is not restored"
    world.counts["restores"] += 1
