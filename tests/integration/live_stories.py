"""What happens to a broker in its life, at any size: the stories that live tests and soak tests tell alike.

Owns the order of events. Does not own the end of a story (live_scene.finish) nor judging it (the tests).
"""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, cut_tail

SETTLE_S = 4.0
BODY_BYTES = 500
THREADS = 4
SLOWEST_BYTES_PER_S = 1 << 20


@dataclass(frozen=True)
class LiveSize:
    """How much is sent, and how long the object store is away."""

    messages: int
    per_second: int
    outage_s: float
    after_recreation: int
    batch: int = 1

    @property
    def send_timeout_s(self) -> float:
        """How long sending may take at worst."""
        return 240 + 4 * self.messages / self.per_second + self.outage_s


@dataclass(frozen=True)
class SentCount:
    """How many messages the broker stored: acknowledged ones surely, failed sends perhaps."""

    stored_at_least: int
    stored_at_most: int


def everything_happens(sidecar: Sidecar, scene: Scene, size: LiveSize) -> SentCount:
    """While a producer sends: the object store goes away, the broker restarts, the sidecar is killed. Then a topic
    is deleted and recreated, and more is sent. Ends when all is archived."""
    sidecar.start()
    load = Load(size.messages, BODY_BYTES, THREADS, size.per_second, size.batch)
    with Producer(sidecar.broker, scene, load, sidecar.directory / "producer.out") as producer:
        time.sleep(SETTLE_S)
        sidecar.object_server.stop()
        time.sleep(size.outage_s)
        sidecar.object_server.start()
        sidecar.broker.broker.stop(timeout_s=40)
        sidecar.broker.broker.start()
        time.sleep(SETTLE_S / 2)
        assert producer.is_running, "everything was sent before everything had happened: send more, or slower"
        sidecar.kill()
        sidecar.start()
        first = producer.finish(size.send_timeout_s)
    sidecar.wait_until_archived(120)
    sidecar.broker.delete_topic("live1")
    sidecar.broker.create_topic("live1", scene.queues)
    load = Load(size.after_recreation, BODY_BYTES, THREADS, batch=size.batch)
    with Producer(sidecar.broker, scene, load, sidecar.directory / "producer.out") as producer:
        second = producer.finish(size.send_timeout_s)
    sidecar.wait_until_archived(120)
    acked = first.acked + second.acked
    return SentCount(acked, acked + first.failed + second.failed)


def lose_the_tail(sidecar: Sidecar, byte_count: int) -> None:
    """Kill the ASYNC_FLUSH broker, as a power failure does, cut its log's tail, and start it again."""
    sidecar.broker.broker.kill()
    cut_tail(sidecar.broker.store, byte_count)
    sidecar.broker.broker.start()


def send(sidecar: Sidecar, scene: Scene, load: Load) -> int:
    """Messages acknowledged by the end of a whole load."""
    with Producer(sidecar.broker, scene, load, sidecar.directory / "producer.out") as producer:
        return producer.finish(240 + slowest_s(load)).acked


def slowest_s(load: Load) -> float:
    """How long a large load takes on a busy machine."""
    return load.messages * load.body_bytes / SLOWEST_BYTES_PER_S


def restore_older_copy(sidecar: Sidecar, scene: Scene, load: Load, lost: Load) -> Path:
    """Archive ``load`` and ``lost``, then start the broker again on a copy of its store without ``lost``. The sidecar
    runs all the time. Returns the store as it was."""
    store = sidecar.broker.store
    older, newer = (store.with_name(f"{store.name}-{name}") for name in ("older", "newer"))
    sidecar.start()
    send(sidecar, scene, load)
    sidecar.wait_until_archived(120)
    sidecar.broker.broker.stop(timeout_s=60)
    subprocess.run(["cp", "-r", "--sparse=always", store, older], check=True)
    sidecar.broker.broker.start()
    send(sidecar, scene, lost)
    sidecar.wait_until_archived(120 + slowest_s(lost))
    sidecar.broker.broker.stop(timeout_s=60)
    store.rename(newer)
    older.rename(store)
    sidecar.broker.broker.start()
    return newer
