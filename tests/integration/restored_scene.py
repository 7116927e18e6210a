"""What the archive has of a log that a broker lost: equal to the log as it was, through garbage collection."""

import time
from dataclasses import dataclass
from pathlib import Path

from tests.archive.queue_reader import QueueReader
from tests.catalog.collection import run_gc
from tests.integration.live import LogView, Sidecar, batches_of, compare_with_broker
from tests.integration.live_scene import CHECK_TIMEOUT_S, Load, Scene
from tests.integration.live_stories import restore_older_copy, send
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.hidden_history import history_state
from tiered.object_store.wrapper import StoreWrapper

GRACE_MS = 72 * 3_600_000
DIVERGED_GRACE_MS = 30 * 24 * 3_600_000
ALERT_S_MAX = 120


class Later(StoreWrapper):
    """The same bucket 72 hours later."""

    def clock_ms(self, prefix: str = "") -> int:
        """72 hours after the bucket's time."""
        return self._store.clock_ms(prefix) + GRACE_MS


def collected_later(sidecar: Sidecar) -> int:
    """Collect garbage 72 hours later; the number of objects that were deleted."""
    store = Later(sidecar.open_archive())
    plan = run_gc(
        store,
        load(store),
        apply=True,
        grace_ms=GRACE_MS,
        diverged_grace_ms=DIVERGED_GRACE_MS,
        clock=store.clock_ms,
    )
    return len(plan.delete)


def lost_messages(sidecar: Sidecar, newer: Path, log_history: int) -> int:
    """Read all messages that only ``log_history`` has, and compare them with the log of ``newer``; how many."""
    store = sidecar.open_archive()
    state = history_state(store, load(store), log_history)
    count = 0
    with open_broker_store(newer) as broker:
        log = LogView(broker.commit_log)
        for key in state.visible_queues():
            for batch in batches_of(QueueReader(store, state, key)):
                assert log.difference(batch, key) == ""
                count += len(batch)
    return count


@dataclass(frozen=True)
class Restored:
    """``stopped``: whether the sidecar stopped and asked. ``alert_s``: from the broker's start until an alert's
    condition held. ``lost``: messages of the earlier log, found equal, ``deleted`` objects 72 hours later."""

    stopped: bool
    alert_s: float
    lost: int
    deleted: int


def a_broker_is_restored(sidecar: Sidecar, scene: Scene, kept: Load, lost: Load) -> Restored:
    """The whole story, to a clean end."""
    newer = restore_older_copy(sidecar, scene, kept, lost)
    begun_s = time.monotonic()
    before = load(sidecar.open_archive())
    stopped = False
    while True:
        if sidecar.metric("rocketmq_tiered_store_diverged_objects"):
            break
        if sidecar.status().get("state") == "blocked: archive":
            assert sidecar.metric("rocketmq_tiered_store_up") == 0
            assert "archive.replace_log" in sidecar.log.read_text()
            stopped = True
            break
        assert time.monotonic() < begun_s + ALERT_S_MAX, sidecar.log.read_text()[-3000:]
        time.sleep(0.2)
    alert_s = time.monotonic() - begun_s
    if stopped:
        time.sleep(3)
        after = load(sidecar.open_archive())
        assert after.cursor == before.cursor and not after.log_histories, "nothing was changed"
        sidecar.kill()
        sidecar.settings = {**sidecar.settings, "TIERED_ARCHIVE__REPLACE_LOG": "true"}
        sidecar.start()
    send(sidecar, scene, kept)
    sidecar.wait_until_archived(120)
    assert sidecar.stop() == 0, sidecar.log.read_text()[-2000:]
    deleted = collected_later(sidecar)
    found = lost_messages(sidecar, newer, 1)
    verified = sidecar.tiered("verify", sidecar.url, "--full", timeout_s=CHECK_TIMEOUT_S)
    assert verified.returncode == 0, verified.stdout[-2000:]
    sidecar.broker.broker.stop(timeout_s=60)
    compare_with_broker(sidecar)
    return Restored(stopped, alert_s, found, deleted)
